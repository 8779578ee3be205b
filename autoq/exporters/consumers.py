"""Every consumer by name. A new one is a file, and one more line here."""

from __future__ import annotations

from autoq.errors import unknown
from autoq.exporters import (
    auto_round,
    compressed_tensors,
    gptqmodel,
    llama_cpp,
    llm_compressor,
    mlx,
    modelopt,
    serving,
    torchao,
    transformers,
)
from autoq.exporters.consumer import Consumer

CONSUMERS: dict[str, Consumer] = {
    "modelopt": modelopt.CONSUMER,
    "llm-compressor": llm_compressor.CONSUMER,
    "compressed-tensors": compressed_tensors.CONSUMER,
    "auto-round": auto_round.CONSUMER,
    "gptqmodel": gptqmodel.CONSUMER,
    "torchao": torchao.CONSUMER,
    "transformers": transformers.CONSUMER,
    "vllm": serving.VLLM,
    "sglang": serving.SGLANG,
    "tensorrt-llm": serving.TENSORRT_LLM,
    "llama.cpp": llama_cpp.CONSUMER,
    "mlx": mlx.CONSUMER,
}


def consumer_of(name: str) -> Consumer:
    """Return the consumer of that name; raises UserError with the nearest name."""
    if name not in CONSUMERS:
        raise unknown("consumer", name, CONSUMERS)
    return CONSUMERS[name]
