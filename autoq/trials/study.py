"""A study with a fixed number of trials, each run once, whichever process takes it and whichever is killed.

Every trial is queued before it runs, with its number among the trials asked for (`slot`); Optuna's storages hand a queued trial to
one process only. A trial whose process died is closed as failed and queued again with the parameters it had drawn.
"""

from __future__ import annotations

import math
import os
import socket
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.pruners import WilcoxonPruner
from optuna.storages import BaseStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from autoq.errors import AutoqError, UserError
from autoq.trials.question import Question
from autoq.trials.retry import RETRIES, queue_again
from autoq.trials.samplers import make_sampler
from autoq.urls import without_password

P_VALUE = 0.05  # of a trial being as good as the best one, below which it is stopped
SILENCE = 600.0  # seconds without progress after which another machine's trial is taken to be lost
POLL = 1.0  # seconds


class SurplusTrial(Exception):  # noqa: N818
    """Another process took the last queued trial first."""


def open_study(
    storage: BaseStorage, name: str, question: Question, fingerprint: str, sampler: str, seed: int, facts: dict[str, Any]
) -> Study:
    """Create a study, or load the one of that name; raises UserError if that one asks something else.

    Args:
        facts: user attributes of a new study.
    """
    objectives = 1 + len(question.traded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        study = optuna.create_study(
            storage=storage, study_name=name, directions=["minimize"] * objectives, load_if_exists=True,
            sampler=make_sampler(sampler, question.space, seed), pruner=WilcoxonPruner(p_threshold=P_VALUE),
        )  # fmt: skip
    known = study.user_attrs.get("fingerprint")
    if (known is not None and known != fingerprint) or len(study.directions) != objectives:
        raise UserError(f"the study {name!r} asks something else (another model, budget, space or text): give another --study")
    if "sampler" in facts and study.user_attrs.get("sampler") != facts["sampler"]:
        study.set_user_attr("sampler", facts["sampler"])
    if known is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            study.set_metric_names(["kl", *(f"{side.name}_bits" for side in question.traded)])
        for key, value in {**facts, "fingerprint": fingerprint}.items():
            study.set_user_attr(key, value)
    return study


def queue_trials(study: Study, question: Question, count: int) -> None:
    """Queue what is missing of `count` trials: the exact solution, the given recipes, then what the sampler draws."""
    alive = {t.user_attrs.get("slot") for t in study.get_trials(deepcopy=False) if t.state != TrialState.FAIL}
    firsts, starts = question.firsts, list(question.starts)
    study.set_user_attr("asked", count)
    for slot in range(count):
        if slot in alive:
            continue
        attrs: dict[str, Any] = {"slot": slot}
        if 0 <= slot - len(firsts) < len(starts):
            attrs["start"] = starts[slot - len(firsts)]
        study.enqueue_trial(firsts[slot] if slot < len(firsts) else {}, user_attrs=attrs)


def finished(study: Study) -> list[FrozenTrial]:
    """Return the measured trials, by number."""
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def queued(study: Study) -> bool:
    """Return True if one of the trials that are asked for now is queued; a study may hold more from an earlier, longer run."""
    asked = study.user_attrs.get("asked", math.inf)
    return any(t.user_attrs.get("slot", -1) < asked for t in study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))


def work(
    study: Study,
    objective: Callable[[Trial], Any],
    deadline: float | None = None,
    after: Callable[[FrozenTrial], None] = lambda trial: None,
) -> None:
    """Run queued trials until there is none, or until the deadline (time.monotonic) has passed.

    An interrupt or a failure queues the running trial again before it goes on upwards.
    """

    def run(trial: Trial) -> Any:
        if "slot" not in trial.user_attrs:
            raise SurplusTrial
        trial.set_user_attr("worker", identity())
        return objective(trial)

    def report(_: Study, trial: FrozenTrial) -> None:
        if trial.state == TrialState.COMPLETE:
            after(trial)

    while queued(study):
        if deadline is not None and time.monotonic() >= deadline:
            return
        try:
            study.optimize(run, n_trials=1, catch=(SurplusTrial,), callbacks=[report])
        except UpdateFinishedTrialError:  # it was taken to be lost meanwhile, and queued again
            continue
        except BaseException:
            mine = identity()
            for trial in study.get_trials(states=(TrialState.FAIL,)):
                if trial.user_attrs.get("worker") == mine:
                    queue_again(study, trial)
            raise


