"""Measure what a change to the model really costs: KL to the original, top-1 agreement, perplexity.

The original's hidden states are kept, a few thousand numbers a token, and both models' logits are made a slice of tokens at
a time, so that [tokens, vocabulary] is never held for a whole text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.func import functional_call
from transformers import PreTrainedModel

from autoq.measure.fused import has_kernels
from autoq.model.head import Head, hidden_states
from autoq.model.quantized import Assignment, DecodedWeights, quantized
from autoq.model.unit import ModelUnits

Forward = Callable[[PreTrainedModel, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Divergence:
    """Per-token results on windows of text; windows are the sampling unit of every error.

    Attributes:
        kl: float64 [windows, tokens], KL(original || changed) in nats of the next-token distribution.
        agree: bool [windows, tokens], the most likely token is the same.
        nll, nll_original: float64 [windows, tokens - 1], negative log-likelihood of the text.
    """

    kl: np.ndarray
    agree: np.ndarray
    nll: np.ndarray
    nll_original: np.ndarray

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean())

    @property
    def stderr(self) -> float:
        """Standard error of mean_kl over windows."""
        return _stderr(self.kl.mean(1))

    @property
    def top1_agreement(self) -> float:
        return float(self.agree.mean())

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.nll.mean()))

    @property
    def perplexity_original(self) -> float:
        return math.exp(float(self.nll_original.mean()))

    @property
    def perplexity_ratio_stderr(self) -> float:
        """Standard error of perplexity / original perplexity, paired by window."""
        return _stderr((self.nll - self.nll_original).mean(1)) * self.perplexity / self.perplexity_original

    def percentiles(self) -> dict[str, float]:
        """Return the median, 90, 99 and 99.9 % points and the largest KL of a token."""
        points = np.percentile(self.kl, [50, 90, 99, 99.9])
        return dict(zip(("median", "p90", "p99", "p99.9", "max"), [*map(float, points), float(self.kl.max())], strict=True))

    def minus(self, other: Divergence) -> tuple[float, float]:
        """Return (mean KL of self minus other, its standard error), paired by window."""
        difference = self.kl.mean(1) - other.kl.mean(1)
        return float(difference.mean()), _stderr(difference)


def _stderr(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


class Yardstick:
    """A model and the text it is measured on; keeps the original's hidden states."""

    def __init__(self, model: PreTrainedModel, units: ModelUnits, ids: torch.Tensor, batch: int = 4) -> None:
        self.model, self.units, self.ids, self.batch = model, units, ids, batch
        self.head = Head(model)
        self.original_head = {name: p.data for name, p in self.head.module.named_parameters()}
        with torch.no_grad():
            self.hidden = [hidden_states(model, part.to(model.device)).cpu() for part in ids.split(batch)]

    def measure(
        self,
        assignment: Assignment,
        progress: Callable[[int, int], None] = lambda done, total: None,
        decoded: DecodedWeights | None = None,
    ) -> Divergence:
        """Measure the model with the assignment applied; the model is as before afterwards.

        Args:
            decoded: decoded weights kept from one assignment to the next.
        """
        with quantized(self.model, self.units, assignment, decoded):
            return self.measure_as_is(progress)

    def measure_as_is(
        self, progress: Callable[[int, int], None] = lambda done, total: None, forward: Forward = hidden_states
    ) -> Divergence:
        """Measure the model as it stands against the original kept at construction.

        Args:
            forward: makes hidden states [batch, tokens, hidden] of ids [batch, tokens]; by default in one pass, without a cache.
        """
        rows: list[tuple[np.ndarray, ...]] = []
        for batch in range(len(self.hidden)):
            rows += self._batch(batch, forward)
            progress(len(rows), len(self.ids))
        kl, agree, nll, nll_original = (np.stack(column) for column in zip(*rows, strict=True))
        return Divergence(kl, agree, nll, nll_original)

    def windows(
        self, assignment: Assignment, decoded: DecodedWeights | None = None, order: Sequence[int] | None = None
    ) -> Iterator[dict[int, float]]:
        """Yield window -> mean KL with the assignment applied, batch by batch.

        The model is as before afterwards, also when the iterator is closed early (`contextlib.closing`).

        Args:
            decoded: decoded weights kept from one assignment to the next. order: of the batches.
        """
        with quantized(self.model, self.units, assignment, decoded):
            for batch in order if order is not None else range(len(self.hidden)):
                rows = self._batch(batch, hidden_states)
                yield {self.batch * batch + i: float(kl.mean()) for i, (kl, *_) in enumerate(rows)}

    def _batch(self, batch: int, forward: Forward) -> list[tuple[np.ndarray, ...]]:
        part, original = self.ids[self.batch * batch : self.batch * (batch + 1)], self.hidden[batch]
        with torch.no_grad():
            changed = forward(self.model, part.to(self.model.device))
            return [
                self._window(ids.to(changed.device), kept.to(changed.device), new)
                for ids, kept, new in zip(part, original, changed, strict=True)
            ]

    def _window(self, ids: torch.Tensor, original: torch.Tensor, changed: torch.Tensor) -> tuple[np.ndarray, ...]:
        columns: list[list[torch.Tensor]] = [[], [], [], []]
        for part in self.head.chunks(len(ids)):
            target = ids[part.start + 1 : part.stop + 1]
            found = compare_logits(self._original_logits(original[part]), self.head(changed[part]), target)
            for column, values in zip(columns, found, strict=True):
                column.append(values)
        return tuple(torch.cat(c).cpu().numpy() for c in columns)

    def _original_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        current = dict(self.head.module.named_parameters())
        if all(
            current[name].data is data or current[name].data_ptr() == data.data_ptr() for name, data in self.original_head.items()
        ):
            return self.head(hidden)
        module = self.head.module
        try:
            self.head.module = _Frozen(module, self.original_head)
            return self.head(hidden)
        finally:
            self.head.module = module

    def noise_floor(self) -> float:
        """Return the size of the KL of a change that means nothing: one weight unit's values moved to the next number of their type.

        The sum of so small numbers may come out below 0; how far is noise too.
        """
        tensor = self.units.weights[0].tensors[0]
        parameter = self.model.get_parameter(tensor.parameter)
        kept = parameter.data
        try:
            parameter.data = torch.nextafter(kept, torch.full_like(kept, math.inf))
            return abs(self.measure_as_is().mean_kl)
        finally:
            parameter.data = kept


