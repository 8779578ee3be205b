"""Encode a matrix [rows, width] into the packed bytes of a block format.

Layout: `Packed` of autoq.formats.reference. Codes row by row, the first code of a byte in its lowest bits; scales [rows,
blocks] in their stored type; zero points packed like codes over the whole matrix. A program takes some rows and some blocks of
each, and reads every value once; where the block is the row, `_encode_rows` reads it twice.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from autoq.formats.format import FloatElement, Format, IntElement
from autoq.formats.reference import E4M3_STEPS, E8M0_STEPS, LEAST_SQUARES_CLIPS, Packed, Scales, tensor_scale
from autoq.kernels.elements import (
    ceil_exponent,
    decode_e4m3_scale,
    decode_e8m0,
    encode_e4m3_scale,
    encode_e8m0,
    encode_float,
    float_bits,
    floor_exponent,
    round_fp16_scale,
    round_to_float,
    round_to_integer,
    to_float32,
)
from autoq.kernels.launch import tile
from autoq.kernels.pack import pack

WHOLE_BYTES = {2: 4, 3: 8, 4: 2, 6: 4, 8: 1}  # bits -> how many codes fill whole bytes
SCALE_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "e4m3": torch.uint8, "e8m0": torch.uint8}


@triton.jit
def _scale(low, high, absmax, largest, tensor, step, clip,
           SCALE: tl.constexpr, RULE: tl.constexpr, ASYMMETRIC: tl.constexpr, LARGEST: tl.constexpr, LOW: tl.constexpr,
           STEPS: tl.constexpr, MANTISSA: tl.constexpr, MAX_EXPONENT: tl.constexpr):  # fmt: skip
    """Return (stored scale, zero point, scale as used) of blocks for one candidate of the rule.

    `largest` is the value of largest magnitude with its sign.
    """
    zero = tl.zeros_like(absmax)
    if SCALE == "e8m0":
        if RULE == "ceil":
            exponent = ceil_exponent(tl.div_rn(absmax, tl.full(absmax.shape, LARGEST, tl.float32)))
        elif RULE == "even":
            exponent = (((float_bits(absmax) + (1 << (22 - MANTISSA))) >> 23) & 255) - 127 - MAX_EXPONENT
        else:
            exponent = floor_exponent(absmax) - MAX_EXPONENT
        stored = encode_e8m0(exponent + step, absmax, MAX_EXPONENT)
        used = decode_e8m0(stored)
    elif SCALE == "e4m3":
        plain = encode_e4m3_scale(
            tl.div_rn(tl.div_rn(absmax, tl.zeros_like(absmax) + clip), tl.zeros_like(absmax) + tensor), absmax
        )
        moved = tl.minimum(tl.maximum(plain + step, 1), 126)
        stored = tl.where((absmax == 0) | (step == 0), plain, moved)
        used = decode_e4m3_scale(stored) * tensor
    elif ASYMMETRIC:
        bottom, top = tl.minimum(low, 0.0) * clip, tl.maximum(high, 0.0) * clip
        stored = round_fp16_scale(tl.div_rn(top - bottom, tl.full(absmax.shape, LARGEST, tl.float32)))
        used = stored.to(tl.float32)
        zero = round_to_integer(tl.div_rn(-bottom, used), 0.0, LARGEST)
    elif RULE == "full_range":
        stored = round_fp16_scale(tl.div_rn(largest, tl.full(absmax.shape, LOW, tl.float32)))
        used = stored.to(tl.float32)
    else:
        stored = round_fp16_scale(tl.div_rn(absmax, tl.full(absmax.shape, STEPS, tl.float32)) * clip)
        used = stored.to(tl.float32)
    return stored, zero, used


@triton.jit
def _quantize(x, used, zero, IS_FLOAT: tl.constexpr, ASYMMETRIC: tl.constexpr, LARGEST: tl.constexpr, LOW: tl.constexpr,
              MANTISSA: tl.constexpr, MIN_NORMAL: tl.constexpr):  # fmt: skip
    """Return element values of x under scales that broadcast to it (codes minus zero point for integers)."""
    t = tl.div_rn(x, tl.zeros_like(x) + used)
    if IS_FLOAT:
        return round_to_float(t, LARGEST, MIN_NORMAL, MANTISSA)
    if ASYMMETRIC:
        return round_to_integer(t, 0.0 - zero, LARGEST - zero)
    return round_to_integer(t, LOW, LARGEST)


@triton.jit
def _codes(x, values, used, zero, IS_FLOAT: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
           MIN_NORMAL: tl.constexpr):  # fmt: skip
    if IS_FLOAT:
        return encode_float(values, (float_bits(x) < 0) != (used < 0), BITS, MANTISSA, BIAS, MIN_NORMAL)
    return (values + zero).to(tl.int32) & ((1 << BITS) - 1)


@triton.jit
def encode_blocks_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, tensor_ptr, steps_ptr, clips_ptr, rows, width, blocks, row_bytes, stride_row, stride_col,
    candidates,
    SEARCH: tl.constexpr, SCALE: tl.constexpr, RULE: tl.constexpr, IS_FLOAT: tl.constexpr, ASYMMETRIC: tl.constexpr,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MIN_NORMAL: tl.constexpr, LARGEST: tl.constexpr,
    LOW: tl.constexpr, STEPS: tl.constexpr, MAX_EXPONENT: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Encode x [rows, width]: ROWS rows x BLOCKS blocks of BLOCK values a program, each laid out as PADDED values.

    GROUP codes fill whole bytes; GROUP 0 leaves one code a byte, to be packed afterwards.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inner = tl.arange(0, PADDED)[None, None, :]
    column = block[None, :, None] * BLOCK + inner
    mask = (row[:, None, None] < rows) & (column < width) & (inner < BLOCK)
    offset = row[:, None, None].to(tl.int64) * stride_row + column.to(tl.int64) * stride_col
    x = to_float32(tl.load(x_ptr + offset, mask=mask, other=0.0))
    tensor = tl.load(tensor_ptr)
    low, high = tl.min(x, axis=2), tl.max(x, axis=2)
    absmax = tl.maximum(high, -low)
    largest = absmax
    if RULE == "full_range":  # the first value of largest magnitude, with its sign
        first = tl.min(tl.where(tl.abs(x) == absmax[:, :, None], inner, PADDED), axis=2)
        largest = tl.sum(tl.where(inner == first[:, :, None], x, 0.0), axis=2)
    stored, zero, used = _scale(
        low, high, absmax, largest, tensor, tl.load(steps_ptr), tl.load(clips_ptr),
        SCALE, RULE, ASYMMETRIC, LARGEST, LOW, STEPS, MANTISSA, MAX_EXPONENT,
    )  # fmt: skip
    values = _quantize(x, used[:, :, None], zero[:, :, None], IS_FLOAT, ASYMMETRIC, LARGEST, LOW, MANTISSA, MIN_NORMAL)
    if SEARCH:
        error = values * used[:, :, None] - x
        least = tl.sum((error * error).to(tl.float64), axis=2)
        for i in range(1, candidates):
            other, other_zero, other_used = _scale(
                low, high, absmax, largest, tensor, tl.load(steps_ptr + i), tl.load(clips_ptr + i),
                SCALE, RULE, ASYMMETRIC, LARGEST, LOW, STEPS, MANTISSA, MAX_EXPONENT,
            )  # fmt: skip
            found = _quantize(
                x, other_used[:, :, None], other_zero[:, :, None], IS_FLOAT, ASYMMETRIC, LARGEST, LOW, MANTISSA, MIN_NORMAL
            )
            error = found * other_used[:, :, None] - x
            total = tl.sum((error * error).to(tl.float64), axis=2)
            better = total < least
            least = tl.where(better, total, least)
            stored = tl.where(better, other, stored)
            zero = tl.where(better, other_zero, zero)
            used = tl.where(better, other_used, used)
            values = tl.where(better[:, :, None], found, values)
    inside = (row[:, None] < rows) & (block[None, :] < blocks)
    at = row[:, None].to(tl.int64) * blocks + block[None, :]
    tl.store(scales_ptr + at, stored.to(scales_ptr.dtype.element_ty), mask=inside)
    if ASYMMETRIC:
        tl.store(zeros_ptr + at, zero.to(tl.uint8), mask=inside)
    word = _codes(x, values, used[:, :, None], zero[:, :, None], IS_FLOAT, BITS, MANTISSA, BIAS, MIN_NORMAL)
    if GROUP == 0:
        place = codes_ptr + row[:, None, None].to(tl.int64) * row_bytes + column
        tl.store(place, word.to(tl.uint8), mask=inside[:, :, None] & (inner < BLOCK))
    else:
        word = tl.reshape(word, (ROWS, BLOCKS * BLOCK))
        if GROUP >= 2:
            first, second = tl.split(tl.reshape(word, (ROWS, BLOCKS * BLOCK // 2, 2)))
            word = first | (second << BITS)
        if GROUP >= 4:
            first, second = tl.split(tl.reshape(word, (ROWS, BLOCKS * BLOCK // 4, 2)))
            word = first | (second << (2 * BITS))
        if GROUP >= 8:
            first, second = tl.split(tl.reshape(word, (ROWS, BLOCKS * BLOCK // 8, 2)))
            word = first | (second << (4 * BITS))
        BYTES: tl.constexpr = GROUP * BITS // 8
        place = tl.program_id(1) * (BLOCKS * BLOCK // GROUP) + tl.arange(0, BLOCKS * BLOCK // GROUP)
        target = codes_ptr + row[:, None].to(tl.int64) * row_bytes + place[None, :] * BYTES
        written = (row[:, None] < rows) & (place[None, :] < blocks * (BLOCK // GROUP))
        for byte in tl.static_range(BYTES):
            tl.store(target + byte, ((word >> (8 * byte)) & 255).to(tl.uint8), mask=written)


@triton.jit
def encode_rows_kernel(
    x_ptr, codes_ptr, scales_ptr, tensor_ptr, rows, width, stride_row, stride_col,
    SCALE: tl.constexpr, RULE: tl.constexpr, IS_FLOAT: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    MIN_NORMAL: tl.constexpr, LARGEST: tl.constexpr, LOW: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Encode x [rows, width] in 8 bits with one scale a row (or the tensor's alone, SCALE "none")."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    absmax = tl.zeros((ROWS,), tl.float32)
    largest = tl.zeros((ROWS,), tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = (row[:, None] < rows) & (column[None, :] < width)
        offset = row[:, None].to(tl.int64) * stride_row + column[None, :].to(tl.int64) * stride_col
        x = to_float32(tl.load(x_ptr + offset, mask=mask, other=0.0))
        here = tl.max(tl.abs(x), axis=1)
        if RULE == "full_range":  # the first value of largest magnitude, with its sign
            first = tl.min(tl.where(tl.abs(x) == here[:, None], column[None, :], start + COLUMNS), axis=1)
            signed = tl.sum(tl.where(column[None, :] == first[:, None], x, 0.0), axis=1)
            largest = tl.where(here > absmax, signed, largest)
        absmax = tl.maximum(absmax, here)
    if RULE == "full_range":
        scale = tl.div_rn(largest, tl.full((ROWS,), LOW, tl.float32))
    else:
        scale = tl.div_rn(absmax, tl.full((ROWS,), STEPS, tl.float32))
    if SCALE == "none":
        used = tl.zeros((ROWS,), tl.float32) + tl.load(tensor_ptr)
    elif SCALE == "fp16":
        stored = round_fp16_scale(scale)
        used = stored.to(tl.float32)
        tl.store(scales_ptr + row, stored, mask=row < rows)
    else:
        used = tl.where(absmax == 0, 1.0, scale)
        tl.store(scales_ptr + row, used, mask=row < rows)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = (row[:, None] < rows) & (column[None, :] < width)
        offset = row[:, None].to(tl.int64) * stride_row + column[None, :].to(tl.int64) * stride_col
        x = to_float32(tl.load(x_ptr + offset, mask=mask, other=0.0))
        values = _quantize(x, used[:, None], 0.0, IS_FLOAT, False, LARGEST, LOW, MANTISSA, MIN_NORMAL)
        code = _codes(x, values, used[:, None], 0.0, IS_FLOAT, BITS, MANTISSA, BIAS, MIN_NORMAL)
        tl.store(codes_ptr + row[:, None].to(tl.int64) * width + column[None, :], code.to(tl.uint8), mask=mask)


def element_constants(element: FloatElement | IntElement) -> dict[str, Any]:
    """Return what the kernels' arithmetic needs to know of an element."""
    if isinstance(element, IntElement):
        return {
            "IS_FLOAT": False,
            "BITS": element.bits,
            "MANTISSA": 0,
            "BIAS": 0,
            "MIN_NORMAL": 1.0,
            "LARGEST": float(element.high),
        }
    return {
        "IS_FLOAT": True, "BITS": element.bits, "MANTISSA": element.mantissa_bits, "BIAS": element.bias,
        "MIN_NORMAL": 2.0**element.min_exponent, "LARGEST": element.largest,
    }  # fmt: skip


