"""llm-compressor: oneshot with many recipes, each on a fresh model, each saved into its folder."""

from __future__ import annotations

import torch
from datasets import Dataset
from divergence import read_job, write_result
from llmcompressor import oneshot
from transformers import AutoModelForCausalLM, AutoTokenizer

job = read_job()
tokenizer = AutoTokenizer.from_pretrained(job["model"])
rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in job["calibration"]]
for recipe, folder in job["recipes"].items():
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16).eval()
    oneshot(
        model=model, tokenizer=tokenizer, recipe=recipe, dataset=Dataset.from_list(rows), num_calibration_samples=len(rows),
        max_seq_length=len(rows[0]["input_ids"]), shuffle_calibration_samples=False, output_dir=folder,
    )  # fmt: skip
write_result({})