def compare_logits(original: torch.Tensor, changed: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return (KL, same most likely token, nll of the changed model, nll of the original): float64 but the second, which is bool.

    Args:
        original, changed: logits [tokens, vocabulary]. target: the tokens that follow, [tokens] or one less; nll is as long.
    """
    if has_kernels(original.device):
        from autoq.kernels.kl import token_divergence

        padded = torch.nn.functional.pad(target, (0, len(original) - len(target)))
        found = token_divergence(original, changed, padded)
        return found.kl.double(), found.agree, found.nll[: len(target)].double(), found.nll_original[: len(target)].double()
    log_p, log_q = original.float().log_softmax(-1), changed.float().log_softmax(-1)
    agree = log_p.argmax(-1) == log_q.argmax(-1)
    at = target.unsqueeze(1)
    nll, nll_original = (-log[: len(target)].gather(1, at).squeeze(1).double() for log in (log_q, log_p))
    kl = (log_p.exp() * log_q.neg_().add_(log_p)).sum(-1, dtype=torch.float64)
    return kl, agree, nll, nll_original


class _Frozen(torch.nn.Module):
    """A module run with given parameters in place of its own."""

    def __init__(self, module: torch.nn.Module, parameters: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.given = [module], parameters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional_call(self.inner[0], self.given, (x,))  # type: ignore[no-any-return]
