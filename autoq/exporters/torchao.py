"""torchao: FqnToConfig for `quantize_`, as torchao's own JSON.

Source: `torchao.quantization.FqnToConfig` and `torchao.core.config.config_from_dict` of 0.18. An exact name goes before the first
regular expression ("re:") that matches the whole name. Integers stay unpacked, one byte a value, with a zero point for every group.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from autoq.errors import UserError
from autoq.exporters.consumer import Consumer, Found, whole_groups
from autoq.exporters.documents import at, parse, to_json
from autoq.exporters.subject import Layer, Subject
from autoq.formats.catalog import WEIGHT_FORMATS
from autoq.formats.format import Format, IntElement

Config = dict[str, Any]


def _config(kind: str, version: int, data: dict[str, Any]) -> Config:
    return {"_type": kind, "_version": version, "_data": data}


def _member(kind: str, name: str) -> Config:
    return {"_type": kind, "_data": name}


def _intx(bits: int, group: int | None, mapping: str) -> Config:
    granularity = _config("PerAxis", 1, {"axis": 0}) if group is None else _config("PerGroup", 1, {"group_size": group})
    return _config("IntxWeightOnlyConfig", 2, {
        "weight_dtype": _member("torch.dtype", f"int{bits}"), "granularity": granularity,
        "mapping_type": _member("MappingType", mapping), "scale_dtype": None,
        "intx_packing_format": _member("IntxPackingFormat", "UNPACKED_TO_INT8"),
        "intx_choose_qparams_algorithm": _member("IntxChooseQParamsAlgorithm", "AFFINE"),
    })  # fmt: skip


_LAYERS: dict[str, Config] = {
    "fp8": _config("Float8WeightOnlyConfig", 2, {
        "weight_dtype": _member("torch.dtype", "float8_e4m3fn"), "set_inductor_config": True,
        "granularity": _config("PerRow", 1, {"dim": -1}),
    }),
    "int8_half": _intx(8, None, "SYMMETRIC"),
    "int4_g128_half": _intx(4, 128, "SYMMETRIC"),
    "int4_g64_half": _intx(4, 64, "SYMMETRIC"),
    "int4_g32_asym": _intx(4, 32, "ASYMMETRIC"),
    "int3_g64_asym": _intx(3, 64, "ASYMMETRIC"),
    "int2_g32_asym": _intx(2, 32, "ASYMMETRIC"),
    "nvfp4": _config("NVFP4WeightOnlyConfig", 1, {"use_dynamic_per_tensor_scale": True}),
}  # fmt: skip


def write(subject: Subject) -> dict[str, str]:
    """Return fqn_to_config.json; a layer that stays in 16 bit is null."""
    layers: dict[str, Config | None] = {layer.name: _LAYERS[layer.format.name] for layer in subject.quantized}
    layers |= {layer.name: None for layer in subject.kept if layer.layout == "linear"}
    data = _config("FqnToConfig", 1, {"fqn_to_config": layers, "module_fqn_to_config": {}})
    return {"fqn_to_config.json": to_json(data)}


def read(files: Mapping[str, str], subject: Subject) -> Found:
    """Resolve FqnToConfig on the modules of a model."""
    name = next(iter(files))
    entries: Mapping[str, Any] = at(parse(name, files[name]), "_data.fqn_to_config", name)
    names = {json.dumps(config, sort_keys=True): n for n, config in _LAYERS.items()}
    problems: list[str] = []
    used: set[str] = set()
    weights: dict[str, Format] = {}
    for layer in subject.layers:
        if layer.layout != "linear":
            continue
        matched = [key for key in entries if _matches(key, layer.name, name)]
        used |= set(matched)
        best = layer.name if layer.name in entries else matched[0] if matched else "_default"
        config = entries.get(best)
        if config is None:
            continue
        found = names.get(json.dumps(config, sort_keys=True))
        if found is None:
            problems.append(f"{layer.name}: {config.get('_type')} is no format of autoq with these numbers")
        else:
            weights[layer.name] = WEIGHT_FORMATS[found]
    problems += [f"{key} matches nothing in the model" for key in entries if key not in used and key != "_default"]
    return Found(weights, {}, tuple(problems))


def _matches(key: str, layer: str, name: str) -> bool:
    if not key.startswith("re:"):
        return key == layer
    try:
        return re.fullmatch(key[3:], layer) is not None
    except re.error as error:
        raise UserError(f"{name!r}: {key!r} is no regular expression: {error}") from error


def _overhead(layer: Layer) -> int:
    """Bits beyond ours: a byte for every integer below 8 bits, and a zero point of a byte for every group."""
    element = layer.format.element
    if not isinstance(element, IntElement):
        return 0
    zero = 8 - element.bits if element.asymmetric else 8
    return (8 - element.bits) * layer.blocks * (layer.format.block or layer.width) + zero * layer.blocks


_WIDER = "torchao keeps integers below 8 bits unpacked, one byte a value, until another backend packs them"
CONSUMER = Consumer(
    "torchao",
    "an FqnToConfig for `quantize_` or transformers' TorchAoConfig, as JSON",
    tuple(_LAYERS),
    (),
    "one",
    write,
    read,
    overhead=_overhead,
    refuses=whole_groups,
    notes=(_WIDER,),
    wider=_WIDER,
)  # fmt: skip
