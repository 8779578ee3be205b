"""MLX: the quantization of a config.json, layer by layer.

Source: `mlx_lm.utils.quantize_model` and `mlx.core.quantize` (modes affine, mxfp4, mxfp8, nvfp4). Affine groups hold a scale and an
offset of 16 bits each, where autoq's zero point is an integer of the element's bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoq.errors import UserError
from autoq.exporters.consumer import Consumer, Found, whole_groups
from autoq.exporters.documents import at, parse, to_json
from autoq.exporters.integers import integer
from autoq.exporters.subject import Layer, Subject
from autoq.formats.catalog import WEIGHT_FORMATS
from autoq.formats.format import Format, IntElement


def _affine(bits: int, group: int) -> dict[str, Any]:
    return {"bits": bits, "group_size": group, "mode": "affine"}


_LAYERS: dict[str, dict[str, Any]] = {
    "int8_g64_asym": _affine(8, 64),
    "int4_g64_asym": _affine(4, 64),
    "int4_g32_asym": _affine(4, 32),
    "int3_g64_asym": _affine(3, 64),
    "int2_g32_asym": _affine(2, 32),
    "mxfp8": {"bits": 8, "group_size": 32, "mode": "mxfp8"},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
}
DEFAULT = _affine(4, 64)  # what a layer has that is not named


def write(subject: Subject) -> dict[str, str]:
    """Return config.json with nothing but quantization; a layer that stays in 16 bit is false."""
    layers: dict[str, Any] = {layer.name: _LAYERS[layer.format.name] for layer in subject.quantized}
    layers |= {layer.name: False for layer in subject.kept}
    return {"config.json": to_json({"quantization": {**DEFAULT, **layers}})}


def read(files: Mapping[str, str], subject: Subject) -> Found:
    """Resolve quantization on the modules of a model: names are exact, the rest has the general setting."""
    name = next(iter(files))
    data = parse(name, files[name])
    found = at(data, "quantization", name) if "quantization" in data else data
    general = {k: found[k] for k in DEFAULT if k in found}
    if not isinstance(found, Mapping) or "bits" not in general:
        raise UserError(f"{name!r} has no quantization with 'bits': is it of another tool?")
    layers = {layer.name: layer for layer in subject.layers}
    problems = [
        f"{key} matches nothing in the model" for key, value in found.items()
        if key not in general and key not in layers and isinstance(value, Mapping | bool) and key not in subject.modules
    ]  # fmt: skip
    weights: dict[str, Format] = {}
    for layer in layers.values():
        settings = found.get(layer.name, general if layer.unit is not None else False)
        if settings is False:
            continue
        if not isinstance(settings, Mapping | bool):
            raise UserError(f"{name!r}: {layer.name} must be a mapping, or false")
        plain = {**DEFAULT, **general, **(settings if isinstance(settings, Mapping) else {})}
        known = next((n for n, numbers in _LAYERS.items() if numbers == plain), None)
        if known is None and plain["mode"] != "affine":
            problems.append(f"{layer.name}: {plain} is no format of autoq")
            continue
        weights[layer.name] = WEIGHT_FORMATS[known] if known else integer(plain["bits"], plain["group_size"], False, "minmax")
    others = [key for key, value in found.items() if key in subject.modules and key not in layers and value is not False]
    notes = [f"{key} is left out: autoq counts it with 16 bit" for key in others]
    return Found(weights, {}, tuple(problems), tuple(notes))


def _overhead(layer: Layer) -> int:
    """Bits of an offset of 16 bits in place of a zero point, for every affine group."""
    element = layer.format.element
    return (16 - element.bits) * layer.blocks if isinstance(element, IntElement) else 0


CONSUMER = Consumer(
    "mlx",
    "the quantization of a config.json, for mlx-lm",
    tuple(_LAYERS),
    (),
    "one",
    write,
    read,
    overhead=_overhead,
    refuses=whole_groups,
    notes=("MLX stores an offset of 16 bits for every group where autoq has an integer zero point: nearly the same values", "not run here: MLX needs Apple silicon"),
)  # fmt: skip
