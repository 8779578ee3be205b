"""GPTQModel: the `dynamic` of a QuantizeConfig.

Source: `gptqmodel.quantization.config` of 7.x. Keys are regular expressions that match from the start of a name; negative ones ("-:")
are looked at first, then the first positive one ("+:") wins. Integers only; scales are absmax / 7.5 (for 4 bits), zero points are stored always.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from autoq.errors import UserError
from autoq.exporters.consumer import Consumer, Found, whole_groups
from autoq.exporters.documents import parse, to_json
from autoq.exporters.integers import integer
from autoq.exporters.subject import Layer, Subject
from autoq.formats.format import Format, IntElement

_LAYERS: dict[str, dict[str, Any]] = {
    "int8_half": {"bits": 8, "group_size": -1, "sym": True},
    "int4_g128_half": {"bits": 4, "group_size": 128, "sym": True},
    "int4_g64_half": {"bits": 4, "group_size": 64, "sym": True},
    "int4_g32_asym": {"bits": 4, "group_size": 32, "sym": False},
    "int3_g64_asym": {"bits": 3, "group_size": 64, "sym": False},
    "int2_g32_asym": {"bits": 2, "group_size": 32, "sym": False},
}
DEFAULTS = {"bits": 4, "group_size": 128, "sym": True}  # what a layer has that no key matches


def write(subject: Subject) -> dict[str, str]:
    """Return quantize_config.json: the defaults of QuantizeConfig, and dynamic.

    `act_group_aware` is on by default in GPTQModel, which then refuses scales of a whole row.
    """
    dynamic: dict[str, Any] = {f"-:^{re.escape(layer.name)}$": {} for layer in subject.kept if layer.layout == "linear"}
    dynamic |= {f"+:^{re.escape(layer.name)}$": _LAYERS[layer.format.name] for layer in subject.quantized}
    return {"quantize_config.json": to_json({**DEFAULTS, "desc_act": False, "act_group_aware": False, "dynamic": dynamic})}


def read(files: Mapping[str, str], subject: Subject) -> Found:
    """Resolve dynamic on the modules of a model."""
    name = next(iter(files))
    data = parse(name, files[name])
    data = data.get("quantization_config", data)
    dynamic = {} if data.get("dynamic") is None else data["dynamic"]
    if "bits" not in data and not dynamic:
        raise UserError(f"{name!r} has neither 'bits' nor 'dynamic': is it of another tool?")
    if not isinstance(dynamic, Mapping):
        raise UserError(f"{name!r}: dynamic must map names to settings")
    problems: list[str] = []
    notes: list[str] = []
    used: set[str] = set()
    weights: dict[str, Format] = {}
    rules = [(key, _pattern(key, name), value) for key, value in dynamic.items()]
    for layer in subject.layers:
        if layer.layout != "linear":
            continue
        matched = [(key, value) for key, pattern, value in rules if pattern.match(layer.name)]
        used |= {key for key, _ in matched}
        if any(key.startswith("-:") for key, _ in matched) or (layer.unit is None and not matched):
            continue
        if len(matched) > 1:
            notes.append(f"{layer.name} is matched by {' and by '.join(key for key, _ in matched)}: the first holds")
        if matched and not isinstance(matched[0][1], Mapping):
            raise UserError(f"{name!r}: the settings of {matched[0][0]!r} must be a mapping, and are {matched[0][1]!r}")
        settings = {**DEFAULTS, **{k: data[k] for k in DEFAULTS if k in data}, **(matched[0][1] if matched else {})}
        group = settings["group_size"]
        weights[layer.name] = integer(settings["bits"], None if group == -1 else group, settings["sym"], "half_step")
    problems += [f"{key} matches nothing in the model" for key in dynamic if key not in used]
    return Found(weights, {}, tuple(problems), tuple(notes))


def _pattern(key: str, name: str) -> re.Pattern[str]:
    try:
        return re.compile(re.sub(r"^[-+]:", "", key))
    except re.error as error:
        raise UserError(f"{name!r}: {key!r} is no regular expression: {error}") from error


def _refuses(layer: Layer, fmt: Format) -> str | None:
    if layer.width % 32 or layer.shape[-2] % 32:
        return f"a weight of {layer.shape[-2]} x {layer.width} does not divide by 32"
    return whole_groups(layer, fmt)


def _overhead(layer: Layer) -> int:
    """Bits of the zero points of symmetric groups, and of g_idx: the group of every input, in 32 bits."""
    element = layer.format.element
    zeros = layer.blocks * element.bits if isinstance(element, IntElement) and not element.asymmetric else 0
    return zeros + 32 * layer.width


CONSUMER = Consumer(
    "gptqmodel",
    "the arguments of `QuantizeConfig`, with every layer in `dynamic`",
    tuple(_LAYERS),
    (),
    "one",
    write,
    read,
    overhead=_overhead,
    refuses=_refuses,
    notes=("GPTQ spreads rounding errors over the columns: it damages less than autoq's measurement of plain rounding",),
)
