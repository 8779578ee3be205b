"""What a profile costs beside a bare forward and backward pass of the same tokens: seconds and peak memory, as ratios in one run.

    python benchmarks/cost.py --model DIR --calib text.txt --out docs/results/cost.json

Linux only (it reads the anonymous memory of its process). The two are timed in turn, batch by batch, so that a machine whose
speed drifts does not favour either.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from autoq.allocation.space import load_space
from autoq.measure.damage import DamageScorer
from autoq.model.load import load_model, load_tokenizer, model_source
from autoq.model.text import sequences, text_sources
from autoq.model.units import find_units
from autoq.run_folder import write_atomically


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this benchmark needs Linux: /proc/self/status has no RssAnon")


class Peak:
    """The largest anonymous memory inside a block, sampled every few milliseconds."""

    def __enter__(self) -> Peak:
        self.bytes, self._running = anonymous_bytes(), True
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while self._running:
            self.bytes = max(self.bytes, anonymous_bytes())
            time.sleep(0.003)

    def __exit__(self, *_: object) -> None:
        self._running = False
        self._thread.join()


def bare_pass(model: Any, ids: torch.Tensor) -> float:
    """Seconds of a forward and backward pass with weight gradients, as one training step makes them."""
    model.requires_grad_(True)
    start = time.perf_counter()
    model(ids, labels=ids, use_cache=False).loss.backward()
    seconds = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    return seconds


def one(args: argparse.Namespace) -> dict[str, Any]:
    """Profile once in this process; `--part time` beside the bare pass, `--part memory` alone."""
    source = model_source(args.model)
    tokenizer = load_tokenizer(source)
    calib, _ = text_sources(args.calib, "stdlib")
    ids = sequences(tokenizer, calib, args.samples, 256)
    before = anonymous_bytes()
    model = load_model(source, "cpu", args.dtype)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    candidates = load_space("plain")
    scorer = DamageScorer(model, find_units(model), candidates)
    batches = ids.split(args.batch)
    facts = {
        "batch": args.batch, "sequences": len(ids), "tokens": 256, "dtype": args.dtype,
        "formats": [len(candidates.weights), len(candidates.keys), len(candidates.values)],
    }  # fmt: skip
    if args.part == "memory":
        with Peak() as peak:
            for i, batch in enumerate(batches):
                scorer.score(batch, list(range(i * args.batch, i * args.batch + len(batch))))
        return {**facts, "model_bytes": size, "peak_over_model": (peak.bytes - before) / size}
    bare_pass(model, batches[0])  # warm-up
    bare, profile = 0.0, 0.0
    for i, batch in enumerate(batches):
        bare += bare_pass(model, batch)
        start = time.perf_counter()
        scorer.score(batch, list(range(i * args.batch, i * args.batch + len(batch))))
        profile += time.perf_counter() - start
        print(f"batch {i + 1}/{len(batches)}: bare {bare:.1f} s, profile {profile:.1f} s", file=sys.stderr, flush=True)
    return {**facts, "bare_seconds": bare, "profile_seconds": profile, "profile_over_bare": profile / bare}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--calib", required=True)
    parser.add_argument("--out", type=Path, default=Path("docs/results/cost.json"))
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--part", choices=("time", "memory"), help="one measurement in this process; without it all are made")
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(one(args)))
        return
    rows = []
    for part, batch, samples in (
        ("time", 16, args.samples), ("time", 8, args.samples), ("memory", 4, 8), ("memory", 16, 32),
    ):  # fmt: skip
        command = [sys.executable, __file__, "--model", args.model, "--calib", args.calib, "--dtype", args.dtype, "--part", part]
        command += ["--batch", str(batch), "--samples", str(samples)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout))
        print(rows[-1], flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(args.out, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
