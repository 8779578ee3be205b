"""The reference of every block format, in plain torch: choose the scales, encode to packed bytes, decode.

Layout of a packed matrix [rows, width]: codes row by row, the first code of a byte in its lowest bits (so the low nibble
of an FP4 byte is the even index); a ragged last block padded with zeros; scales [rows, blocks] in their stored type; zero
points packed like codes over the whole matrix; one float32 tensor scale where the format has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from autoq.formats.format import E4M3, FloatElement, Format, IntElement
from autoq.formats.rounding import decode_element, encode_element, pack_bits, round_to_element_, unpack_bits

FP16_MAX = 65504.0
FP16_TINY = 2.0**-24  # smallest positive float16, so that no stored scale is zero
E4M3_SCALE_FLOOR = 2.0**-9  # smallest block scale of a block that is not all zero (ModelOpt's packed path)
E4M3_ONE = 0x38  # code of 1.0, the block scale of an all-zero block
# What `least_squares` tries beside the plain scale: clips of it for integers, neighbours of its code for E4M3 and E8M0 scales.
LEAST_SQUARES_CLIPS = tuple(1 - 0.04 * i for i in range(13))  # 1.00 down to 0.52
E4M3_STEPS = (-2, -1, 1, 2, 3, 4, 5, 6)
E8M0_STEPS = (-1, 1)


@dataclass(frozen=True)
class Scales:
    """The scales of a matrix as stored.

    Attributes:
        block: [rows, blocks]; uint8 codes for E4M3 and E8M0 scales, else float16 or float32.
        zero: [rows, blocks] uint8 zero points, or None.
        tensor: float32 scalar that multiplies every block scale, or None.
    """

    block: torch.Tensor
    zero: torch.Tensor | None = None
    tensor: torch.Tensor | None = None

    def effective(self, fmt: Format) -> torch.Tensor:
        """Return the float32 scale of every block [rows, blocks], as the decoder uses it."""
        scale = _decode_scale(self.block, fmt)
        return scale if self.tensor is None else scale * self.tensor

    def rows(self, start: int, stop: int) -> Scales:
        """Return the scales of some rows."""
        return Scales(self.block[start:stop], None if self.zero is None else self.zero[start:stop], self.tensor)


@dataclass(frozen=True)
class Packed:
    """A matrix in its stored bytes. `codes` is uint8 [rows, bytes a row] (bfloat16 [rows, width] for the original)."""

    fmt: Format
    shape: tuple[int, int]
    codes: torch.Tensor
    scales: Scales | None
    zeros: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes really held; equals `fmt.storage_bits(shape) / 8`."""
        parts = [self.codes, self.zeros]
        if self.scales is not None:
            parts += [self.scales.block if self.fmt.scale != "none" else None]
            parts += [self.scales.tensor if self.fmt.tensor_scale else None]
        return sum(p.numel() * p.element_size() for p in parts if p is not None)


