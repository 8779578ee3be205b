"""AutoRound's search, AutoScheme, in its own environment: `peer_auto_scheme.py JOB.json RESULT.json` (see peers.py).

The same two candidates: symmetric int4 in groups of 64, symmetric int8 by row. AutoScheme counts scales and zero points, and leaves the head out.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

CACHE = tempfile.TemporaryDirectory(prefix="auto-scheme-")
os.environ["AR_AUTO_SCHEME_CACHE"] = (
    CACHE.name
)  # its scores are kept by the dataset's name: a shared folder would answer for other text
os.environ["AR_DISABLE_DATASET_SUBPROCESS"] = "1"

import datasets
import torch
from auto_round import AutoRound, AutoScheme
from auto_round.calib_dataset import register_dataset
from auto_round.schemes import QuantizationScheme
from transformers import AutoModelForCausalLM, AutoTokenizer

OPTIONS = tuple(
    QuantizationScheme(bits=bits, group_size=group, sym=True, data_type="int", act_bits=16) for bits, group in ((4, 64), (8, -1))
)
NAMES = {4: "int4_g64", 8: "int8", 16: "bf16"}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    ids = job["ids"]
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)

    @register_dataset("the job's")
    def text(*_: object, **__: object) -> datasets.Dataset:
        return datasets.Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})

    scheme = AutoScheme(
        avg_bits=job["bits"], options=OPTIONS, nsamples=len(ids), seqlen=len(ids[0]), batch_size=job.get("batch", 8),
        low_gpu_mem_usage=job.get("low_gpu", True), low_cpu_mem_usage=False, enable_torch_compile=False,
    )  # fmt: skip
    rounder = AutoRound(
        model, tokenizer=AutoTokenizer.from_pretrained(job["model"]), scheme=scheme, iters=0, dataset="the job's", nsamples=len(ids),
        seqlen=len(ids[0]), device_map="cpu", amp=False, low_cpu_mem_usage=False, enable_torch_compile=False,
    )  # fmt: skip
    start, cpu = time.perf_counter(), time.process_time()
    rounder.post_init()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    formats, bits, values = {}, 0, 0
    for name, module in rounder.model_context.model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        chosen = rounder.layer_config.get(name, {"bits": 16})
        formats[name] = NAMES[chosen["bits"]]
        numel, group = module.weight.numel(), chosen.get("group_size")
        values += numel
        bits += numel * chosen["bits"]
        if chosen["bits"] < 16:  # its own rule: a scale of 16 bits and a zero point for every group
            bits += (numel // group if group > 0 else module.out_features) * (16 + chosen["bits"])
    result = {
        "formats": formats, "seconds": seconds, "cpu_seconds": cpu_seconds, "own_bits": bits / values,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
