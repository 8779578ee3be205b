"""Serving engines: which weights each loads, which cache formats it can serve, and how they may be mixed over the layers.

Sources: vLLM `--kv-cache-dtype` and `--kv-cache-dtype-skip-layers`, SGLang `--kv-cache-dtype`, TensorRT-LLM
`kv_cache_quant_algo`, llama.cpp `-ctk` and `-ctv`. Where K and V may differ, or any layer may have its own format, only
autoq's own cache for transformers can serve the mix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autoq.errors import unknown
from autoq.formats.format import Format

# "free": any format for any K or V; "one and skipped": one format for K and V of all layers but those that stay in 16 bit;
# "one": the same without exceptions; "two": one format for all K, one for all V.
Mixing = Literal["free", "one and skipped", "one", "two"]


@dataclass(frozen=True)
class Engine:
    """What an engine can serve.

    Attributes:
        kv_formats: names of cache formats, besides 16 bit; None is every one that autoq has. weights: names of weight formats it
            loads, each with its rounding variants (how a format picked its scales does not matter to who reads them); None: every one.
        mixing: how they may be mixed. page: tokens allotted at a time, by its defaults.
        head_dim_multiple: what head_dim must be a multiple of. option: the command-line option that asks for it.
    """

    name: str
    kv_formats: frozenset[str] | None
    mixing: Mixing
    weights: frozenset[str] | None = None
    page: int = 1
    head_dim_multiple: int = 1
    option: str = "--engine"


# Storage of compressed-tensors checkpoints, which vLLM and SGLang load; of ModelOpt's, which TensorRT-LLM loads.
_COMPRESSED_TENSORS = frozenset({"fp8", "int8", "nvfp4", "mxfp4", "mxfp8", "int4_g128", "int4_g64", "int4_g32_asym", "fp8_w8a8", "int8_w8a8",
                                 "nvfp4_w4a4", "mxfp8_w8a8"})  # fmt: skip
_MODELOPT = frozenset({"fp8", "nvfp4", "int4_g128", "fp8_w8a8", "nvfp4_w4a4", "int8_w8a8"})

ENGINES: dict[str, Engine] = {
    "none": Engine("none", None, "free"),
    "transformers": Engine("transformers", None, "free"),
    "vllm": Engine(
        "vllm", frozenset({"fp8", "fp8_cast", "fp8_e5m2", "nvfp4", "int8_head"}), "one and skipped", _COMPRESSED_TENSORS, 16
    ),
    "sglang": Engine("sglang", frozenset({"fp8", "fp8_cast", "fp8_e5m2", "nvfp4_cast"}), "one", _COMPRESSED_TENSORS),
    "tensorrt-llm": Engine("tensorrt-llm", frozenset({"fp8", "nvfp4"}), "one", _MODELOPT, 32),
    "llama.cpp": Engine("llama.cpp", frozenset({"q8_0", "q4_0"}), "two", frozenset({"q8_0", "q5_0", "q4_0", "mxfp4"}), 256, 32),
}


def stored(fmt: Format) -> tuple[object, ...]:
    """Return what is stored of a format: how its scales are picked does not matter to who reads it."""
    return fmt.element, fmt.block, fmt.scale, fmt.tensor_scale, stored(fmt.activation) if fmt.activation else None


def loads(engine: Engine, fmt: Format, known: Mapping[str, Format]) -> bool:
    """True if the engine loads weights in this format: one of its own, or one that is stored as one of them is."""
    return engine.weights is None or stored(fmt) in {stored(known[name]) for name in engine.weights}


def engine_of(name: str) -> Engine:
    """Return the engine of that name; raises UserError with the nearest name."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    return ENGINES[name]
