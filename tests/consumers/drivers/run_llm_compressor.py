"""llm-compressor: oneshot with the recipe, save, reload through transformers and compressed-tensors, and the KL of what was reloaded."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from datasets import Dataset
from divergence import kl, log_probabilities, read_job, write_result
from llmcompressor import oneshot
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

job = read_job()
model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16).eval()
original = log_probabilities(model, job["ids"])
tokenizer = AutoTokenizer.from_pretrained(job["model"])
rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in job["calibration"]]
oneshot(
    model=model, tokenizer=tokenizer, recipe=job["recipe"], dataset=Dataset.from_list(rows), num_calibration_samples=len(rows),
    max_seq_length=len(rows[0]["input_ids"]), shuffle_calibration_samples=False, output_dir=job["checkpoint"],
)  # fmt: skip
reloaded = AutoModelForCausalLM.from_pretrained(job["checkpoint"], dtype=torch.bfloat16).eval()
changed = log_probabilities(reloaded, job["ids"])
names = [line.removesuffix(".weight") for line in job["names"]]
weights = {name: reloaded.get_submodule(name).weight.detach().float().contiguous() for name in names}
save_file(weights, job["weights"])
scales = {
    name: [module.k_scale.item(), module.v_scale.item()] for name, module in reloaded.named_modules() if hasattr(module, "k_scale")
}
config = json.loads((Path(job["checkpoint"]) / "config.json").read_text())["quantization_config"]
write_result({"kl": kl(original, changed), "scales": scales, "config": config})
