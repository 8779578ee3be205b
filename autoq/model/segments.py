"""The static scales of a cache that recomputes them as it goes: one for every so many tokens, of every sequence."""

from __future__ import annotations

from collections.abc import Iterator

import torch

FLOAT32_BYTES = 4


class Segments:
    """Magnitudes that the scales of a cache's packed tokens cover, segment by segment.

    A segment's scale covers the largest magnitude of the segment before it; that of the first is calibrated.

    Args:
        length: tokens of a segment. first: the calibrated magnitude, a float32 scalar. batch: sequences.
    """

    def __init__(self, length: int, first: torch.Tensor, batch: int) -> None:
        self.length, self.seen = length, 0
        self.covered = first.expand(batch, 1).contiguous()  # [batch, segments]
        self.running = torch.zeros_like(self.covered[:, 0])  # of the newest segment so far

    @property
    def nbytes(self) -> int:
        """Bytes of the scales, the calibrated one apart."""
        return FLOAT32_BYTES * self.covered.shape[0] * (-(-self.seen // self.length) - 1) if self.seen else 0

    def split(self, x: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield new tokens x [batch, KV heads, tokens, head_dim] in parts of one segment each, with what its scale covers [batch]."""
        while x.shape[2]:
            at = self.seen % self.length
            if at == 0 and self.seen:
                self.covered = torch.cat([self.covered, self.running.unsqueeze(1)], dim=1)
                self.running = torch.zeros_like(self.running)
            part, x = x[:, :, : self.length - at], x[:, :, self.length - at :]
            self.running = torch.maximum(self.running, part.abs().amax((1, 2, 3)).to(torch.float32))
            self.seen += part.shape[2]
            yield part, self.covered[:, -1]

    def of(self, tokens: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the newest `tokens` tokens in parts of one segment each: where they are among these, and what the scale covers [batch]."""
        start = first = self.seen - tokens
        while start < self.seen:
            segment = start // self.length
            stop = min(self.seen, (segment + 1) * self.length)
            yield slice(start - first, stop - first), self.covered[:, segment]
            start = stop

    def drop_last(self, tokens: int, newest: torch.Tensor) -> None:
        """Forget the newest tokens. `newest` [batch, KV heads, tokens, head_dim] are those left, as decoded before a mean is added: they
        say what the next scale covers."""
        self.seen -= tokens
        segments = max(1, -(-self.seen // self.length))
        self.covered = self.covered[:, :segments]
        left = newest[:, :, max(0, newest.shape[2] - (self.seen - (segments - 1) * self.length)) :]
        self.running = left.abs().amax((1, 2, 3)).to(torch.float32) if left.numel() else torch.zeros_like(self.running)

    def select(self, batch: torch.Tensor) -> None:
        """Take these rows of the batch, in this order."""
        rows = batch.to(self.covered.device)
        self.covered, self.running = self.covered[rows], self.running[rows]
