"""What a profile learned of one K or V cache, from which static scales and means come."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autoq.formats.format import FloatElement, KVFormat


@dataclass(frozen=True, eq=False)
class Calibration:
    """Largest magnitudes over a text, and the mean.

    Attributes:
        absmax: of the values. centered: of the values less their mean. rotated: of the rotated values.
        mean: float32 [KV heads, head_dim] (or flat), each value one that float16 holds; None where it was not taken.
    """

    absmax: float = 0.0
    centered: float = 0.0
    rotated: float = 0.0
    mean: torch.Tensor | None = None

    def covered(self, fmt: KVFormat) -> float:
        """Return the magnitude that the format's static scale must cover."""
        if not isinstance(fmt.calibration, str):
            return fmt.calibration
        return self.centered if fmt.center else self.rotated if fmt.rotate else self.absmax

    def static(self, fmt: KVFormat, like: torch.Tensor) -> torch.Tensor | None:
        """Return the same as a float32 scalar on like's device, or None where the format has no static scale."""
        if not isinstance(fmt.values.element, FloatElement) or fmt.values.scale not in ("none", "e4m3"):
            return None
        return torch.tensor(self.covered(fmt), dtype=torch.float32, device=like.device)

    def by_token(self, fmt: KVFormat, magnitudes: torch.Tensor) -> torch.Tensor:
        """Return the magnitude that the scale of every token covers where the format refreshes it, [batch, tokens].

        Args:
            magnitudes: float32 [batch, tokens], the largest of each token's values as they are encoded.
        """
        batch, tokens = magnitudes.shape
        first = torch.full((batch, 1), self.covered(fmt), dtype=torch.float32, device=magnitudes.device)
        after = magnitudes[:, fmt.sink :]
        segments = torch.nn.functional.pad(after, (0, -after.shape[1] % fmt.refresh)).unflatten(1, (-1, fmt.refresh)).amax(2)
        covered = torch.cat([first, segments[:, :-1]], dim=1).repeat_interleave(fmt.refresh, 1)[:, : after.shape[1]]
        return torch.cat([first.expand(batch, min(fmt.sink, tokens)), covered], dim=1)

    def mean_like(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean [KV heads, 1, head_dim] on the device of x [batch, KV heads, tokens, head_dim], 0 where none was taken."""
        mean = torch.zeros(x.shape[1], x.shape[3]) if self.mean is None else self.mean.view(x.shape[1], x.shape[3])
        return mean.to(x.device).unsqueeze(1)
