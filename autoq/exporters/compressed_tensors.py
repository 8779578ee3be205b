"""compressed-tensors: the quantization_config of a checkpoint, as vLLM and transformers read it.

Source: `compressed_tensors.quantization.QuantizationConfig` of 0.17 to 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoq.exporters import quantization_args as args
from autoq.exporters.consumer import Consumer, Found, whole_groups
from autoq.exporters.documents import parse, to_json
from autoq.exporters.subject import Subject


def write(subject: Subject) -> dict[str, str]:
    """Return config.json with nothing but quantization_config."""
    return {"config.json": to_json({"quantization_config": document(subject)})}


def document(subject: Subject) -> dict[str, Any]:
    """Return quantization_config."""
    groups = args.groups(subject, with_packing=True)
    packings = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": next(iter(packings)) if len(packings) == 1 else "mixed-precision" if packings else "dense",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups.values())},
        "ignore": args.ignored(subject),
        "kv_cache_scheme": args.cache_scheme(subject),
    }


def read(files: Mapping[str, str], subject: Subject) -> Found:
    """Resolve a checkpoint's config.json, or the quantization_config alone, on the modules of a model."""
    name = next(iter(files))
    data = parse(name, files[name])
    return args.resolve(data.get("quantization_config", data), subject)


CONSUMER = Consumer(
    "compressed-tensors",
    "the quantization_config of a checkpoint's config.json",
    tuple(args.SCHEMES),
    tuple(args.CACHES),
    "one",
    write,
    read,
    refuses=whole_groups,
    notes=("it describes packed weights: the checkpoint has to hold them",),
    engines=("vllm", "sglang"),
)
