"""What a trial does: make a recipe, measure it window by window, stop when it has lost against the best one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from autoq.allocation.solver import total_bits
from autoq.trials.question import Choice, Question

WORST = 100.0  # nats; what a model that puts out no finite numbers counts for
Measure = Callable[[Choice, Sequence[int]], Iterator[dict[int, float]]]


@dataclass(frozen=True)
class Objective:
    """The objective of a study: mean KL in nats per token over the trials' windows, then what each traded side stores.

    Attributes:
        measure: takes a recipe and the order of the batches, yields window -> KL batch by batch. batches: how many there are.
        seed: of the order, which is another one for every trial, so that no window decides who is stopped.
    """

    question: Question
    measure: Measure
    batches: int
    seed: int = 0

    def __call__(self, trial: Trial) -> float | tuple[float, ...]:
        choice = self.question.choice(trial)
        facts = self.question.stored(choice)
        for key, value in facts.items():
            trial.set_user_attr(key, value)
        for limit in self.question.problem.limits:
            trial.set_constraint(limit.name, total_bits(choice, limit.units) / max(1, limit.bits) - 1)
        kl = self._again(trial, facts["recipe"])
        if kl is None:
            kl = self._measured(trial, choice)
        traded = self.question.traded
        return (kl, *(total_bits(choice, side.units) / side.values for side in traded)) if traded else kl

    def _again(self, trial: Trial, recipe: str) -> float | None:
        """Answer from the study where the same recipe was measured before."""
        for known in trial.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            if known.user_attrs.get("recipe") == recipe:
                trial.set_user_attr("same_as", known.number)
                for key in ("kl_windows", "stopped_after"):
                    if key in known.user_attrs:
                        trial.set_user_attr(key, known.user_attrs[key])
                if not self.question.traded:
                    for step, value in known.intermediate_values.items():
                        trial.report(value, step)
                return float(known.values[0])
        return None

    def _measured(self, trial: Trial, choice: Choice) -> float:
        order = (
            np.random.default_rng((abs(self.seed), trial.user_attrs.get("slot", trial.number))).permutation(self.batches).tolist()
        )
        windows: dict[int, float] = {}
        estimate = None
        with closing(self.measure(choice, order)) as measured:  # type: ignore[type-var]
            for batch, found in enumerate(measured):
                for window, kl in found.items():
                    windows[window] = kl if math.isfinite(kl) else WORST
                    if not self.question.traded:
                        trial.report(windows[window], window)
                trial.set_user_attr("batches", batch + 1)
                if not self.question.traded and batch + 1 < self.batches and trial.should_prune():
                    estimate = _lost_by(trial.study, windows)
                    if estimate is not None:
                        trial.set_user_attr("stopped_after", len(windows))
                        break
        trial.set_user_attr("kl_windows", {str(w): windows[w] for w in sorted(windows)})
        return estimate if estimate is not None else sum(windows.values()) / len(windows)


def _lost_by(study: Study, windows: dict[int, float]) -> float | None:
    """Estimate the KL of a stopped trial over all windows: the best trial's, and how much worse it was on the same ones.

    Optuna's pruner tests the median; where the mean is not worse, the trial goes on (None).
    """
    best = study.best_trial
    common = [w for w in windows if w in best.intermediate_values]
    worse = sum(windows[w] - best.intermediate_values[w] for w in common) / max(1, len(common))
    return best.values[0] + worse if worse > 0 else None


def window_values(trial: FrozenTrial) -> dict[int, float]:
    """Return window -> KL of a measured trial."""
    found: dict[str, Any] = trial.user_attrs.get("kl_windows", {})
    return {int(window): kl for window, kl in found.items()}


def paired(trial: FrozenTrial, other: FrozenTrial) -> tuple[float, float]:
    """Return (mean KL of a trial less another one's over the windows both measured, its standard error)."""
    a, b = window_values(trial), window_values(other)
    difference = np.array([a[w] - b[w] for w in a if w in b])
    if len(difference) < 2:
        return (float(difference.mean()) if len(difference) else math.nan), math.nan
    return float(difference.mean()), float(difference.std(ddof=1) / math.sqrt(len(difference)))
