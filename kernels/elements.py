"""Device functions for the elements and scales of every format, in float32 and integer arithmetic alone.

They run on every device and in Triton's interpreter, and equal `autoq.formats.rounding` bit for bit: no FP8 or FP4 type, no
inline assembly, divisions rounded to nearest (`div_rn`; the plain `/` of Triton is approximate on a GPU).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def float_bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def bits_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def to_float32(x):
    """Return x in float32, exactly; the interpreter's own cast gets subnormal bfloat16 numbers wrong."""
    if x.dtype == tl.bfloat16:
        return bits_float((x.to(tl.int16, bitcast=True).to(tl.int32)) << 16)
    return x.to(tl.float32)


@triton.jit
def round_to_float(t, LARGEST: tl.constexpr, MIN_NORMAL: tl.constexpr, MANTISSA: tl.constexpr):
    """Round t to the nearest value of a small float, ties to even, saturating: 1.5 * 2^23 * step is added and taken off."""
    t = tl.minimum(tl.maximum(t, -LARGEST), LARGEST)
    step = tl.maximum(bits_float(float_bits(t) & 0x7F800000), MIN_NORMAL) * (1.5 * 2.0 ** (23 - MANTISSA))
    return (t + step) - step


@triton.jit
def round_to_integer(t, low, high):
    """Round t to the nearest integer, ties to even, within low and high (both well below 2^22)."""
    t = tl.minimum(tl.maximum(t, low), high)
    return (t + 12582912.0) - 12582912.0


@triton.jit
def encode_float(value, negative, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MIN_NORMAL: tl.constexpr):
    """Return the int32 code of a value on the grid of a small float; `negative` gives the sign, so that -0.0 keeps its own."""
    magnitude = tl.abs(value)
    bits = float_bits(magnitude)
    normal = (((bits >> 23) - 127 + BIAS) << MANTISSA) | ((bits >> (23 - MANTISSA)) & (2**MANTISSA - 1))
    subnormal = (magnitude * (2.0**MANTISSA / MIN_NORMAL)).to(tl.int32)
    code = tl.where(magnitude < MIN_NORMAL, subnormal, normal)
    return code | tl.where(negative, 1 << (BITS - 1), 0)


@triton.jit
def decode_float(code, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MIN_NORMAL: tl.constexpr):
    """Return the float32 value of an int32 code (E4M3's NaN codes as the formula has them, 480)."""
    exponent = (code >> MANTISSA) & (2 ** (BITS - 1 - MANTISSA) - 1)
    mantissa = code & (2**MANTISSA - 1)
    normal = bits_float(((exponent - BIAS + 127) << 23) | (mantissa << (23 - MANTISSA)))
    subnormal = mantissa.to(tl.float32) * (MIN_NORMAL / 2.0**MANTISSA)
    magnitude = tl.where(exponent == 0, subnormal, normal)
    return tl.where((code >> (BITS - 1)) & 1 == 1, -magnitude, magnitude)


@triton.jit
def encode_e4m3_scale(scale, absmax):
    """Round a positive scale to its E4M3 code, at least 2^-9; 1.0 for an all-zero block."""
    rounded = tl.maximum(round_to_float(scale, 448.0, 0.015625, 3), 0.001953125)
    return tl.where(absmax == 0, 0x38, encode_float(rounded, rounded < 0, 8, 3, 7, 0.015625))


@triton.jit
def decode_e4m3_scale(code):
    return decode_float(code, 8, 3, 7, 0.015625)


@triton.jit
def floor_exponent(x):
    """Return floor(log2 x) of a positive float32; anything at or below -127 for subnormal numbers."""
    return ((float_bits(x) >> 23) & 255) - 127


@triton.jit
def ceil_exponent(x):
    """Return ceil(log2 x) of a positive float32, exact down to 2^-127."""
    field = (float_bits(x) >> 23) & 255
    mantissa = float_bits(x) & 0x7FFFFF
    above = tl.where(field == 0, mantissa > 0x400000, mantissa != 0)
    return field - 127 + above.to(tl.int32)


@triton.jit
def encode_e8m0(exponent, absmax, MAX_EXPONENT: tl.constexpr):
    """Return the E8M0 code of 2^exponent, such that the largest element stays finite; 1.0 for an all-zero block."""
    code = tl.minimum(tl.maximum(exponent + 127, 0), 254 - MAX_EXPONENT)
    return tl.where(absmax == 0, 127, code)


@triton.jit
def decode_e8m0(code):
    return bits_float(tl.where(code == 0, 0x00400000, code << 23))


@triton.jit
def round_fp16_scale(scale):
    """Round to float16, never to zero and never to infinity; an all-zero block gets the scale 1."""
    magnitude = tl.minimum(tl.maximum(tl.abs(scale), 5.9604644775390625e-08), 65504.0)
    signed = tl.where(scale < 0, -magnitude, magnitude)
    return tl.where(scale == 0, 1.0, signed).to(tl.float16)


@triton.jit
def bfloat16_bits(x):
    """Return the int16 bits of float32 rounded to bfloat16, ties to even; the interpreter's own cast truncates."""
    bits = float_bits(x)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
