"""What a pass over a text learns of the values in one K or V cache, to calibrate static scales and means."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autoq.formats.calibration import Calibration
from autoq.formats.rotation import block_of, rotate


@dataclass(frozen=True, eq=False)
class CacheStatistics:
    """Sums and extremes over tokens.

    Attributes:
        by_channel: float32 [3, KV heads, head_dim]: mean, smallest and largest value; None before the first token.
        tokens: how many there were. rotated: largest magnitude of the rotated values.
    """

    by_channel: torch.Tensor | None = None
    tokens: int = 0
    rotated: float = 0.0

    def with_values(self, x: torch.Tensor) -> CacheStatistics:
        """Return the statistics with further values x [batch, KV heads, tokens, head_dim], float32."""
        tokens = x.shape[0] * x.shape[2]
        low, high = x.amin((0, 2)).cpu(), x.amax((0, 2)).cpu()
        mean = x.mean((0, 2), dtype=torch.float64).float().cpu()
        rotated = float(rotate(x).abs().amax()) if block_of(x.shape[-1]) > 1 else 0.0
        if self.by_channel is not None:
            before = self.by_channel
            share = tokens / (self.tokens + tokens)
            mean = torch.lerp(before[0], mean, share)
            low, high = torch.minimum(low, before[1]), torch.maximum(high, before[2])
        return CacheStatistics(torch.stack([mean, low, high]), self.tokens + tokens, max(rotated, self.rotated))

    def calibration(self) -> Calibration:
        """Return what static scales and means are made of."""
        if self.by_channel is None:
            return Calibration()
        mean, low, high = self.by_channel
        mean = mean.half().float()  # as it is stored
        centered = torch.maximum(high - mean, mean - low).amax()
        return Calibration(float(torch.maximum(high, -low).amax()), float(centered), self.rotated, mean)
