"""GPTQModel: quantize by GPTQ or by plain rounding, save, reload on the CPU's torch kernel, and the KL."""

from __future__ import annotations

import json
import os

os.environ["GPTQMODEL_CPU_WORKERS"] = "2"  # on two cores it asks for more workers than it allows
os.environ["TORCH_COMPILE_DISABLE"] = "1"

import torch
from divergence import kl, read_job, write_result
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from transformers import AutoModelForCausalLM


@torch.no_grad()
def log_probabilities(model: torch.nn.Module, ids: list[list[int]]) -> torch.Tensor:
    return torch.stack([model(input_ids=torch.tensor([row])).logits[0].float().log_softmax(-1) for row in ids])


job = read_job()
original = log_probabilities(AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval(), job["ids"])
with open(job["recipe"], encoding="utf-8") as file:
    settings = json.load(file)
if job["method"] == "rtn":
    settings["weight_only"] = {"method": "rtn"}
model = GPTQModel.load(job["model"], QuantizeConfig(**settings), dtype=torch.float16, device="cpu")
calibration = (
    None if job["method"] == "rtn" else [{"input_ids": row, "attention_mask": [1] * len(row)} for row in job["calibration"]]
)
model.quantize(calibration)
model.save(job["checkpoint"])
reloaded = GPTQModel.load(job["checkpoint"], device="cpu", backend=BACKEND.GPTQ_TORCH)
layers = {n: [m.bits, m.group_size] for n, m in reloaded.model.named_modules() if hasattr(m, "qweight")}
write_result({"kl": kl(original, log_probabilities(reloaded.model, job["ids"])), "layers": layers})
