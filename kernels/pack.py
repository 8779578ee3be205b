"""Pack codes of a few bits into bytes: a bit stream, the first code in the lowest bits. For zero points; weights pack in `encode`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from autoq.kernels.launch import tile


@triton.jit
def pack_kernel(codes_ptr, packed_ptr, count, total, BITS: tl.constexpr, BYTES: tl.constexpr):
    """Each byte gathers the codes that reach into it."""
    byte = tl.program_id(0) * BYTES + tl.arange(0, BYTES)
    first = byte * 8 // BITS
    word = tl.zeros((BYTES,), tl.int32)
    for i in tl.static_range((6 + 8) // BITS + 1):
        code = tl.load(codes_ptr + first + i, mask=first + i < count, other=0).to(tl.int32)
        shift = (first + i) * BITS - byte * 8
        word |= tl.where(shift < 0, code >> tl.maximum(-shift, 0), code << tl.minimum(tl.maximum(shift, 0), 8))
    tl.store(packed_ptr + byte, (word & 255).to(tl.uint8), mask=byte < total)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack uint8 codes [n] of `bits` bits into uint8 [ceil(n * bits / 8)]."""
    if bits == 8:
        return codes
    total = -(-codes.numel() * bits // 8)
    packed = torch.empty(total, dtype=torch.uint8, device=codes.device)
    size = min(triton.next_power_of_2(max(1, total)), tile(codes.device))
    pack_kernel[(triton.cdiv(total, size),)](codes, packed, codes.numel(), total, BITS=bits, BYTES=size)
    return packed
