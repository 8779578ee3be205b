"""Formats as a recipe writes them: in full, so that the file stands alone; from Format to entry and back."""

from __future__ import annotations

import base64
import re
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from autoq.errors import UserError, unknown
from autoq.formats.catalog import WEIGHT_FORMATS
from autoq.formats.format import E2M1, E2M3, E3M2, E4M3, E5M2, FloatElement, Format, IntElement, KVFormat, ScaleRule, ScaleType

NotNegative = Annotated[float, Field(ge=0)]


class Strict(BaseModel):
    """A part of a recipe: no unknown keys, no infinities, read only."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class FormatEntry(Strict):
    """A format written out in full."""

    element: str = Field(description="E2M1, E2M3, E3M2, E4M3, E5M2, INTn, INTn asym, or BF16 for the original")
    block: int | None = Field(ge=1, le=2**20, description="values that share a scale; null is the whole row")
    scale: ScaleType = Field(description="type the block scales are stored in")
    rule: ScaleRule = Field(description="how the encoder picks the scale")
    tensor_scale: bool = Field(default=False, description="one more float32 scale for the tensor")
    tensor_range: float | None = Field(default=None, gt=0, description="block scale that the tensor scale maps the largest to")
    axis: Literal["token", "channel"] | None = Field(default=None, description="KV: what blocks run along")
    static_scale: Literal["none", "absmax"] | NotNegative | None = Field(
        default=None, description="KV: where the static scale comes from"
    )
    residual: int = Field(default=0, ge=0, lt=2**31, description="KV: newest tokens kept in 16 bit")
    sink: int = Field(default=0, ge=0, lt=2**31, description="KV: first tokens kept in 16 bit")
    refresh: int = Field(default=0, ge=0, lt=2**31, description="KV: the static scale is recomputed every so many tokens")
    tier: int = Field(default=0, ge=0, lt=2**31, description="KV: newest packed tokens in this format")
    older: str | None = Field(default=None, description="KV: the format that tokens go over to after those")
    center: bool = Field(default=False, description="KV: around a static mean per head and channel")
    rotate: bool = Field(default=False, description="KV: rotated along head_dim by a normalized Hadamard matrix")
    activation: str | None = Field(default=None, description="format of the layer's input")


def describe(fmt: Format | KVFormat) -> FormatEntry:
    """Write a format out in full."""
    values = fmt.values if isinstance(fmt, KVFormat) else fmt
    entry = {
        "element": values.element.name if values.element else "BF16",
        "block": values.block,
        "scale": values.scale,
        "rule": values.rule,
        "tensor_scale": values.tensor_scale,
        "tensor_range": values.tensor_range if values.scale == "e4m3" else None,
        "activation": values.activation.name if values.activation else None,
    }
    if isinstance(fmt, KVFormat):
        entry |= {"axis": fmt.axis, "static_scale": fmt.calibration, "residual": fmt.residual, "sink": fmt.sink,
                  "refresh": fmt.refresh, "tier": fmt.tier, "older": fmt.older.name if fmt.older else None, "center": fmt.center, "rotate": fmt.rotate}  # fmt: skip
    return FormatEntry(**entry)  # type: ignore[arg-type]


def format_of(name: str, entries: dict[str, FormatEntry]) -> Format:
    """Build a weight format from its entry; raises UserError for an element or scale autoq does not know."""
    entry = entries[name]
    return _block_format(name, entry)


def kv_format_of(name: str, entries: dict[str, FormatEntry]) -> KVFormat:
    """Build a KV format from its entry."""
    entry = entries[name]
    calibration: Any = entry.static_scale if entry.static_scale is not None else "none"
    if entry.center and entry.rotate:
        raise UserError(f"the format {name} is both rotated and around a mean: autoq has either")
    values, axis = _block_format(name, entry), entry.axis or "token"
    if calibration == 0:
        raise UserError(f"the format {name} has a static scale that covers 0: give the largest magnitude, absmax or none")
    if bool(entry.tier) != (entry.older is not None):
        raise UserError(
            f"the format {name} has a tier without what follows it, or the other way round: give tier and older together"
        )
    older = None
    if entry.older is not None:
        others = {n: e for n, e in entries.items() if n != name}  # a format that leads back to itself is not there
        if entry.older not in others:
            raise unknown(f"older format of {name}:", entry.older, others)
        older = kv_format_of(entry.older, others)
    return KVFormat(
        name,
        values,
        axis,
        calibration,
        entry.residual,
        entry.sink,
        entry.center,
        entry.rotate,
        entry.tier if older else 0,
        older,
        entry.refresh,
    )


def encode_mean(mean: torch.Tensor | None) -> str | None:
    """Write a mean [KV heads, head_dim] as a recipe keeps it."""
    return None if mean is None else base64.b64encode(mean.cpu().numpy().astype("<f2").tobytes()).decode()


def decode_mean(text: str, values: int, unit: str) -> torch.Tensor:
    """Read it back as float32 [values]; raises UserError naming the unit if it is not that many finite numbers."""
    try:
        mean = torch.from_numpy(np.frombuffer(base64.b64decode(text, validate=True), "<f2").astype(np.float32))
    except ValueError as error:
        raise UserError(f"the mean of {unit} in the recipe is not base64 of float16 numbers ({error})") from error
    if mean.numel() != values or not torch.isfinite(mean).all():
        raise UserError(f"the mean of {unit} in the recipe must be {values} finite float16 numbers, and has {mean.numel()}")
    return mean


def _block_format(name: str, entry: FormatEntry) -> Format:
    activation = None
    if entry.activation is not None:
        if entry.activation not in WEIGHT_FORMATS:
            raise unknown(f"activation format of {name}:", entry.activation, WEIGHT_FORMATS)
        activation = WEIGHT_FORMATS[entry.activation]
    element = _element(name, entry.element)
    allowed = ("fp16", "fp32") if isinstance(element, IntElement) else ("fp32", "e4m3", "e8m0", "none")
    if element is not None and entry.scale not in allowed:
        raise UserError(f"the format {name} has a scale in {entry.scale}, but {entry.element} takes {', '.join(allowed)}")
    extra: dict[str, Any] = {} if entry.tensor_range is None else {"tensor_range": entry.tensor_range}
    return Format(
        name,
        element,
        entry.block,
        entry.scale,
        entry.rule,
        entry.tensor_scale,
        activation=activation,
        **extra,
    )


def _element(name: str, text: str) -> FloatElement | IntElement | None:
    if text == "BF16":
        return None
    found = re.match(r"^INT([2-8])( asym)?$", text)
    if found:
        return IntElement(int(found.group(1)), found.group(2) is not None)
    known = {element.name: element for element in (E2M1, E2M3, E3M2, E4M3, E5M2)}
    if text not in known:
        raise unknown(
            f"element of format {name}:", text, [*known, *(f"INT{n}{kind}" for kind in ("", " asym") for n in range(2, 9)), "BF16"]
        )
    return known[text]
