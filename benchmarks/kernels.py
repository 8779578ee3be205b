"""What the kernels achieve on a GPU: bytes a second beside the card's own copy bandwidth, and time beside torch's way.

    python benchmarks/kernels.py --out docs/results/kernels.json

Needs a GPU: on a CPU kernels run in Triton's interpreter, whose time says nothing about them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from autoq.formats.format import Format
    from autoq.formats.reference import Scales


SHAPE = (8192, 8192)
WEIGHTS = ("fp8", "int8", "mxfp6_e2m3", "nvfp4", "nvfp4_4over6", "mxfp4", "int4_g64", "int4_g32_asym", "int3_g64_asym")
CACHES = ("fp8_cast", "int8_token", "nvfp4", "int4_token", "int4_channel")
CONTEXT, BATCH, HEADS, KV_HEADS, HEAD_DIM = 32768, 8, 32, 8, 128


def seconds(call: Callable[[], Any], repeats: int = 20) -> float:
    """Median time of a call in seconds, by events of the stream."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return sorted(times)[len(times) // 2]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second read and written by a large copy."""
    source = torch.empty(1 << 28, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / seconds(lambda: target.copy_(source))


def weight_rows(device: torch.device) -> list[dict[str, Any]]:
    from autoq.formats import reference
    from autoq.formats.catalog import weight_format
    from autoq.kernels.decode import decode
    from autoq.kernels.encode import encode
    from autoq.kernels.product import product
    from autoq.kernels.score import score

    weight = torch.randn(SHAPE, dtype=torch.bfloat16, device=device)
    vector = torch.randn(1, SHAPE[1], dtype=torch.bfloat16, device=device)
    matrix = torch.randn(512, SHAPE[1], dtype=torch.bfloat16, device=device)
    gradient = torch.randn(1, *SHAPE, device=device)
    size, found = weight.numel(), []

    def row(kernel: str, fmt: str, moved: int, call: Callable[[], Any], torch_call: Callable[[], Any]) -> None:
        found.append(
            {"kernel": kernel, "format": fmt, "bytes": moved, "seconds": seconds(call), "torch_seconds": seconds(torch_call, 5)}
        )

    for name in WEIGHTS:
        fmt = weight_format(name)
        packed = encode(fmt, weight)
        scales = reference.fit(fmt, weight)
        row("encode", name, 2 * size + packed.nbytes, partial(encode, fmt, weight), partial(reference.encode, fmt, weight))
        row("decode", name, 2 * size + packed.nbytes, partial(decode, packed, torch.bfloat16), partial(reference.decode, packed))
        row("product, 1 token", name, packed.nbytes, partial(product, vector, packed), partial(torch.matmul, vector, weight.T))
        row("product, 512 tokens", name, packed.nbytes, partial(product, matrix, packed), partial(torch.matmul, matrix, weight.T))
        row(
            "score", name, 6 * size, partial(score, weight, gradient, [fmt], [scales]), partial(torch_score, weight, gradient, fmt, scales)
        )  # fmt: skip
    return found


def torch_score(weight: torch.Tensor, gradient: torch.Tensor, fmt: Format, scales: Scales) -> torch.Tensor:
    from autoq.formats.reference import fake_quantize

    return (gradient[0] * (fake_quantize(fmt, weight, scales) - weight)).sum(0)


def kl_rows(device: torch.device) -> list[dict[str, Any]]:
    from autoq.measure.divergence import compare_logits

    original = torch.randn(1024, 128256, dtype=torch.bfloat16, device=device)
    changed = original + 0.1 * torch.randn_like(original)
    target = torch.zeros(1024, dtype=torch.int64, device=device)

    def in_torch() -> torch.Tensor:
        p, q = original.float().log_softmax(-1), changed.float().log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1)

    moved = 2 * original.numel() * 2
    return [{"kernel": "kl", "format": "bf16 logits", "bytes": moved, "seconds": seconds(lambda: compare_logits(original, changed, target)),
             "torch_seconds": seconds(in_torch, 5)}]  # fmt: skip


def attention_rows(device: torch.device) -> list[dict[str, Any]]:
    from autoq.formats.calibration import Calibration
    from autoq.formats.catalog import kv_format
    from autoq.kernels.attention import attention
    from autoq.model.packed_tokens import PackedTokens, kernels

    x = torch.randn(BATCH, KV_HEADS, CONTEXT, HEAD_DIM, dtype=torch.bfloat16, device=device)
    query = torch.randn(BATCH, HEADS, 1, HEAD_DIM, dtype=torch.bfloat16, device=device)
    plain = seconds(lambda: torch.nn.functional.scaled_dot_product_attention(query, x, x, enable_gqa=True))
    found = []
    for name in CACHES:
        held = PackedTokens(kv_format(name), Calibration(5.0), kernels())
        held.append(x)
        cached = held.cached()
        taken = seconds(partial(attention, query, cached, cached, HEAD_DIM**-0.5))
        found.append({"kernel": "attention", "format": name, "bytes": 2 * held.nbytes, "seconds": taken, "torch_seconds": plain})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results/kernels.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "this benchmark needs a GPU: on a CPU kernels run in Triton's interpreter, whose time says nothing about them",
            file=sys.stderr,
        )
        raise SystemExit(2)
    here = Path(__file__).resolve().parent
    sys.path[:] = [p for p in sys.path if Path(p).resolve() != here]  # transformers looks for a package `kernels`: not this file
    from autoq.run_folder import write_atomically

    device = torch.device("cuda")
    bandwidth = copy_bandwidth(device)
    rows = [*weight_rows(device), *kl_rows(device), *attention_rows(device)]
    for row in rows:
        row["share_of_copy_bandwidth"] = row["bytes"] / row["seconds"] / bandwidth
        row["faster_than_torch"] = row["torch_seconds"] / row["seconds"]
    table = Table(title=f"{torch.cuda.get_device_name()}, copies at {bandwidth / 1e9:.0f} GB/s", box=None, title_justify="left")
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=140).print(table)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_bytes_per_second": bandwidth, "rows": rows}
    write_atomically(args.out, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
