"""x @ W^T with W in packed bytes: matrix-vector and matrix-matrix products for weight-only formats.

Elements of every format are exact in float16 and (up to 8 bits) bfloat16, block scales are not: so elements are multiplied as
they are, each block's sum is scaled, and everything is added up in float32. W is read once as bytes and never expanded in
memory. With a zero point the element is the code minus the zero point, exact too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from autoq.errors import AutoqError
from autoq.formats.format import IntElement
from autoq.formats.reference import Packed
from autoq.kernels.decode import read_elements, read_scale
from autoq.kernels.elements import bfloat16_bits, to_float32
from autoq.kernels.encode import element_constants
from autoq.kernels.launch import interpreted, tile

VECTORS = 4  # up to so many tokens are multiplied without tensor cores, which want 16 rows
TOKENS, ROWS, INNER = 32, 32, 32  # most tokens, rows and columns of W of a program on a GPU: what registers hold


@triton.jit
def product_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, tensor_ptr, out_ptr, tokens, rows, width, blocks, row_bytes, zero_bytes, stride_x,
    SCALE: tl.constexpr, IS_FLOAT: tl.constexpr, ASYMMETRIC: tl.constexpr, HAS_TENSOR: tl.constexpr, BITS: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, MIN_NORMAL: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, VECTOR: tl.constexpr, BFLOAT16: tl.constexpr,
):  # fmt: skip
    """TOKENS x ROWS of the output a program; INNER divides BLOCK, or BLOCK is 0: the whole row."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row64 = row.to(tl.int64)
    token64 = token.to(tl.int64)
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for start in range(0, width, INNER):
        column = start + tl.arange(0, INNER)
        inside = (row[:, None] < rows) & (column[None, :] < width)
        block = row64 * blocks
        if BLOCK > 0:
            block += start // BLOCK
        w = read_elements(
            codes_ptr + row64[:, None] * row_bytes, zeros_ptr, column[None, :], row_bytes, block[:, None], zero_bytes, inside,
            IS_FLOAT, ASYMMETRIC, BITS, MANTISSA, BIAS, MIN_NORMAL, LARGEST,
        )  # fmt: skip
        known = (token[:, None] < tokens) & (column[None, :] < width)
        x = tl.load(x_ptr + token64[:, None] * stride_x + column[None, :], mask=known, other=0.0)
        if VECTOR:
            part = tl.sum(to_float32(x)[:, None, :] * w[None, :, :], axis=2)
        else:
            part = tl.dot(x, tl.trans(w.to(x.dtype)), input_precision="ieee")
        if SCALE == "none":
            total += part
        else:
            total += part * read_scale(scales_ptr, block, row < rows, SCALE)[None, :]
    if HAS_TENSOR:
        total = total * tl.load(tensor_ptr)
    target = out_ptr + token64[:, None] * rows + row[None, :]
    mask = (token[:, None] < tokens) & (row[None, :] < rows)
    if BFLOAT16:
        tl.store(target, bfloat16_bits(total), mask=mask)
    else:
        tl.store(target, total.to(out_ptr.dtype.element_ty), mask=mask)


def product(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Return x @ decode(packed)^T for x [tokens, width] in float32, float16 or bfloat16; [tokens, rows] in x's dtype.

    Within 2e-6 (float32), 1e-3 (float16) and 8e-3 (bfloat16) of the float64 product, relative to sum |x| |w|: the accumulation
    is in float32, the result is rounded to x's dtype.

    Raises AutoqError for a block that is not a power of two, and where no kernel can run on this device.
    """
    fmt, (rows, width) = packed.fmt, packed.shape
    if fmt.element is None or packed.scales is None:
        return x @ packed.codes.to(x.dtype).T
    if fmt.block is not None and fmt.block & (fmt.block - 1):
        raise AutoqError(f"{fmt.name}: products need blocks of a power of two, not of {fmt.block}")
    values = tile(x.device)
    dtype = x.dtype
    if interpreted() and dtype == torch.bfloat16:  # whose products the interpreter makes of bit patterns
        x = x.float()
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens = len(x)
    out = torch.empty(tokens, rows, dtype=dtype, device=x.device)
    vector = tokens <= VECTORS
    inner = min(fmt.block or INNER, INNER if not interpreted() else max(INNER, fmt.block or triton.next_power_of_2(width)))
    if vector:
        taken_tokens = triton.next_power_of_2(max(tokens, 1))
        taken = max(1, min(triton.next_power_of_2(rows), values // (taken_tokens * inner)))
    else:
        inner = max(inner, 16)
        taken_tokens = max(16, min(triton.next_power_of_2(tokens), TOKENS if not interpreted() else values))
        taken = ROWS if not interpreted() else max(16, triton.next_power_of_2(rows))
    if tokens:
        codes, zeros, tensor = packed.codes.contiguous(), packed.zeros, packed.scales.tensor
        product_kernel[(triton.cdiv(rows, taken), triton.cdiv(tokens, taken_tokens))](
            x, codes, packed.scales.block.contiguous(), codes if zeros is None else zeros, codes if tensor is None else tensor,
            out.view(torch.int16) if dtype == torch.bfloat16 else out, tokens, rows, width, fmt.blocks(width), codes.shape[1],
            0 if zeros is None else zeros.numel(), x.stride(0),
            SCALE=fmt.scale, ASYMMETRIC=isinstance(fmt.element, IntElement) and fmt.element.asymmetric, HAS_TENSOR=tensor is not None,
            BLOCK=fmt.block or 0, TOKENS=taken_tokens, ROWS=taken, INNER=inner, VECTOR=vector, BFLOAT16=dtype == torch.bfloat16,
            enable_fp_fusion=True, **element_constants(fmt.element),
        )  # fmt: skip
    return out
