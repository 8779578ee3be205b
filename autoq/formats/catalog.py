"""Every format by name. A new format is one more line here."""

from __future__ import annotations

import re
from dataclasses import replace

from autoq.errors import UserError, unknown
from autoq.formats.format import E2M1, E2M3, E3M2, E4M3, E5M2, Format, IntElement, KVFormat

_INT8, _INT5, _INT4 = IntElement(8), IntElement(5), IntElement(4)
_INT8A, _INT4A, _INT3A, _INT2A = (IntElement(n, asymmetric=True) for n in (8, 4, 3, 2))

_FP8 = Format("fp8", E4M3, None, "fp32")
_INT8_ROW = Format("int8", _INT8, None, "fp16")
_INT8_HALF = replace(_INT8_ROW, name="int8_half", rule="half_step")
_MXFP8 = Format("mxfp8", E4M3, 32, "e8m0", "floor")
_MXFP8_EVEN = replace(_MXFP8, name="mxfp8_even", rule="even")
_MXFP4 = Format("mxfp4", E2M1, 32, "e8m0", "floor")
_NVFP4 = Format("nvfp4", E2M1, 16, "e4m3", tensor_scale=True)
_INT4_G128 = Format("int4_g128", _INT4, 128, "fp16")
_INT4_G64 = Format("int4_g64", _INT4, 64, "fp16")
_INT4_G32_ASYM = Format("int4_g32_asym", _INT4A, 32, "fp16", "minmax")
_INT3_G64_ASYM = Format("int3_g64_asym", _INT3A, 64, "fp16", "minmax")
_INT2_G32_ASYM = Format("int2_g32_asym", _INT2A, 32, "fp16", "minmax")

_WEIGHTS = [
    Format("bf16", None),
    _FP8,
    _INT8_ROW,
    _INT8_HALF,
    replace(_INT8_ROW, name="int8_full", rule="full_range"),
    Format("int8_g64_asym", _INT8A, 64, "fp16", "minmax"),
    Format("q8_0", _INT8, 32, "fp16"),  # llama.cpp's, as q5_0 and q4_0 below
    _MXFP8,
    _MXFP8_EVEN,
    Format("mxfp6_e2m3", E2M3, 32, "e8m0", "floor"),
    Format("mxfp6_e3m2", E3M2, 32, "e8m0", "floor"),
    Format("q5_0", _INT5, 32, "fp16", "full_range"),
    _INT4_G32_ASYM,
    replace(_INT4_G32_ASYM, name="int4_g32_asym_lsq", rule="least_squares"),
    _NVFP4,
    replace(_NVFP4, name="nvfp4_4over6", rule="4over6", tensor_range=256.0),
    replace(_NVFP4, name="nvfp4_lsq", rule="least_squares"),
    Format("q4_0", _INT4, 32, "fp16", "full_range"),
    Format("int4_g64_asym", _INT4A, 64, "fp16", "minmax"),
    _MXFP4,
    replace(_MXFP4, name="mxfp4_ceil", rule="ceil"),
    replace(_MXFP4, name="mxfp4_even", rule="even"),
    replace(_MXFP4, name="mxfp4_lsq", rule="least_squares"),
    _INT4_G64,
    replace(_INT4_G64, name="int4_g64_full", rule="full_range"),
    replace(_INT4_G64, name="int4_g64_half", rule="half_step"),
    replace(_INT4_G64, name="int4_g64_lsq", rule="least_squares"),
    _INT4_G128,
    replace(_INT4_G128, name="int4_g128_full", rule="full_range"),
    replace(_INT4_G128, name="int4_g128_half", rule="half_step"),
    replace(_INT4_G128, name="int4_g128_lsq", rule="least_squares"),
    _INT3_G64_ASYM,
    replace(_INT3_G64_ASYM, name="int3_g64_asym_lsq", rule="least_squares"),
    _INT2_G32_ASYM,
    replace(_INT2_G32_ASYM, name="int2_g32_asym_lsq", rule="least_squares"),
    replace(_FP8, name="fp8_w8a8", activation=_FP8),
    replace(_INT8_ROW, name="int8_w8a8", activation=_INT8_ROW),
    replace(_INT8_HALF, name="int8_w8a8_half", activation=_INT8_HALF),
    replace(_MXFP8, name="mxfp8_w8a8", activation=_MXFP8),
    replace(_MXFP8_EVEN, name="mxfp8_w8a8_even", activation=_MXFP8_EVEN),
    replace(_NVFP4, name="nvfp4_w4a4", activation=_NVFP4),
]


def _token(bits: int) -> KVFormat:
    return KVFormat(f"int{bits}_token", Format(f"int{bits}_g64_asym", IntElement(bits, True), 64, "fp16", "minmax"))


