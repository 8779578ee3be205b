"""Write the tables of docs/export.md: what each consumer has, from the code, and what vLLM did, from its committed results.

python benchmarks/export_tables.py docs/results docs/export.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from figure import between_marks

from autoq.exporters.consumers import CONSUMERS

MIXING = {
    "free": "any anywhere",
    "one": "one for all",
    "one and skipped": "one, and layers in 16 bit",
    "two": "one for K, one for V",
}


def consumers() -> str:
    lines = ["| consumer | writes | weights | caches |", "|---|---|---|---|"]
    for name, consumer in CONSUMERS.items():
        weights = "every format" if consumer.weights is None else ", ".join(consumer.weights)
        caches = "every format" if consumer.caches is None else ", ".join(consumer.caches) or "none"
        if consumer.caches:
            caches += f" ({MIXING[consumer.mixing]})"
        lines.append(f"| {name} | {consumer.what} | {weights} | {caches} |")
    return "\n".join(lines)


VLLM = ("vllm-avx512.json", "vllm.json")


def vllm(results: dict[str, Any]) -> str:
    lines = [
        f"vLLM for CPUs on a processor with{'' if results['avx512'] else 'out'} AVX-512:", "",
        "| checkpoint or cache | vLLM | arithmetic | KL in vLLM | KL in autoq |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for row in results["rows"]:
        refused = "" if row["served"] else row["refused"].split(": ", 1)[1].strip()[:90]
        state, kernels = (
            ("served", "vLLM's kernels") if row["served"] else (f"loaded; with its own kernels: {refused}", "plain torch")
        )
        cut = f"; {row['kl_autoq_cut']:.5f} if cut off towards zero" if "kl_autoq_cut" in row else ""
        lines.append(f"| {row['what']} | {state} | {kernels} | {row['kl_vllm']:.5f} | {row['kl_autoq']:.5f}{cut} |")
    return "\n".join(lines)


def main() -> None:
    source, page = Path(sys.argv[1]), Path(sys.argv[2])
    text = between_marks(page.read_text(), "consumers", consumers())
    page.write_text(between_marks(text, "vllm", "\n\n".join(vllm(json.loads((source / name).read_text())) for name in VLLM)))


if __name__ == "__main__":
    main()