def candidates(fmt: Format) -> tuple[list[int], list[float]]:
    """Return the (steps, clips) of the scales that the format's rule considers, the plain one first."""
    plain = fmt.element.largest if isinstance(fmt.element, FloatElement) and fmt.scale == "e4m3" else 1.0
    if fmt.rule == "4over6":
        return [0, 0], [plain, 4.0]
    if fmt.rule != "least_squares":
        return [0], [plain]
    if isinstance(fmt.element, IntElement):
        return [0] * len(LEAST_SQUARES_CLIPS), list(LEAST_SQUARES_CLIPS)
    steps = [0, *(E4M3_STEPS if fmt.scale == "e4m3" else E8M0_STEPS)]
    return steps, [plain] * len(steps)


def encode(fmt: Format, x: torch.Tensor, absmax: torch.Tensor | None = None) -> Packed:
    """Pack x [rows, width] (float32, float16 or bfloat16, any strides) into the bytes of the format.

    Args:
        absmax: float32 scalar, the largest magnitude the tensor scale (or the static scale) must cover; by default that of x.

    Raises AutoqError where no kernel can run on x's device.
    """
    if fmt.element is None:
        return Packed(fmt, (x.shape[0], x.shape[1]), x.to(torch.bfloat16), None, None)
    rows, width = x.shape
    values = tile(x.device)
    bits = fmt.element.bits
    tensor = None
    if fmt.scale in ("none", "e4m3"):
        tensor = tensor_scale(fmt, x.abs().amax().to(torch.float32) if absmax is None else absmax)
    codes = torch.empty(rows, fmt.row_code_bytes(width), dtype=torch.uint8, device=x.device)
    constants = element_constants(fmt.element)
    low = float(fmt.element.low) if isinstance(fmt.element, IntElement) else 0.0
    half = 0.5 if fmt.rule == "half_step" else 0.0
    if fmt.block is None:
        scales = torch.empty(rows, 1, dtype=SCALE_TYPES.get(fmt.scale, torch.float32), device=x.device)
        columns = min(triton.next_power_of_2(max(width, 1)), values)
        taken = max(1, min(triton.next_power_of_2(max(rows, 1)), values // columns))
        encode_rows_kernel[(triton.cdiv(rows, taken),)](
            x, codes, scales, x if tensor is None else tensor, rows, width, x.stride(0), x.stride(1),
            SCALE=fmt.scale, RULE=fmt.rule, LOW=low, STEPS=constants["LARGEST"] + half, ROWS=taken, COLUMNS=columns, enable_fp_fusion=False, **constants,
        )  # fmt: skip
        block = torch.ones_like(scales) if fmt.scale == "none" else scales
        return Packed(fmt, (rows, width), codes, Scales(block, None, tensor), None)
    asymmetric = isinstance(fmt.element, IntElement) and fmt.element.asymmetric
    blocks = fmt.blocks(width)
    scales = torch.empty(rows, blocks, dtype=SCALE_TYPES[fmt.scale], device=x.device)
    zeros = torch.empty(rows, blocks, dtype=torch.uint8, device=x.device) if asymmetric else None
    steps, clips = candidates(fmt)
    padded = triton.next_power_of_2(fmt.block)
    taken_blocks = min(triton.next_power_of_2(blocks), max(1, values // padded))
    taken = max(1, min(triton.next_power_of_2(max(rows, 1)), values // (taken_blocks * padded)))
    group = WHOLE_BYTES.get(bits, 0)
    if padded != fmt.block or group == 0 or fmt.block % group:
        group = 0
        codes = torch.empty(rows, blocks * fmt.block, dtype=torch.uint8, device=x.device)
    encode_blocks_kernel[(triton.cdiv(rows, taken), triton.cdiv(blocks, taken_blocks))](
        x, codes, scales, codes if zeros is None else zeros, x.new_ones((), dtype=torch.float32) if tensor is None else tensor,
        torch.tensor(steps, dtype=torch.int32, device=x.device), torch.tensor(clips, dtype=torch.float32, device=x.device),
        rows, width, blocks, codes.shape[1], x.stride(0), x.stride(1), len(steps),
        SEARCH=len(steps) > 1, SCALE=fmt.scale, RULE=fmt.rule, ASYMMETRIC=asymmetric, LOW=low, STEPS=constants["LARGEST"] + half,
        MAX_EXPONENT=fmt.element.max_exponent if isinstance(fmt.element, FloatElement) else 0,
        BLOCK=fmt.block, PADDED=padded, ROWS=taken, BLOCKS=taken_blocks, GROUP=group, enable_fp_fusion=False, **constants,
    )  # fmt: skip
    codes = pack(codes, bits) if group == 0 else codes
    packed_zeros = None if zeros is None else pack(zeros.view(1, -1), bits).flatten()
    return Packed(fmt, (rows, width), codes, Scales(scales, zeros, tensor), packed_zeros)
