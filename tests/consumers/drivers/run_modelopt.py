"""ModelOpt: load_recipe, mtq.quantize, what each quantizer is set to, the weights as its simulator rounds them, and the KL."""

from __future__ import annotations

import modelopt.torch.quantization as mtq
import torch
from divergence import kl, log_probabilities, read_job, write_result
from modelopt.recipe import load_recipe
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

job = read_job()
model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
original = log_probabilities(model, job["ids"])
calibration = torch.tensor(job["calibration"])
recipe = load_recipe(job["recipe"])
model = mtq.quantize(model, recipe.quantize, lambda m: m(calibration) if job["runs"] else None)
enabled = {}
for name, module in model.named_modules():
    if name.endswith("_quantizer") and getattr(module, "is_enabled", False):
        blocks = dict(module.block_sizes or {})
        enabled[name] = {
            "num_bits": module.num_bits, "axis": module.axis if not blocks else None,
            "blocks": {str(k): v for k, v in blocks.items()}, "dynamic": bool(module._dynamic),
        }  # fmt: skip
result = {"enabled": enabled}
if job["runs"]:
    result["kl"] = kl(original, log_probabilities(model, job["ids"]))
    with torch.no_grad():
        weights = {
            name: module.weight_quantizer(module.weight).float().contiguous()
            for name, module in model.named_modules()
            if hasattr(module, "weight_quantizer") and module.weight_quantizer.is_enabled
        }
    save_file(weights, job["weights"])
write_result(result)
