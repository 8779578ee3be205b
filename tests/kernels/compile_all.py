"""Compile every kernel and specialisation for every compute capability; print registers, shared memory and spills.

Run as a script, in a process of its own without Triton's interpreter and without a GPU, with the names of kernel files or none for
all of them: the host code is called as a user calls it,
and each launch is recorded and compiled down to a cubin instead. Exit code 1 if one fails to compile or spills.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from autoq.formats import reference
from autoq.formats.calibration import Calibration
from autoq.formats.catalog import KV_FORMATS, WEIGHT_FORMATS
from autoq.formats.format import KVFormat
from autoq.kernels import attention, decode, encode, kl, launch, pack, product, score
from autoq.model.packed_tokens import Backend, PackedTokens

SHARED_KIB = {
    80: 163,
    86: 99,
    89: 99,
    90: 227,
    100: 227,
    120: 99,
}  # a program may have, CUDA C++ Programming Guide, "Compute Capabilities"
CAPABILITIES = tuple(SHARED_KIB)
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.uint8: "*u8", torch.int8: "*i8",
            torch.int32: "*i32", torch.int64: "*i64", torch.int16: "*i16"}  # fmt: skip
OPTIONS = ("enable_fp_fusion", "num_warps", "num_stages", "maxnreg")


@dataclass(frozen=True)
class Launch:
    """One specialisation: a kernel, the types of its arguments, its constants."""

    module: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def title(self) -> str:
        shown = {
            k: v
            for k, v in self.constants
            if k in ("SCALE", "RULE", "BITS", "MANTISSA", "BLOCK", "TOKENS", "K_SCALE", "K_BITS", "K_CHANNEL", "DIM")
        }
        return f"{self.kernel} {' '.join(f'{k.lower()}={v}' for k, v in shown.items())} x={dict(self.signature).get('x_ptr', '')}"


def record(calls: dict[Launch, None]) -> None:
    """Replace launching by recording."""

    def run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in self.arg_names}
        constants = {p.name: given[p.name] for p in self.params if p.is_constexpr}
        types = {
            name: "constexpr" if name in constants else POINTERS[value.dtype] if isinstance(value, torch.Tensor)
            else "fp32" if isinstance(value, float) else "i32"
            for name, value in given.items()
        }  # fmt: skip
        options = {k: v for k, v in kwargs.items() if k in OPTIONS}
        calls[
            Launch(self.fn.__module__, self.fn.__name__, tuple(types.items()), tuple(constants.items()), tuple(options.items()))
        ] = None

    JITFunction.run = run
    for module in (attention, encode, decode, kl, pack, product, score):
        module.tile = lambda device: launch.GPU_VALUES  # type: ignore[attr-defined]
    for module in (attention, product, score):
        module.interpreted = lambda: False  # type: ignore[attr-defined]


def launches() -> list[Launch]:
    """Call the host code on every format and dtype."""
    calls: dict[Launch, None] = {}
    record(calls)
    for fmt in WEIGHT_FORMATS.values():
        if fmt.is_original:
            continue
        packed = reference.encode(fmt, torch.ones(64, 4096))
        for dtype in (torch.bfloat16, torch.float32) if fmt.rule in ("absmax", "minmax") else (torch.bfloat16,):
            encode.encode(fmt, torch.ones(64, 4096, dtype=dtype))
            decode.decode(packed, dtype)
            if fmt.rule in ("absmax", "floor", "minmax"):
                for tokens in (1, 512):
                    product.product(torch.ones(tokens, 4096, dtype=dtype), packed)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        logits = torch.ones(4, 50000, dtype=dtype)
        kl.token_divergence(logits, logits, torch.zeros(4, dtype=torch.int64))
    for name in ("nvfp4", "mxfp4", "int4_g64", "int4_g128", "int8"):
        fmt = WEIGHT_FORMATS[name]
        for dtype in (torch.bfloat16, torch.float32):
            weight = torch.ones(64, 4096, dtype=dtype)
            score.score(weight, weight.unsqueeze(0), [fmt], [reference.fit(fmt, weight)])
    formats = [f for f in KV_FORMATS.values() if not f.is_original]
    pairs = [(f, f, torch.bfloat16, 128) for f in formats]
    mixed = KV_FORMATS["int4_channel"], KV_FORMATS["nvfp4"]
    pairs += [(*mixed, dtype, 256) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    pairs += [(*mixed, torch.float32, head_dim) for head_dim in (64, 128)]
    for key, value, dtype, head_dim in pairs:
        query = torch.ones(1, 8, 1, head_dim, dtype=dtype)
        mask = torch.ones(1, 256, dtype=torch.bool)
        attention.attention(query, cached(key, head_dim, dtype), cached(value, head_dim, dtype), 1.0, mask=mask, softcap=30.0)
    return list(calls)


def cached(fmt: KVFormat, head_dim: int, dtype: torch.dtype) -> attention.CachedTokens:
    held = PackedTokens(fmt, Calibration(4.0, 4.0, 4.0, torch.zeros(2, head_dim)), Backend())
    held.append(torch.ones(1, 2, 256, head_dim, dtype=dtype))
    return held.cached()


def compiled(job: tuple[Launch, int]) -> tuple[str, int, str, bool]:
    """Compile one launch for one compute capability; return (title, capability, what cuobjdump says, whether it is fine)."""
    one, capability = job
    kernel = getattr(sys.modules[one.module], one.kernel)
    source = ASTSource(kernel, dict(one.signature), {(kernel.arg_names.index(k),): v for k, v in one.constants})
    try:
        found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(one.options))
    except Exception as error:
        return one.title, capability, f"{type(error).__name__}: {error}", False
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, shared, local = (int(re.findall(rf"{key}:(\d+)", text)[-1]) for key in ("REG", "STACK", "SHARED", "LOCAL"))
    shared = max(shared, found.metadata.shared)
    fine = stack + local == 0 and shared <= SHARED_KIB[capability] * 1024
    return one.title, capability, f"{registers} registers, {shared} bytes shared, {stack + local} bytes spilled", fine


def results(jobs: list[tuple[Launch, int]]) -> Iterator[tuple[str, int, str, bool]]:
    with ProcessPoolExecutor(2) as pool:
        yield from pool.map(compiled, jobs, chunksize=4)


def main() -> None:
    files = [f"autoq.kernels.{name}" for name in sys.argv[1:]]
    jobs = [(one, capability) for one in launches() if one.module in files or not files for capability in CAPABILITIES]
    failed = 0
    for title, capability, what, fine in results(jobs):
        failed += not fine
        print(f"{'ok  ' if fine else 'FAIL'} sm_{capability} {title}: {what}", flush=True)
    print(f"{len(jobs)} compiled, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
