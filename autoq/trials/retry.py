"""Queue a lost trial again, with what it had drawn."""

from __future__ import annotations

import optuna
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

RETRIES = 3  # times a lost trial is run again
KEPT = ("slot", "start")


def queue_again(study: Study, trial: FrozenTrial) -> None:
    """Queue a failed trial of this study again, unless it is queued, running or measured already, or failed too often."""
    if "slot" not in trial.user_attrs:
        return
    same = [t for t in study.get_trials(deepcopy=False) if t.user_attrs.get("slot") == trial.user_attrs["slot"]]
    if any(t.state != TrialState.FAIL for t in same) or len(same) > RETRIES:
        return
    system_attrs = {key: value for key, value in trial.system_attrs.items() if key == "fixed_params"}
    study.add_trial(
        optuna.create_trial(
            state=TrialState.WAITING, params=trial.params, distributions=trial.distributions, system_attrs=system_attrs,
            user_attrs={key: trial.user_attrs[key] for key in KEPT if key in trial.user_attrs},
        )
    )  # fmt: skip
