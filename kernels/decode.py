"""Decode the packed bytes of a block format into a matrix [rows, width]."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from autoq.formats.format import IntElement
from autoq.formats.reference import Packed
from autoq.kernels.elements import bfloat16_bits, decode_e4m3_scale, decode_e8m0, decode_float
from autoq.kernels.encode import element_constants
from autoq.kernels.launch import tile


@triton.jit
def read_code(ptr, index, limit, mask, BITS: tl.constexpr):
    """Return the int32 code number `index` of a bit stream of `limit` bytes."""
    bit = index * BITS
    byte = bit >> 3
    word = tl.load(ptr + byte, mask=mask, other=0).to(tl.int32)
    if 8 % BITS != 0:  # a code may reach into the next byte
        word |= tl.load(ptr + byte + 1, mask=mask & (byte + 1 < limit), other=0).to(tl.int32) << 8
    return (word >> (bit & 7).to(tl.int32)) & ((1 << BITS) - 1)


@triton.jit
def read_elements(codes_ptr, zeros_ptr, at, limit, block, zero_bytes, mask,
                  IS_FLOAT: tl.constexpr, ASYMMETRIC: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
                  MIN_NORMAL: tl.constexpr, LARGEST: tl.constexpr):  # fmt: skip
    """Return element values in float32, before any scale; 0 where masked out."""
    code = read_code(codes_ptr, at, limit, mask, BITS)
    if IS_FLOAT:
        value = decode_float(code, BITS, MANTISSA, BIAS, MIN_NORMAL)
    elif ASYMMETRIC:
        value = (code - read_code(zeros_ptr, block, zero_bytes, mask, BITS)).to(tl.float32)
    else:
        value = tl.where(code > LARGEST, code - (1 << BITS), code).to(tl.float32)
    return tl.where(mask, value, 0.0)


@triton.jit
def read_scale(scales_ptr, block, mask, SCALE: tl.constexpr):
    """Return float32 block scales, without the tensor scale."""
    if SCALE == "e4m3":
        return decode_e4m3_scale(tl.load(scales_ptr + block, mask=mask, other=0).to(tl.int32))
    if SCALE == "e8m0":
        return decode_e8m0(tl.load(scales_ptr + block, mask=mask, other=0).to(tl.int32))
    return tl.load(scales_ptr + block, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def decode_kernel(
    codes_ptr, scales_ptr, zeros_ptr, tensor_ptr, out_ptr, rows, width, blocks, row_bytes, zero_bytes,
    SCALE: tl.constexpr, IS_FLOAT: tl.constexpr, ASYMMETRIC: tl.constexpr, HAS_TENSOR: tl.constexpr, BITS: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, MIN_NORMAL: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BFLOAT16: tl.constexpr,
):  # fmt: skip
    """Decode ROWS x COLUMNS values a program; BLOCK 0 is the whole row."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows) & (column < width)
    row64 = row.to(tl.int64)
    block = row64 * blocks
    if BLOCK > 0:
        block += column // BLOCK
    value = read_elements(
        codes_ptr + row64 * row_bytes, zeros_ptr, column, row_bytes, block, zero_bytes, mask,
        IS_FLOAT, ASYMMETRIC, BITS, MANTISSA, BIAS, MIN_NORMAL, LARGEST,
    )  # fmt: skip
    scale = tl.full((ROWS, COLUMNS), 1.0, tl.float32) if SCALE == "none" else read_scale(scales_ptr, block, mask, SCALE)
    if HAS_TENSOR:
        scale = scale * tl.load(tensor_ptr)
    value = value * scale
    target = out_ptr + row64 * width + column
    if BFLOAT16:
        tl.store(target, bfloat16_bits(value), mask=mask)
    else:
        tl.store(target, value.to(out_ptr.dtype.element_ty), mask=mask)


def decode(packed: Packed, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the matrix [rows, width] of packed bytes in `dtype`: float32, float16 or bfloat16."""
    fmt, (rows, width) = packed.fmt, packed.shape
    if fmt.element is None or packed.scales is None:
        return packed.codes.to(dtype)
    codes, values = packed.codes.contiguous(), tile(packed.codes.device)
    out = torch.empty(rows, width, dtype=dtype, device=codes.device)
    columns = min(triton.next_power_of_2(max(width, 1)), values)
    taken = max(1, min(triton.next_power_of_2(max(rows, 1)), values // columns))
    zeros, tensor = packed.zeros, packed.scales.tensor
    decode_kernel[(triton.cdiv(rows, taken), triton.cdiv(width, columns))](
        codes, packed.scales.block.contiguous(), codes if zeros is None else zeros, codes if tensor is None else tensor,
        out.view(torch.int16) if dtype == torch.bfloat16 else out, rows, width, fmt.blocks(width), codes.shape[1],
        0 if zeros is None else zeros.numel(),
        SCALE=fmt.scale, ASYMMETRIC=isinstance(fmt.element, IntElement) and fmt.element.asymmetric, HAS_TENSOR=tensor is not None,
        BLOCK=fmt.block or 0, ROWS=taken, COLUMNS=columns, BFLOAT16=dtype == torch.bfloat16, enable_fp_fusion=False,
        **element_constants(fmt.element),
    )  # fmt: skip
    return out
