"""Serving engines: which cache formats each can serve, and how they may be mixed over the layers.

Sources: vLLM `--kv-cache-dtype` and `--kv-cache-dtype-skip-layers`, SGLang `--kv-cache-dtype`, TensorRT-LLM
`kv_cache_quant_algo`, llama.cpp `-ctk` and `-ctv`. Where K and V may differ, or any layer may have its own format, only
autoq's own cache for transformers can serve the mix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autoq.errors import unknown

# "free": any format for any K or V; "one and skipped": one format for K and V of all layers but those that stay in 16 bit;
# "one": the same without exceptions; "two": one format for all K, one for all V.
Mixing = Literal["free", "one and skipped", "one", "two"]


@dataclass(frozen=True)
class Engine:
    """What an engine can serve.

    Attributes:
        kv_formats: names of cache formats, besides 16 bit; None is every one that autoq has.
        mixing: how they may be mixed. page: tokens allotted at a time, by its defaults.
        head_dim_multiple: what head_dim must be a multiple of.
    """

    name: str
    kv_formats: frozenset[str] | None
    mixing: Mixing
    page: int = 1
    head_dim_multiple: int = 1


ENGINES: dict[str, Engine] = {
    "none": Engine("none", None, "free"),
    "transformers": Engine("transformers", None, "free"),
    "vllm": Engine("vllm", frozenset({"fp8", "fp8_cast", "nvfp4", "int8_head"}), "one and skipped", 16),
    "sglang": Engine("sglang", frozenset({"fp8", "fp8_cast", "nvfp4_cast"}), "one"),
    "tensorrt-llm": Engine("tensorrt-llm", frozenset({"fp8", "nvfp4"}), "one", 32),
    "llama.cpp": Engine("llama.cpp", frozenset({"q8_0", "q4_0"}), "two", 256, 32),
}


def engine_of(name: str) -> Engine:
    """Return the engine of that name; raises UserError with the nearest name."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    return ENGINES[name]
