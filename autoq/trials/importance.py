"""Which parameters decided how good a trial was."""

from __future__ import annotations

import warnings
from typing import Any

import optuna
from optuna.importance import PedAnovaImportanceEvaluator
from optuna.trial import FrozenTrial

LEAST_FOR_IMPORTANCE = 10  # trials


def importances(trials: list[FrozenTrial]) -> dict[str, float]:
    """Return parameter -> importance for the KL, the largest first; nothing where there are too few trials to say.

    The quantile version of f-ANOVA for "what makes a trial one of the better half" (Watanabe et al. 2023, PED-ANOVA).
    """
    evaluated = drawn_study(trials)
    if evaluated is None:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = optuna.importance.get_param_importances(evaluated, evaluator=evaluator())
        except (RuntimeError, ValueError):
            return {}
    return {name: round(float(value), 4) for name, value in found.items()}


def drawn_study(trials: list[FrozenTrial]) -> Any:
    """Return a study of the trials whose parameters were drawn, judged by their KL alone; None where there are too few to say what mattered."""
    drawn = [t for t in trials if t.params]
    if len(drawn) < LEAST_FOR_IMPORTANCE:
        return None
    study = optuna.create_study(directions=["minimize"])
    study.add_trials([optuna.create_trial(params=t.params, distributions=t.distributions, value=t.values[0]) for t in drawn])
    return study


def evaluator() -> PedAnovaImportanceEvaluator:
    """Return what tells importances: what makes a trial one of the best quarter."""
    return PedAnovaImportanceEvaluator(target_quantile=0.25)
