"""Which parameters decided how good a trial was."""

from __future__ import annotations

import warnings

import optuna
from optuna.importance import PedAnovaImportanceEvaluator
from optuna.trial import FrozenTrial

LEAST_FOR_IMPORTANCE = 10  # trials


def importances(trials: list[FrozenTrial]) -> dict[str, float]:
    """Return parameter -> importance for the KL, the largest first; nothing where there are too few trials to say.

    The quantile version of f-ANOVA for "what makes a trial one of the better half" (Watanabe et al. 2023, PED-ANOVA).
    """
    drawn = [t for t in trials if t.params]
    if len(drawn) < LEAST_FOR_IMPORTANCE:
        return {}
    evaluated = optuna.create_study(directions=["minimize"])
    evaluated.add_trials([optuna.create_trial(params=t.params, distributions=t.distributions, value=t.values[0]) for t in drawn])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = optuna.importance.get_param_importances(evaluated, evaluator=PedAnovaImportanceEvaluator(target_quantile=0.25))
        except (RuntimeError, ValueError):
            return {}
    return {name: round(float(value), 4) for name, value in found.items()}
