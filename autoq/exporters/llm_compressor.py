"""llm-compressor: a recipe for `oneshot`.

Source: `llmcompressor.modifiers.quantization` of 0.14. kv_cache_scheme holds for every layer: a group that targets some attention
modules makes transformers call a hooked attention on all of them, and those without a scheme fail (compressed-tensors 0.19).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoq.errors import UserError
from autoq.exporters import quantization_args as args
from autoq.exporters.consumer import Consumer, Found, whole_groups
from autoq.exporters.documents import parse, to_yaml
from autoq.exporters.subject import Subject


def write(subject: Subject) -> dict[str, str]:
    """Return recipe.yaml."""
    return {"recipe.yaml": to_yaml(document(subject))}


def document(subject: Subject) -> dict[str, Any]:
    """Return the recipe's data."""
    modifier: dict[str, Any] = {"ignore": args.ignored(subject), "config_groups": args.groups(subject, with_packing=False)}
    if (scheme := args.cache_scheme(subject)) is not None:
        modifier["kv_cache_scheme"] = scheme | {"observer": "static_minmax"}  # the default is a moving average, which clips
    return {"autoq_stage": {"autoq_modifiers": {"QuantizationModifier": modifier}}}


def read(files: Mapping[str, str], subject: Subject) -> Found:
    """Resolve a recipe on the modules of a model."""
    name = next(iter(files))
    found = _modifiers(parse(name, files[name]))
    rounding = [(key, m) for key, m in found if any(k in m for k in ("config_groups", "scheme", "kv_cache_scheme"))]
    if len(rounding) != 1:
        raise UserError(
            f"{name!r} must hold one modifier with config_groups, a scheme or kv_cache_scheme, and holds {len(rounding)}"
        )
    ((key, modifier),) = rounding
    others = [other for other, m in found if m is not modifier] + ([key] if key != "QuantizationModifier" else [])
    words = f"{', '.join(others)} changes weights before or while they are rounded: autoq rounds them as they are"
    resolved = args.resolve(args.expanded(modifier), subject)
    return replace(resolved, notes=(*resolved.notes, words) if others else resolved.notes)


def _modifiers(data: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (name, arguments) of every modifier, in whatever stages they are."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    for key, value in data.items():
        if isinstance(value, Mapping):
            found += [(str(key), value)] if str(key).endswith("Modifier") else _modifiers(value)
    return found


CONSUMER = Consumer(
    "llm-compressor",
    "a recipe for `oneshot`, which saves a compressed-tensors checkpoint",
    tuple(args.SCHEMES),
    tuple(args.CACHES),
    "one",
    write,
    read,
    refuses=whole_groups,
    notes=(
        "fp8 caches are calibrated by llm-compressor, on the dataset that you give `oneshot`",
        "nvfp4 weights of q, k, v (and of gate, up) share one tensor scale in llm-compressor",
    ),
    engines=("vllm", "sglang"),
)