class Reaper:
    """Finds running trials whose process is gone, and queues them again."""

    def __init__(self, study: Study, silence: float = SILENCE) -> None:
        self.study, self.silence = study, silence
        self.seen: dict[int, tuple[Any, float]] = {}

    def check(self) -> list[int]:
        """Queue lost trials again; return their numbers.

        A process of this machine is looked up. For another machine's a trial is lost when nothing of it has changed for `silence`
        seconds by this machine's clock; databases have Optuna's heartbeats too.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            optuna.storages.fail_stale_trials(self.study)
        lost = []
        for trial in self.study.get_trials(states=(TrialState.RUNNING,)):
            if self._is_lost(trial):
                try:
                    self.study.tell(trial.number, state=TrialState.FAIL)
                except (UpdateFinishedTrialError, ValueError):  # another process was first
                    continue
                queue_again(self.study, trial)
                lost.append(trial.number)
        return lost

    def _is_lost(self, trial: FrozenTrial) -> bool:
        worker = trial.user_attrs.get("worker")
        if worker and worker["host"] == machine():
            return not _is_alive(worker)
        if _has_heartbeat(self.study):
            return False
        state = (len(trial.intermediate_values), sorted(trial.user_attrs), trial.user_attrs.get("batches"))
        now = time.monotonic()
        if self.seen.get(trial.number, (None, 0.0))[0] != state:
            self.seen[trial.number] = (state, now)
        return now - self.seen[trial.number][1] > self.silence


def wait_for_others(
    study: Study, reaper: Reaper, deadline: float | None = None, between: Callable[[], None] = lambda: None
) -> bool:
    """Wait until nothing runs any more; return True if there is something to do again, because a lost trial was queued."""
    while True:
        between()
        reaper.check()
        if queued(study):
            return True
        if not study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            return False
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(POLL)


def identity() -> dict[str, Any]:
    """Name this process so that another one on this machine can tell whether it is still alive."""
    return {"host": machine(), "pid": os.getpid(), "started": _started(os.getpid())}


def machine() -> str:
    """Name this machine, or this container of it: where a process id means something."""
    parts = [socket.gethostname()]
    with suppress(OSError):  # not Linux
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _has_heartbeat(study: Study) -> bool:
    interval = getattr(study._storage, "get_heartbeat_interval", None)
    return interval is not None and interval() is not None


def _started(pid: int) -> int | None:
    """Return when a process began, in the system's ticks, or None where that is not told or it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _is_alive(worker: dict[str, Any]) -> bool:
    if Path("/proc/self/stat").exists():
        return _started(worker["pid"]) == worker["started"]
    try:
        os.kill(worker["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def load_study(storage: BaseStorage, name: str, shown: str | None) -> Study:
    """Load a study for a worker; raises UserError if there is none of that name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            return optuna.load_study(storage=storage, study_name=name, pruner=WilcoxonPruner(p_threshold=P_VALUE))
    except KeyError as error:
        where = "the run folder's journal" if shown is None else without_password(shown)
        raise UserError(
            f"there is no study {name!r} in {where}: `autoq search --trials N` makes one and prints its name"
        ) from error


def check_failures(study: Study, count: int) -> None:
    """Raise AutoqError if a trial failed so often that it is not queued any more."""
    alive = {t.user_attrs.get("slot") for t in study.get_trials(deepcopy=False) if t.state != TrialState.FAIL}
    if missing := [slot for slot in range(count) if slot not in alive]:
        raise AutoqError(f"trial {missing[0]} failed {RETRIES + 1} times: look at the workers' logs in the run folder")
