"""Inner products of a weight's gradient with what each format would change, <dL/dW, Q_f(W) - W>, per sequence and input channel.

Rounding errors of different channels do not know of each other, so that the square of their summed inner products is in
expectation the sum of the squares, and the sum of some hundred squares has far less spread than the square of one sum. Each
channel's product is kept apart until it is squared.

The weight is walked in pieces of some output rows, transposed to [inputs, rows], so that every step runs over contiguous
rows while the piece stays in the processor's cache. Scales are chosen once and kept as stored; rounded values and
gradients live for one piece.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from autoq.formats.format import Format
from autoq.formats.reference import Scales, fit_blocks, rounding_error
from autoq.measure.fused import has_kernels
from autoq.model.unit import WeightTensor

PIECE_VALUES = 1 << 19
ROWS = 64  # a piece has a multiple of it: matrix products want round numbers


@dataclass
class _Piece:
    matrix: int
    rows: slice
    scales: tuple[Scales, ...]
    scored: bool = False  # its squared error is counted


class Workspace:
    """Memory for one piece's gradient and deltas, taken once and used by every scorer in turn."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Return uninitialised memory of this shape; what was taken under this name before is overwritten."""
        size = math.prod(shape)
        have = self._buffers.get(name)
        if have is None or have.numel() < size or have.dtype != like.dtype or have.device != like.device:
            have = self._buffers[name] = torch.empty(size, dtype=like.dtype, device=like.device)
        return have[:size].view(shape)


class WeightScorer:
    """Scores one weight tensor against all candidate formats.

    Attributes:
        squared_error: float64 [formats], the sum of (Q_f(W) - W)^2; known after the first score.
        squared_norm: the sum of W^2.
    """

    def __init__(self, tensor: WeightTensor, weight: torch.Tensor, formats: tuple[Format, ...], workspace: Workspace) -> None:
        self.tensor = tensor
        self.workspace = workspace
        self.formats = formats
        # [matrices, inputs, outputs]
        view = weight.detach().reshape(-1, *weight.shape[-2:])
        self.weight = view if tensor.is_transposed else view.transpose(1, 2)
        self.inputs, self.outputs = self.weight.shape[1:]
        largest_block = max((f.block or 1) for f in formats)
        ragged = any(f.block and self.inputs % f.block for f in formats)
        self.padded = -(-self.inputs // largest_block) * largest_block if ragged else self.inputs
        self.squared_error = torch.zeros(len(formats), dtype=torch.float64)
        self.squared_norm = float(self.weight.to(torch.float32).square().sum(dtype=torch.float64))
        self.pieces = [piece for m in range(self.weight.shape[0]) for piece in self._fit(m)]

    def _fit(self, matrix: int) -> list[_Piece]:
        low, high = self.weight[matrix].aminmax()
        absmax = torch.maximum(-low, high).to(torch.float32)
        step = max(1, round(PIECE_VALUES / self.padded / ROWS)) * ROWS
        pieces = []
        for start in range(0, self.outputs, step):
            rows = slice(start, min(start + step, self.outputs))
            values = self._values(matrix, rows)
            scales = [fit_blocks(fmt, self._blocks(values, fmt), 1, absmax if fmt.tensor_scale else None) for fmt in self.formats]
            pieces.append(_Piece(matrix, rows, tuple(scales)))
        return pieces

    def _values(self, matrix: int, rows: slice) -> torch.Tensor:
        values = self.weight[matrix, :, rows]
        if self.padded == self.inputs:
            return values.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        out = torch.zeros(self.padded, values.shape[1], dtype=torch.float32, device=values.device)
        out[: self.inputs] = values
        return out

    def _blocks(self, values: torch.Tensor, fmt: Format) -> torch.Tensor:
        if fmt.block is None:  # a row scale must not see more than the row
            return values[: self.inputs].unsqueeze(0)
        covered = fmt.blocks(self.inputs) * fmt.block
        return values[:covered].view(-1, fmt.block, values.shape[1])

    def score(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """Return inner products by input channel, [matrices * inputs, batch, formats].

        Args:
            x: the layer's input [batch, tokens, in]; dy: the gradient of its output [batch, tokens, out].
        """
        parts = torch.zeros(self.inputs, x.shape[0], len(self.formats), dtype=torch.float32, device=x.device)
        inputs = x.transpose(1, 2)
        for piece in self.pieces:
            right = dy[..., piece.rows]
            gradient = self.workspace.take("gradient", (*inputs.shape[:2], right.shape[2]), right)
            torch.bmm(inputs, right, out=gradient)
            self._score_piece(piece, gradient.to(torch.float32), parts)
        return parts

    def score_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the same, [matrices * inputs, 1, formats], from one sequence's gradient in the tensor's own shape."""
        view = gradient.reshape(-1, *gradient.shape[-2:])
        view = view if self.tensor.is_transposed else view.transpose(1, 2)
        parts = torch.zeros(len(view), self.inputs, 1, len(self.formats), dtype=torch.float32, device=gradient.device)
        for piece in self.pieces:
            self._score_piece(piece, view[piece.matrix, :, piece.rows].to(torch.float32).unsqueeze(0), parts[piece.matrix])
        return parts.flatten(0, 1)

    def _score_piece(self, piece: _Piece, gradient: torch.Tensor, parts: torch.Tensor) -> None:
        """Add to parts [inputs, batch, formats] from gradient [batch, inputs, rows]."""
        if piece.scored and has_kernels(gradient.device):
            self._score_fused(piece, gradient, parts)
            return
        values = self._values(piece.matrix, piece.rows)
        negated = -values
        deltas = self.workspace.take("deltas", (len(self.formats), *values.shape), values)
        for i, (fmt, scales) in enumerate(zip(self.formats, piece.scales, strict=True)):
            blocks = self._blocks(values, fmt)
            out = deltas[i].view(-1)[: blocks.numel()]
            rounding_error(fmt, blocks, self._blocks(negated, fmt), scales, 1, out)
            if not piece.scored:
                self.squared_error[i] += float(torch.dot(out, out))
        piece.scored = True
        torch.baddbmm(parts, gradient.transpose(0, 1), deltas[:, : self.inputs].permute(1, 2, 0), out=parts)

    def _score_fused(self, piece: _Piece, gradient: torch.Tensor, parts: torch.Tensor) -> None:
        """The same with one kernel a block size, which reads the weight and its gradient once for all formats."""
        from autoq.kernels.score import score

        weight = self.weight[piece.matrix, :, piece.rows].T
        by_block: dict[int | None, list[int]] = {}
        for i, fmt in enumerate(self.formats):
            by_block.setdefault(fmt.block, []).append(i)
        for members in by_block.values():
            scales = [piece.scales[i] for i in members]
            turned = [Scales(s.block.T, None if s.zero is None else s.zero.T, s.tensor) for s in scales]
            parts[:, :, members] += score(weight, gradient.transpose(1, 2), [self.formats[i] for i in members], turned)