def _channel(bits: int) -> KVFormat:
    values = Format(f"int{bits}_g32_asym", IntElement(bits, True), 32, "fp16", "minmax")
    return KVFormat(f"int{bits}_channel", values, axis="channel")


_STATIC_FP8 = Format("fp8", E4M3, None, "none")
_KV = [
    KVFormat("bf16", Format("bf16", None)),
    KVFormat("mxfp8", _MXFP8),
    KVFormat("fp8", _STATIC_FP8, calibration="absmax"),
    KVFormat("fp8_affine", _STATIC_FP8, calibration="absmax", center=True),
    KVFormat("fp8_cast", _STATIC_FP8, calibration=448.0),
    KVFormat("fp8_e5m2", Format("fp8_e5m2", E5M2, None, "none"), calibration=57344.0),
    _token(8),
    _channel(8),
    KVFormat("int8_head", Format("int8_row", _INT8, None, "fp32")),  # vLLM's int8_per_token_head
    KVFormat("q8_0", Format("int8_g32", _INT8, 32, "fp16")),  # llama.cpp's, as q4_0 below
    KVFormat("nvfp4", replace(_NVFP4, tensor_scale=False), calibration="absmax"),
    KVFormat("nvfp4_affine", replace(_NVFP4, tensor_scale=False), calibration="absmax", center=True),
    KVFormat("nvfp4_rotate", replace(_NVFP4, tensor_scale=False), calibration="absmax", rotate=True),
    KVFormat("nvfp4_cast", replace(_NVFP4, tensor_scale=False), calibration=448.0),
    KVFormat("mxfp4", _MXFP4),
    _token(4),
    _channel(4),
    KVFormat("q4_0", Format("int4_g32_full", _INT4, 32, "fp16", "full_range")),
    _token(2),
    _channel(2),
]

WEIGHT_FORMATS: dict[str, Format] = {f.name: f for f in _WEIGHTS}
KV_FORMATS: dict[str, KVFormat] = {f.name: f for f in _KV}


_OWN = set[str]()  # names that search spaces defined


def define(fmt: Format | KVFormat) -> None:
    """Add a format for as long as this process runs, as search spaces do with formats of their own.

    Raises UserError for a name that cannot be written in a space, or that means another format already.
    """
    kind = "weight" if isinstance(fmt, Format) else "KV"
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", fmt.name):
        raise UserError(f"the format name {fmt.name!r} must be lower-case letters, digits and '_', and begin with a letter")
    known = (WEIGHT_FORMATS if isinstance(fmt, Format) else KV_FORMATS).get(fmt.name)
    if known not in (None, fmt):
        raise UserError(f"the {kind} format {fmt.name!r} is there already, and means another one: give yours another name")
    if known is not None:
        return
    _OWN.add(f"{kind}/{fmt.name}")
    if isinstance(fmt, Format):
        WEIGHT_FORMATS[fmt.name] = fmt
    else:
        KV_FORMATS[fmt.name] = fmt


def is_own(fmt: Format | KVFormat) -> bool:
    """True for a format that a search space defined."""
    return f"{'weight' if isinstance(fmt, Format) else 'KV'}/{fmt.name.split('+')[0]}" in _OWN


def weight_format(name: str) -> Format:
    """Return the weight format of that name; raises UserError with the nearest name."""
    if name not in WEIGHT_FORMATS:
        raise unknown("weight format", name, WEIGHT_FORMATS)
    return WEIGHT_FORMATS[name]


def kv_format(name: str) -> KVFormat:
    """Return the KV format of that name, with options as `name+residual128+sink4`; raises UserError.

    `int8_token+tier512>int4_channel` keeps the newest 512 packed tokens in the first format, older ones in the second.
    """
    newest, *aged = name.split(">", 1)
    base, *options = newest.split("+")
    if base not in KV_FORMATS:
        raise unknown("KV format", base, KV_FORMATS)
    found = KV_FORMATS[base]
    for option in options:
        key = option.rstrip("0123456789")
        count = option[len(key) :]
        if key not in ("residual", "sink", "tier", "refresh") or not 1 <= len(count) <= 9:
            raise unknown("KV option", option, ["residual128", "sink4", "tier512", "refresh256"])
        if int(count) == 0 or getattr(found, key) or found.is_original:
            raise UserError(f"KV format {name!r}: {option} has no effect, or is given twice")
        found = replace(found, **{key: int(count)})  # type: ignore[arg-type]
    if bool(aged) != bool(found.tier):
        raise UserError(f"KV format {name!r}: write a tier with what follows it, as int8_token+tier512>int4_channel")
    return replace(found, name=name, older=kv_format(aged[0]) if aged else None)
