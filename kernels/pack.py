"""Pack codes of a few bits into bytes: a bit stream a row, the first code in the lowest bits.

For zero points, and for blocks that are no power of two; other blocks are packed by `encode` in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from autoq.kernels.launch import tile


@triton.jit
def pack_kernel(codes_ptr, packed_ptr, rows, count, total, BITS: tl.constexpr, REACH: tl.constexpr, BYTES: tl.constexpr):
    """Each byte gathers the codes that reach into it, at most REACH."""
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    row = at // total
    byte = (at % total).to(tl.int32)
    first = byte * 8 // BITS
    word = tl.zeros((BYTES,), tl.int32)
    for i in tl.static_range(REACH):
        code = tl.load(codes_ptr + row * count + first + i, mask=(row < rows) & (first + i < count), other=0).to(tl.int32)
        shift = (first + i) * BITS - byte * 8
        word |= tl.where(shift < 0, code >> tl.maximum(-shift, 0), code << tl.minimum(tl.maximum(shift, 0), 8))
    tl.store(packed_ptr + at, (word & 255).to(tl.uint8), mask=row < rows)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack contiguous uint8 codes [rows, n] of `bits` bits into uint8 [rows, ceil(n * bits / 8)]."""
    if bits == 8:
        return codes
    rows, count = codes.shape
    total = -(-count * bits // 8)
    packed = torch.empty(rows, total, dtype=torch.uint8, device=codes.device)
    size = min(triton.next_power_of_2(max(1, packed.numel())), tile(codes.device))
    reach = (7 + 8) // bits + 1  # the first may begin up to bits - 1 before the byte
    pack_kernel[(triton.cdiv(max(1, packed.numel()), size),)](codes, packed, rows, count, total, BITS=bits, REACH=reach, BYTES=size)
    return packed
