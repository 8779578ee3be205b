"""torchao: config_from_dict, quantize_, and the KL."""

from __future__ import annotations

import torch
from divergence import kl, log_probabilities, read_job, write_result
from safetensors.torch import save_file
from torchao.core.config import config_from_dict
from torchao.quantization import quantize_
from transformers import AutoModelForCausalLM

job = read_job()
model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
original = log_probabilities(model, job["ids"])
with open(job["recipe"], encoding="utf-8") as file:
    config = config_from_dict(__import__("json").load(file))
quantize_(model, config, filter_fn=None)
changed = log_probabilities(model, job["ids"])
quantized = {
    name: module.weight.dequantize().float().contiguous()
    for name, module in model.named_modules()
    if isinstance(module, torch.nn.Linear)
    and hasattr(module.weight, "dequantize")
    and type(module.weight) is not torch.nn.Parameter
}
save_file(quantized, job["weights"])
write_result({"kl": kl(original, changed)})