def to_blocks(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return x [rows, width] as float32 [rows, blocks, block], padded with zeros."""
    block = fmt.block or x.shape[-1]
    x = x.to(torch.float32)
    padding = -x.shape[-1] % block
    if padding:
        x = torch.nn.functional.pad(x, (0, padding))
    return x.reshape(x.shape[0], -1, block)


def fit(fmt: Format, x: torch.Tensor, absmax: torch.Tensor | None = None, importance: torch.Tensor | None = None) -> Scales:
    """Choose the scales of x [rows, width], rounded to their stored type.

    Args:
        absmax: float32 scalar, the largest magnitude the tensor scale (or the static scale) must cover; by default that of x.
        importance: [width] weights of the squared error for `rule="least_squares"`.
    """
    weight = None if importance is None else to_blocks(importance.reshape(1, -1), fmt)
    return fit_blocks(fmt, to_blocks(x, fmt), -1, absmax, weight)


def fit_blocks(
    fmt: Format, blocks: torch.Tensor, dim: int, absmax: torch.Tensor | None = None, weight: torch.Tensor | None = None
) -> Scales:
    """Choose the scales of float32 blocks whose values run along `dim`; the scales have the other dimensions.

    The profile keeps weights as [blocks, block, rows], where every operation runs over contiguous rows (dim=1).
    """
    if fmt.scale in ("none", "e4m3") and absmax is None:
        absmax = blocks.abs().amax()
    tensor = tensor_scale(fmt, absmax) if fmt.scale in ("none", "e4m3") and absmax is not None else None
    candidates = _candidates(fmt, blocks, dim, tensor)
    best = next(candidates)
    if fmt.rule not in ("4over6", "least_squares"):
        return best
    best_error = squared_error(fmt, blocks, best, dim, weight)
    block, zero = best.block, best.zero
    for other in candidates:
        error = squared_error(fmt, blocks, other, dim, weight)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        block = torch.where(better, other.block, block)
        if zero is not None and other.zero is not None:
            zero = torch.where(better, other.zero, zero)
    return Scales(block, zero, tensor)


def tensor_scale(fmt: Format, absmax: torch.Tensor) -> torch.Tensor:
    """Return the float32 scale of a whole tensor whose largest magnitude is absmax (float32 scalar)."""
    assert isinstance(fmt.element, FloatElement)
    covered = fmt.element.largest * (fmt.tensor_range if fmt.scale == "e4m3" else 1.0)
    return torch.where(absmax == 0, torch.ones_like(absmax), absmax) / covered


def quantize(fmt: Format, blocks: torch.Tensor, scales: Scales, dim: int = -1) -> torch.Tensor:
    """Return the element values of blocks under these scales (codes minus zero point for integers)."""
    assert fmt.element is not None
    zero = None if scales.zero is None else scales.zero.to(torch.float32).unsqueeze(dim)
    return round_to_element_(blocks / scales.effective(fmt).unsqueeze(dim), fmt.element, zero)


def fake_quantize_blocks(fmt: Format, blocks: torch.Tensor, scales: Scales, dim: int = -1) -> torch.Tensor:
    """Return the decoded values of blocks under these scales."""
    return quantize(fmt, blocks, scales, dim).mul_(scales.effective(fmt).unsqueeze(dim))


def rounding_error(
    fmt: Format, blocks: torch.Tensor, negated: torch.Tensor, scales: Scales, dim: int = -1, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return decoded values minus blocks; `negated` is -blocks, so that scaling back and subtracting are one step.

    Args:
        out: contiguous memory for the result, as many values as blocks.
    """
    assert fmt.element is not None
    scale = scales.effective(fmt).unsqueeze(dim)
    zero = None if scales.zero is None else scales.zero.to(torch.float32).unsqueeze(dim)
    values = round_to_element_(blocks / scale, fmt.element, zero)
    return torch.addcmul(negated, values, scale, out=values if out is None else out.view(blocks.shape))


def squared_error(
    fmt: Format, blocks: torch.Tensor, scales: Scales, dim: int = -1, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the (weighted) squared error of every block, summed in float64: a kernel that adds in another order picks the same scale."""
    error = fake_quantize_blocks(fmt, blocks, scales, dim).sub_(blocks).square_()
    return (error if weight is None else error.mul_(weight)).sum(dim, dtype=torch.float64)


def fake_quantize(fmt: Format, x: torch.Tensor, scales: Scales | None = None, absmax: torch.Tensor | None = None) -> torch.Tensor:
    """Return decode(encode(x)) in float32 without packing the codes; x is [rows, width]."""
    if fmt.is_original:
        return x.to(torch.float32)
    scales = scales or fit(fmt, x, absmax)
    return fake_quantize_blocks(fmt, to_blocks(x, fmt), scales).flatten(1)[:, : x.shape[1]]


def encode(fmt: Format, x: torch.Tensor, scales: Scales | None = None, absmax: torch.Tensor | None = None) -> Packed:
    """Pack x [rows, width] into the bytes of the format."""
    rows, width = x.shape
    if fmt.element is None:
        return Packed(fmt, (rows, width), x.to(torch.bfloat16), None, None)
    scales = scales or fit(fmt, x, absmax)
    blocks = to_blocks(x, fmt)
    zero = None if scales.zero is None else scales.zero.to(torch.float32).unsqueeze(-1)
    negative = torch.signbit(blocks) ^ torch.signbit(scales.effective(fmt)).unsqueeze(-1)
    codes = encode_element(quantize(fmt, blocks, scales), fmt.element, negative, zero).flatten(1)
    zeros = None
    if scales.zero is not None:
        zeros = pack_bits(scales.zero.flatten(), fmt.element.bits)
    return Packed(fmt, (rows, width), pack_bits(codes, fmt.element.bits), scales, zeros)


def decode(packed: Packed) -> torch.Tensor:
    """Return the float32 matrix [rows, width] of packed bytes."""
    fmt, (rows, width) = packed.fmt, packed.shape
    if fmt.element is None or packed.scales is None:
        return packed.codes.to(torch.float32)
    blocks, bits = fmt.blocks(width), fmt.element.bits
    n = width if fmt.block is None else blocks * fmt.block
    codes = unpack_bits(packed.codes, bits, n).view(rows, blocks, -1)
    zero = None
    if packed.zeros is not None:
        zero = unpack_bits(packed.zeros, bits, rows * blocks).view(rows, blocks, 1).to(torch.float32)
    values = decode_element(codes, fmt.element, zero) * packed.scales.effective(fmt).unsqueeze(-1)
    return values.flatten(1)[:, :width]


def _candidates(fmt: Format, blocks: torch.Tensor, dim: int, tensor: torch.Tensor | None) -> Iterator[Scales]:
    """Yield the scales the rule considers, the plain one first."""
    if isinstance(fmt.element, IntElement):
        clips = LEAST_SQUARES_CLIPS if fmt.rule == "least_squares" else (1.0,)
        if fmt.element.asymmetric:
            yield from (_asymmetric_scales(fmt.element, blocks, dim, clip) for clip in clips)
        else:
            yield from (_symmetric_scales(fmt, blocks, dim, clip) for clip in clips)
        return
    absmax = blocks.abs().amax(dim)
    if fmt.scale == "none":
        yield Scales(torch.ones_like(absmax), None, tensor)
        return
    if fmt.scale == "e8m0":
        yield from _power_of_two_scales(fmt, absmax)
        return
    assert isinstance(fmt.element, FloatElement)
    if fmt.scale == "fp32":
        yield Scales(torch.where(absmax == 0, torch.ones_like(absmax), absmax / fmt.element.largest))
        return
    assert tensor is not None
    plain = _encode_e4m3_scale(absmax / fmt.element.largest / tensor, absmax)
    yield Scales(plain, None, tensor)
    if fmt.rule == "4over6":
        yield Scales(_encode_e4m3_scale(absmax / 4.0 / tensor, absmax), None, tensor)
    if fmt.rule == "least_squares":  # E4M3 codes are ordered: walk the neighbours of the plain scale
        for step in E4M3_STEPS:
            moved = (plain.to(torch.int32) + step).clamp(1, 126).to(torch.uint8)
            yield Scales(torch.where(absmax == 0, plain, moved), None, tensor)


def _symmetric_scales(fmt: Format, blocks: torch.Tensor, dim: int, clip: float) -> Scales:
    assert isinstance(fmt.element, IntElement)
    if fmt.rule == "full_range":  # the entry of largest magnitude maps to the most negative code; the scale carries its sign
        at = blocks.abs().argmax(dim, keepdim=True)
        scale = blocks.gather(dim, at).squeeze(dim) / fmt.element.low
    else:
        steps = fmt.element.high + (0.5 if fmt.rule == "half_step" else 0.0)
        absmax = blocks.abs().amax(dim)
        scale = absmax / steps * clip
        if fmt.scale == "fp32":
            return Scales(torch.where(absmax == 0, 1.0, scale))
    return Scales(_encode_fp16_scale(scale))


def _asymmetric_scales(element: IntElement, blocks: torch.Tensor, dim: int, clip: float) -> Scales:
    low = blocks.amin(dim).clamp_(max=0.0) * clip
    high = blocks.amax(dim).clamp_(min=0.0) * clip
    scale = _encode_fp16_scale((high - low) / element.high)
    zero = torch.round(-low / scale.to(torch.float32)).clamp_(0, element.high)
    return Scales(scale, zero.to(torch.uint8))


def _power_of_two_scales(fmt: Format, absmax: torch.Tensor) -> Iterator[Scales]:
    """E8M0 scales: OCP MX 1.0, section 6.3 (floor); `ceil` never clips; `even` rounds absmax's mantissa first."""
    assert isinstance(fmt.element, FloatElement)
    if fmt.rule == "ceil":
        bits = (absmax / fmt.element.largest).view(torch.int32)
        field, mantissa = bits >> 23, bits & 0x7FFFFF
        exponent = field - 127 + torch.where(field == 0, mantissa > 0x400000, mantissa != 0)  # ceil(log2), subnormal numbers too
    elif fmt.rule == "even":
        half = 1 << (22 - fmt.element.mantissa_bits)
        exponent = ((absmax.view(torch.int32) + half) >> 23) - 127 - fmt.element.max_exponent  # may pass the largest float32
    else:
        exponent = torch.frexp(absmax)[1] - 1 - fmt.element.max_exponent
    steps = (0, *E8M0_STEPS) if fmt.rule == "least_squares" else (0,)
    for step in steps:
        code = (exponent + step + 127).clamp(0, 254 - fmt.element.max_exponent)  # the largest element stays finite
        yield Scales(torch.where(absmax == 0, 127, code).to(torch.uint8))


def _encode_fp16_scale(scale: torch.Tensor) -> torch.Tensor:
    """Round to float16, never to zero and never to infinity; an all-zero block gets the scale 1."""
    magnitude = scale.abs().clamp(FP16_TINY, FP16_MAX)
    return torch.where(scale == 0, 1.0, torch.copysign(magnitude, scale)).to(torch.float16)


def _encode_e4m3_scale(scale: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    """Round to E4M3 codes, at least 2^-9; an all-zero block gets the scale 1."""
    rounded = round_to_element_(scale.clone(), E4M3).clamp_(min=E4M3_SCALE_FLOOR)
    codes = encode_element(rounded, E4M3, torch.zeros_like(rounded, dtype=torch.bool))
    return torch.where(absmax == 0, E4M3_ONE, codes)


def _decode_scale(stored: torch.Tensor, fmt: Format) -> torch.Tensor:
    if fmt.scale == "e8m0":
        return stored.view(torch.float8_e8m0fnu).to(torch.float32)
    if fmt.scale == "e4m3":
        return stored.view(torch.float8_e4m3fn).to(torch.float32)
    return stored.to(torch.float32)
