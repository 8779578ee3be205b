"""ModelOpt's search, mtq.auto_quantize, in its own environment: `peer_modelopt.py JOB.json RESULT.json` (see peers.py).

Two candidates, weights alone: int4 in groups of 64, int8 by row. The head is disabled, and excluded from the count of bits, in which it would
otherwise stay with 16. Bits are counted as ModelOpt does without being told: num_bits, without scales.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from transformers import AutoModelForCausalLM

WEIGHTS = {"int4_g64": {"num_bits": 4, "block_sizes": {-1: 64}}, "int8": {"num_bits": 8, "axis": 0}}


def candidate(weight: dict[str, Any]) -> dict[str, Any]:
    entries = [{"quantizer_name": "*", "enable": False}, {"quantizer_name": "*weight_quantizer", "cfg": weight}]
    return {"quant_cfg": entries, "algorithm": "max"}


def name_of(quantizer: Any) -> str:
    if not quantizer.is_enabled:
        return "bf16"
    return "int4_g64" if quantizer.num_bits == 4 else "int8"


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    by_gradient = job["method"] == "gradient"
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    ids = torch.tensor(job["ids"])
    size = job.get("batch", 4)
    batches = [{"input_ids": part} for part in ids.split(size)]

    def forward_step(changed: Any, batch: dict[str, torch.Tensor]) -> Any:
        out = changed(**batch, use_cache=False)
        return out if by_gradient else out.logits

    def loss(out: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = out.logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())

    start, cpu = time.perf_counter(), time.process_time()
    model, state = mtq.auto_quantize(
        model, constraints={"effective_bits": job["bits"], "cost": {"excluded_module_name_patterns": ["*lm_head*"]}},
        quantization_formats=[candidate(w) for w in WEIGHTS.values()], data_loader=batches, forward_step=forward_step,
        loss_func=loss if by_gradient else None, disabled_layers=["*lm_head*"], num_calib_steps=1,
        num_score_steps=max(1, job.get("score_sequences", len(ids)) // size), method=job["method"], verbose=False,
    )  # fmt: skip
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    layers = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    result = {
        "formats": {n: name_of(m.weight_quantizer) for n, m in layers.items()}, "seconds": seconds, "cpu_seconds": cpu_seconds,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "own_bits": state["best"]["constraints"]["effective_bits"],
    }  # fmt: skip
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
