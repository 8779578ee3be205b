"""vLLM's own choice of a scheme for every fused layer of a checkpoint, without an engine."""

from __future__ import annotations

import copy
import json
import os

os.environ.update({"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"})

import torch
from divergence import read_job, write_result
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsKVCacheMethod,
)

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def empty_layer() -> LinearBase:
    found = LinearBase.__new__(LinearBase)
    torch.nn.Module.__init__(found)
    return found


job = read_job()
import stand_ins  # the FP4 schemes look for a kernel when they are chosen

stand_ins.install()
results = {}
for name, folder in job["folders"].items():
    with open(f"{folder}/config.json", encoding="utf-8") as file:
        config = json.load(file)
    parsed = CompressedTensorsConfig.from_config(copy.deepcopy(config["quantization_config"]))
    parsed.packed_modules_mapping = FUSED
    if parsed.kv_cache_scheme:
        CompressedTensorsKVCacheMethod(parsed)
    schemes = {}
    with set_current_vllm_config(VllmConfig(model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16"))):
        for layer in range(config["num_hidden_layers"]):
            for module in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
                scheme = parsed.get_scheme(empty_layer(), f"model.layers.{layer}.{module}")
                schemes[f"model.layers.{layer}.{module}"] = type(scheme).__name__ if scheme else None
    results[name] = {"schemes": schemes, "kv": parsed.kv_cache_scheme}
write_result(results)
