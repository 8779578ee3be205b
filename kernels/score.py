"""Inner products of a weight's gradient with what every candidate format would change, W and the gradient each read once.

The physical limit of scoring: memory is read once whatever the number of formats. Elements of all formats are rounded by one
piece of arithmetic whose constants are read from a table, so that one compiled kernel serves any list of formats that share a
block size. Products are kept apart by input channel (autoq.measure.weight_scorer says why); sums over rows are written tile by
tile and added in a fixed order, without atomics: the same scores in every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from autoq.errors import AutoqError
from autoq.formats.format import Format, IntElement
from autoq.formats.reference import Scales
from autoq.kernels.elements import bits_float, float_bits, to_float32
from autoq.kernels.launch import interpreted, tile


@triton.jit
def score_kernel(
    w_ptr, gradient_ptr, scales_ptr, zeros_ptr, table_ptr, out_ptr, rows, width, blocks, formats, sequences, stride_w_row, stride_w_col,
    stride_sequence, stride_row, stride_col, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ROWS x COLUMNS of W a program; writes one row of [row tiles, sequences, formats, width]."""
    tile_row = tl.program_id(0)
    row = tile_row * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    across = column[None, :]
    mask = (row < rows) & (across < width)
    row64 = row.to(tl.int64)
    w = to_float32(tl.load(w_ptr + row64 * stride_w_row + across.to(tl.int64) * stride_w_col, mask=mask, other=0.0))
    block = row64 * blocks
    if BLOCK > 0:
        block += across // BLOCK
    for sequence in range(sequences):
        at = gradient_ptr + sequence * stride_sequence + row64 * stride_row + across.to(tl.int64) * stride_col
        gradient = to_float32(tl.load(at, mask=mask, other=0.0))
        for f in range(formats):
            constants = table_ptr + f * 5
            low, high = tl.load(constants), tl.load(constants + 1)
            exponent, least, factor = tl.load(constants + 2).to(tl.int32), tl.load(constants + 3), tl.load(constants + 4)
            offset = f * blocks.to(tl.int64) * rows + block
            scale = tl.load(scales_ptr + offset, mask=mask, other=1.0)
            zero = tl.load(zeros_ptr + offset, mask=mask, other=0).to(tl.float32)
            t = tl.minimum(tl.maximum(tl.div_rn(w, scale), low - zero), high - zero)
            step = tl.maximum(bits_float(float_bits(t) & exponent), least) * factor
            delta = ((t + step) - step) * scale - w
            target = out_ptr + ((tile_row.to(tl.int64) * sequences + sequence) * formats + f) * width + column
            tl.store(target, tl.sum(gradient * delta, axis=0), mask=column < width)


def constants(formats: Sequence[Format]) -> torch.Tensor:
    """Return float32 [formats, 5], what rounds to the elements of each.

    Lowest and highest value, the exponent bits that count, the smallest normal number, the factor to the rounding constant.
    """
    rows = []
    for fmt in formats:
        element = fmt.element
        if element is None:
            raise AutoqError(f"{fmt.name} changes nothing: there is nothing to score")
        if isinstance(element, IntElement):  # the step is 1 whatever the exponent
            rows.append([float(element.low), float(element.high), 0.0, 1.0, 1.5 * 2.0**23])
        else:
            factor = 1.5 * 2.0 ** (23 - element.mantissa_bits)
            rows.append([-element.largest, element.largest, float(0x7F800000), 2.0**element.min_exponent, factor])
    return torch.tensor(rows, dtype=torch.float32)


def score(weight: torch.Tensor, gradient: torch.Tensor, formats: Sequence[Format], scales: Sequence[Scales]) -> torch.Tensor:
    """Return <gradient, Q_f(W) - W> by input channel, float32 [width, sequences, formats].

    Args:
        weight: [rows, width], any strides, float32, float16 or bfloat16. gradient: [sequences, rows, width], any strides.
        formats: candidates of one block size. scales: their block scales [rows, blocks], as `formats.reference.fit` gives them.

    Raises AutoqError for formats of several block sizes, and where no kernel can run on this device.
    """
    rows, width = weight.shape
    if len({f.block for f in formats}) != 1:
        raise AutoqError(f"one call scores formats of one block size, not of {sorted({str(f.block) for f in formats})}")
    blocks, sequences = formats[0].blocks(width), len(gradient)
    values = tile(weight.device)
    table = constants(formats).to(weight.device)
    effective = torch.stack([s.effective(f).expand(rows, blocks) for f, s in zip(formats, scales, strict=True)])
    zero = torch.stack([torch.zeros_like(effective[0], dtype=torch.uint8) if s.zero is None else s.zero for s in scales])
    columns = min(triton.next_power_of_2(width), 64 if not interpreted() else values)
    taken = max(1, min(triton.next_power_of_2(rows), values // columns))
    tiles = triton.cdiv(rows, taken)
    out = torch.empty(tiles, sequences, len(formats), width, dtype=torch.float32, device=weight.device)
    score_kernel[(tiles, triton.cdiv(width, columns))](
        weight, gradient, effective, zero, table, out, rows, width, blocks, len(formats), sequences, weight.stride(0), weight.stride(1),
        *gradient.stride(), BLOCK=formats[0].block or 0, ROWS=taken, COLUMNS=columns, enable_fp_fusion=False,
    )  # fmt: skip
    return out.sum(0).permute(2, 0, 1)
