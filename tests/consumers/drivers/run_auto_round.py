"""AutoRound without tuning: every layer's own scheme, the rounded weights, and the KL."""

from __future__ import annotations

import json
import os

os.environ.setdefault("AR_NVFP4_FUSED_LAYER_GLOBAL_SCALE", "0")  # else the nvfp4 weights of q, k, v share one tensor scale

import torch
from auto_round import AutoRound
from divergence import kl, log_probabilities, read_job, write_result
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

job = read_job()
model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
original = log_probabilities(model, job["ids"])
before = {n: m.weight.detach().clone() for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
with open(job["recipe"], encoding="utf-8") as file:
    layers = json.load(file)
quantized, _ = AutoRound(
    model, AutoTokenizer.from_pretrained(job["model"]), scheme=job.get("scheme", "BF16"), layer_config=layers, iters=0, disable_opt_rtn=True,
    disable_model_free=True, device_map="cpu", low_cpu_mem_usage=False, amp=False,
).quantize()  # fmt: skip
quantized = quantized.float().eval()
weights = {n: m.weight.detach().float().contiguous() for n, m in quantized.named_modules() if n in before}
save_file({n: w for n, w in weights.items() if not torch.equal(w, before[n])}, job["weights"])
write_result({"kl": kl(original, log_probabilities(quantized, job["ids"]))})
