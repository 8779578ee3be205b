"""Round float32 values to the grid of an element, in place. Plain arithmetic: exact, and the same on every device."""

from __future__ import annotations

import torch

from autoq.formats.format import Element, FloatElement, IntElement

_EXPONENT_MASK = 0x7F800000


def round_to_element_(t: torch.Tensor, element: Element, zero: torch.Tensor | None = None) -> torch.Tensor:
    """Round `t` (float32, already divided by its scale) to the nearest value of `element`, ties to even, saturating.

    For an asymmetric integer the values are codes minus the zero point `zero` (broadcastable to t), so that the scale
    times the result is the decoded value.
    """
    if isinstance(element, FloatElement):
        return _round_float_(t, element)
    if element.asymmetric:
        if zero is None:
            raise ValueError(f"{element.name} needs a zero point")
        t.round_()
        torch.clamp(t, element.low - zero, element.high - zero, out=t)
    else:
        t.round_().clamp_(element.low, element.high)
    return t


def _round_float_(t: torch.Tensor, element: FloatElement) -> torch.Tensor:
    """Adding and subtracting 1.5 * 2^23 * step leaves a multiple of step, rounded to nearest even by the addition itself.

    step = 2^(exponent of t - mantissa bits), and never less than that of the subnormals.
    """
    t.clamp_(-element.largest, element.largest)
    magic = torch.empty_like(t)
    torch.bitwise_and(t.view(torch.int32), _EXPONENT_MASK, out=magic.view(torch.int32))
    magic.clamp_(min=2.0**element.min_exponent).mul_(1.5 * 2.0 ** (23 - element.mantissa_bits))
    t.add_(magic)
    t.sub_(magic)
    return t


def encode_element(
    values: torch.Tensor, element: Element, negative: torch.Tensor, zero: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the uint8 codes of values on the grid of `element`; `negative` gives the sign, so that -0.0 keeps its own."""
    if isinstance(element, IntElement):
        codes = values if zero is None else values + zero
        return (codes.to(torch.int32) & ((1 << element.bits) - 1)).to(torch.uint8)
    bits = values.abs().view(torch.int32)
    m = element.mantissa_bits
    normal = (((bits >> 23) - 127 + element.bias) << m) | ((bits >> (23 - m)) & (2**m - 1))
    subnormal = (values.abs() * 2.0 ** (m - element.min_exponent)).to(torch.int32)
    magnitude = torch.where(values.abs() < 2.0**element.min_exponent, subnormal, normal)
    return (magnitude | (negative.to(torch.int32) << (element.bits - 1))).to(torch.uint8)


def decode_element(codes: torch.Tensor, element: Element, zero: torch.Tensor | None = None) -> torch.Tensor:
    """Return the float32 values of uint8 codes."""
    if isinstance(element, IntElement):
        values = codes.to(torch.float32)
        if zero is not None:
            return values - zero
        return torch.where(values > element.high, values - 2**element.bits, values)
    return code_table(element).to(codes.device)[codes.long()]


def code_table(element: FloatElement) -> torch.Tensor:
    """Return the float32 value of each of the 2^bits codes of a floating-point element (those beyond `largest` as computed)."""
    codes = torch.arange(2**element.bits)
    m = element.mantissa_bits
    exponent = (codes >> m) & (2**element.exponent_bits - 1)
    mantissa = (codes & (2**m - 1)).to(torch.float64) / 2**m
    normal = (1 + mantissa) * torch.exp2(exponent.to(torch.float64) - element.bias)
    magnitude = torch.where(exponent == 0, mantissa * 2.0**element.min_exponent, normal)
    return torch.where(codes >> (element.bits - 1) == 1, -magnitude, magnitude).to(torch.float32)


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack uint8 codes [..., n] of `bits` bits into bytes [..., ceil(n * bits / 8)]; the first code takes the lowest bits."""
    if bits == 8:
        return codes
    n = codes.shape[-1]
    stream = (codes.unsqueeze(-1) >> torch.arange(bits, device=codes.device, dtype=torch.uint8)) & 1
    stream = stream.flatten(-2)
    padding = -(n * bits) % 8
    stream = torch.nn.functional.pad(stream, (0, padding)).unflatten(-1, (-1, 8))
    packed: torch.Tensor = (stream << torch.arange(8, device=codes.device, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
    return packed


def unpack_bits(packed: torch.Tensor, bits: int, n: int) -> torch.Tensor:
    """Undo pack_bits: bytes [..., ceil(n * bits / 8)] to uint8 codes [..., n]."""
    if bits == 8:
        return packed
    stream = (packed.unsqueeze(-1) >> torch.arange(8, device=packed.device, dtype=torch.uint8)) & 1
    stream = stream.flatten(-2)[..., : n * bits].unflatten(-1, (n, bits))
    codes: torch.Tensor = (stream << torch.arange(bits, device=packed.device, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
    return codes
