"""Run trials: the study of a search, this process and its workers on it, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autoq.api.applying import assignment_of
from autoq.api.plan import Plan
from autoq.api.profiling import Profiled
from autoq.api.question import QuestionFile, make_question, question_path
from autoq.display.progress import Clock
from autoq.measure.divergence import Yardstick
from autoq.measure.estimate import DamageTable
from autoq.model.quantized import DecodedWeights
from autoq.trials.importance import importances
from autoq.trials.objective import Objective, paired
from autoq.trials.question import Choice, Question
from autoq.trials.samplers import check_sampler
from autoq.trials.storage import JOURNAL, open_storage
from autoq.trials.study import Reaper, check_failures, finished, open_study, queue_trials, wait_for_others, work
from autoq.trials.workers import worker_processes
from autoq.urls import without_password

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial


FINALISTS = 3  # trials that are confirmed
Say = Callable[[str], None]


@dataclass(frozen=True)
class TrialsReport:
    """What came of the trials.

    Attributes:
        measured, stopped, repeated: trials by how they ended; repeated ones had the recipe of another.
        best: trial number, mean KL in nats per token over the trials' windows, and that less the exact solution's with its
            standard error, or None where it is not in the study. importances: parameter -> share of the KL's variation (PED-ANOVA).
        finalists: label -> recipe of the best trials, the best first, the exact solution left out; of a front all that no other beats.
    """

    study: str
    storage: str
    windows: int
    asked: int
    measured: int
    stopped: int
    repeated: int
    best: dict[str, Any]
    importances: dict[str, float]
    finalists: dict[str, Choice]

    def to_json(self) -> dict[str, Any]:
        names = ("study", "storage", "windows", "asked", "measured", "stopped", "repeated", "best", "importances")
        return {name: getattr(self, name) for name in names}


def check_trials(plan: Plan, objectives: int = 1) -> None:
    """Raise UserError, before any weight is read, for a sampler or a storage that trials could not use."""
    check_sampler(plan.config.sampler, objectives)
    if plan.config.storage is not None:
        open_storage(plan.config.storage, plan.run.path)


def run_trials(done: Profiled, table: DamageTable, clock: Clock) -> TrialsReport:
    """Run the trials that the study lacks, and report on all of them."""
    plan, config, run = done.plan, done.plan.config, done.run.path
    assert done.trial_ids is not None
    question = make_question(plan, table, done.profile)
    prints = done.profile.fingerprint
    asked = QuestionFile(config, table, done.trial_ids, prints.model, prints.dtype, plan.budgets, plan.candidates)
    name = config.study or f"{plan.source.short_name}-{asked.fingerprint[:8]}"
    storage = open_storage(config.storage, run)
    facts = {"model": config.model, "windows": len(done.trial_ids), "tokens": done.trial_ids.shape[1], "sampler": config.sampler}
    study = open_study(storage, name, question, asked.fingerprint, config.sampler, config.seed, facts)
    asked.write(question_path(run, name))
    reaper = Reaper(study)
    for number in reaper.check():
        clock.reporter.say(f"trial {number} was lost with its process, and is run again")
    queue_trials(study, question, config.trials)
    known = len(finished(study))
    has = f", which has {known} trials already" if known else ""
    clock.reporter.say(
        f"the study is {name}{has}: `autoq worker --run {run} --study {name}{' --storage URL' if config.storage else ''}` joins it"
    )
    yardstick = Yardstick(done.model, plan.units, done.trial_ids)
    objective = make_objective(question, yardstick, plan, done.profile.calibration, config.seed, config.workers)
    deadline = None if config.timeout is None else time.monotonic() + config.timeout
    threads = torch.get_num_threads()
    with clock.stage("trials", "measuring trials") as progress, ExitStack() as stack:
        teller = Teller(study, clock.reporter.say)

        def tell(_trial: FrozenTrial | None = None) -> None:
            progress(min(config.trials, teller.look()), config.trials)

        tell()
        if config.workers > 1 and known < config.trials:
            torch.set_num_threads(max(1, threads // config.workers))
            stack.callback(torch.set_num_threads, threads)
            devices = other_devices(config.device)
            teller.workers = stack.enter_context(
                worker_processes(config.workers - 1, name, run, devices, config.storage, config.timeout)
            )
        while True:
            work(study, objective, deadline, tell)
            if not wait_for_others(study, reaper, deadline, tell) or _is_over(deadline):
                break
        tell()
    if not _is_over(deadline):
        check_failures(study, config.trials)
    return report_trials(study, question, config.trials, len(done.trial_ids), _shown(config.storage, run))


def _is_over(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def make_objective(
    question: Question, yardstick: Yardstick, plan: Plan, calibration: Any, seed: int, processes: int
) -> Callable[[Trial], Any]:
    """Return what a trial does with a loaded model."""
    decoded = DecodedWeights.beside(yardstick.model, processes)

    def measure(choice: Choice, order: Sequence[int]) -> Iterator[dict[int, float]]:
        return yardstick.windows(assignment_of(plan.units, choice, calibration), decoded, order)

    return Objective(question, measure, len(yardstick.hidden), seed)


def other_devices(first: str) -> list[str]:
    """Return the devices of more workers: the other GPUs where this process has one, else its own."""
    if not first.startswith("cuda"):
        return [first]
    mine = torch.device(first).index or 0
    others = [f"cuda:{i}" for i in range(torch.cuda.device_count()) if i != mine]
    return [*others, first]


def _shown(storage: str | None, run: Path) -> str:

    return str(run / JOURNAL) if storage is None else without_password(storage)


class Teller:
    """Says what a user wants to know while trials run: a better recipe."""

    def __init__(self, study: Study, say: Say) -> None:
        self.study, self.say = study, say
        self.best: float | None = None
        self.workers: list[Any] = []
        self.ended: set[int] = set()

    def look(self) -> int:
        """Look at the study; return the number of measured trials."""

        for i, worker in enumerate(self.workers):
            if i not in self.ended and worker.poll() not in (None, 0):
                self.ended.add(i)
                self.say(f"worker {i + 1} ended with exit code {worker.returncode}: worker-{i + 1}.log in the run folder tells why")
        trials = finished(self.study)
        if len(self.study.directions) == 1 and trials:
            best = min(trials, key=lambda t: (t.values[0], t.number))
            if self.best is None or best.values[0] < self.best:
                if self.best is not None:
                    self.say(f"trial {best.number}: KL {best.values[0]:.4g}, before {self.best:.4g}")
                self.best = best.values[0]
        return len(trials)


def report_trials(study: Study, question: Question, asked: int, windows: int, storage: str) -> TrialsReport:
    """Read a study: how its trials ended, the best ones, and what mattered."""
    trials = finished(study)
    stopped = [t for t in trials if "stopped_after" in t.user_attrs]
    repeated = [t for t in trials if "same_as" in t.user_attrs]
    best, finalists = _best(trials, question)
    if question.traded:
        distinct = {t.user_attrs["recipe"]: t for t in reversed(study.best_trials)}
        finalists = {f"trial {t.number}": question_choice(question, t) for t in reversed(distinct.values())}
    return TrialsReport(
        study.study_name, storage, windows, asked, len(trials), len(stopped), len(repeated), best, importances(trials), finalists
    )  # fmt: skip


def question_choice(question: Question, trial: FrozenTrial) -> Choice:
    """Return the recipe of a measured trial again."""
    start = trial.user_attrs.get("start")
    return question.starts[start] if start is not None else question.solve(trial.params)


def _best(trials: list[FrozenTrial], question: Question) -> tuple[dict[str, Any], dict[str, Choice]]:
    """Return the best trial in figures, and the recipes of the best few that are not the exact solution."""
    if question.traded or not trials:
        return {}, {}
    whole = [t for t in trials if "stopped_after" not in t.user_attrs and "same_as" not in t.user_attrs]
    whole.sort(key=lambda t: (t.values[0], t.number))
    whole = list({t.user_attrs["recipe"]: t for t in reversed(whole)}.values())[::-1]  # two workers may have drawn the same one
    zero = next((t for t in trials if t.user_attrs.get("slot") == 0), None)
    best = whole[0]
    found: dict[str, Any] = {"trial": best.number, "kl": best.values[0], "start": best.user_attrs.get("start"), "difference": None}
    if zero is not None and best is not zero:
        found["difference"] = list(paired(best, zero))
    finalists: dict[str, Choice] = {}
    for trial in whole:
        if zero is not None and trial.user_attrs["recipe"] == zero.user_attrs["recipe"]:
            continue
        if len(finalists) < FINALISTS:
            finalists[f"trial {trial.number}"] = question_choice(question, trial)
    return found, finalists
