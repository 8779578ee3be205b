"""Optuna's own plots of a study."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import optuna

from autoq.errors import UserError
from autoq.trials.importance import LEAST_FOR_IMPORTANCE, drawn_study, evaluator
from autoq.trials.storage import JOURNAL, open_storage
from autoq.trials.study import finished, load_study


def history(study: str, storage: str, run: Path) -> Any:
    """Return the optimization history, of a front the Pareto front; raises UserError where the study is not there."""
    loaded = _load(study, storage, run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experimental features
        if len(loaded.directions) > 1:
            return optuna.visualization.plot_pareto_front(loaded)
        return optuna.visualization.plot_optimization_history(loaded, target_name="KL")


def importances(study: str, storage: str, run: Path) -> Any:
    """Return the importances of parameters for the KL (PED-ANOVA, Watanabe et al. 2023), over the trials that drew them.

    Raises UserError where there are too few.
    """
    drawn = drawn_study(finished(_load(study, storage, run)))
    if drawn is None:
        raise UserError(f"importances need {LEAST_FOR_IMPORTANCE} trials with drawn parameters: measure more, trials=60")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return optuna.visualization.plot_param_importances(drawn, evaluator=evaluator(), target_name="KL")
        except (RuntimeError, ValueError) as error:
            raise UserError(f"these trials do not tell what mattered: {error}") from error


def _load(study: str, storage: str, run: Path) -> Any:
    where = None if Path(storage).name == JOURNAL else storage
    return load_study(open_storage(where, run), study, where)
