"""AutoRound: layer_config, one scheme for every layer.

Source: `auto_round.schemes.QuantizationScheme` of 0.16 and `auto_round.data_type`. With iters=0 and disable_opt_rtn=True it rounds as these
formats do (symmetric integers with a signed full-range scale); its tuning keeps the storage and lowers the error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoq.errors import UserError
from autoq.exporters.consumer import Consumer, Found
from autoq.exporters.documents import parse, to_json
from autoq.exporters.integers import integer
from autoq.exporters.subject import Subject
from autoq.formats.catalog import WEIGHT_FORMATS
from autoq.formats.format import Format


def _scheme(bits: int, group: int, data_type: str, sym: bool = True) -> dict[str, Any]:
    return {"bits": bits, "group_size": group, "sym": sym, "data_type": data_type, "act_bits": 16}


KEPT = {"bits": 16, "act_bits": 16, "data_type": "float"}
_LAYERS: dict[str, dict[str, Any]] = {
    "int8_full": _scheme(8, -1, "int"),
    "int4_g128_full": _scheme(4, 128, "int"),
    "int4_g64_full": _scheme(4, 64, "int"),
    "int4_g32_asym": _scheme(4, 32, "int", sym=False),
    "int3_g64_asym": _scheme(3, 64, "int", sym=False),
    "int2_g32_asym": _scheme(2, 32, "int", sym=False),
    "fp8": _scheme(8, -1, "fp"),
    "mxfp8": _scheme(8, 32, "mx_fp"),
    "mxfp4": _scheme(4, 32, "mx_fp"),
    "nvfp4": _scheme(4, 16, "nv_fp"),
}


def write(subject: Subject) -> dict[str, str]:
    """Return layer_config.json; layers that stay in 16 bit are in it too, for a partial name matches as a substring."""
    layers = {layer.name: _LAYERS[layer.format.name] for layer in subject.quantized}
    layers |= {layer.name: KEPT for layer in subject.kept}
    return {"layer_config.json": to_json(layers)}


def read(files: Mapping[str, str], subject: Subject) -> Found:
    """Resolve layer_config on the modules of a model: an exact name, else every layer whose name contains the key."""
    name = next(iter(files))
    data = parse(name, files[name])
    problems: list[str] = []
    keys_of: dict[str, list[str]] = {}
    exact = {layer.name for layer in subject.layers}
    for key in data:
        matched = [key] if key in exact else [layer for layer in exact if key in layer and layer not in data]
        if not matched:
            problems.append(f"{key} matches nothing in the model")
        for layer in matched:
            keys_of.setdefault(layer, []).append(key)
    weights: dict[str, Format] = {}
    for layer, keys in keys_of.items():
        if len(keys) > 1:
            problems.append(f"{layer} is matched by {' and by '.join(keys)}")
        fmt = _format(data[keys[0]], name)
        if fmt is None:
            problems.append(f"{layer}: {data[keys[0]]} is no format of autoq")
        elif not fmt.is_original:
            weights[layer] = fmt
    return Found(weights, {}, tuple(problems))


def _format(scheme: Any, name: str) -> Format | None:
    if not isinstance(scheme, Mapping):
        raise UserError(f"{name!r} must map layers to schemes, and has {scheme!r}")
    if scheme.get("bits", 16) >= 16:
        return WEIGHT_FORMATS["bf16"]
    plain = {**_scheme(4, 128, "int"), **{k: v for k, v in scheme.items() if v is not None}}
    if type(plain["sym"]) is not bool:
        raise UserError(f"{name!r}: sym must be true or false, and is {plain['sym']!r}")
    for known, numbers in _LAYERS.items():
        if all(plain[k] == v for k, v in numbers.items()):
            return WEIGHT_FORMATS[known]
    if plain["data_type"] == "int" and plain["act_bits"] >= 16:
        group = plain["group_size"]
        return integer(plain["bits"], None if group == -1 else group, plain["sym"], "full_range")
    return None


CONSUMER = Consumer(
    "auto-round",
    "the layer_config of `AutoRound(model, tokenizer, layer_config=...)`",
    tuple(_LAYERS),
    (),
    "one",
    write,
    read,
    layouts=("linear", "conv1d"),
    notes=(
        'give it scheme="BF16" too: under its default scheme it leaves every layer in 16 bit, and says nothing, whose sides are no multiple of 32',
        "nvfp4 weights of q, k, v (and of gate, up) share one tensor scale in AutoRound, unless AR_NVFP4_FUSED_LAYER_GLOBAL_SCALE=0",
        "with iters=0 and disable_opt_rtn=True it rounds as autoq does; its tuning keeps the bytes and lowers the error",
    ),
)
