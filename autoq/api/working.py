"""Join the trials of a search from another process or another machine."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoq.api.plan import make_plan
from autoq.api.question import QuestionFile, make_question, question_path
from autoq.api.trialling import make_objective
from autoq.display.progress import Clock, Reporter, Silent
from autoq.errors import UserError
from autoq.measure.divergence import Yardstick
from autoq.measure.profile import Profile, model_fingerprint
from autoq.model import load
from autoq.trials.samplers import make_sampler
from autoq.trials.storage import open_storage
from autoq.trials.study import Reaper, load_study, work


@dataclass(frozen=True)
class Worked:
    """What a worker did."""

    study: str
    trials: tuple[int, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {"study": self.study, "trials": list(self.trials), "seconds": self.seconds}


def worker(
    run: Path,
    study: str,
    storage: str | None = None,
    model: str | None = None,
    device: str = "auto",
    timeout: float | None = None,
    processes: int = 1,
    reporter: Reporter | None = None,
) -> Worked:
    """Measure queued trials of a study until there are none.

    Args:
        run: the run folder of the search that began the study, or a copy of it. model: where the model is on this machine.
        processes: how many share this machine's memory.

    Raises UserError if the folder, the study and the model do not belong together.
    """

    start, clock = time.monotonic(), Clock(reporter or Silent())
    asked = QuestionFile.read(question_path(run, study))
    opened = load_study(open_storage(storage, run), study, storage)
    if opened.user_attrs.get("fingerprint") != asked.fingerprint:
        raise UserError(f"{str(question_path(run, study))!r} is not what the study {study!r} asks: copy the run folder again")
    with clock.stage("load", "loading the model") as progress:
        config = replace(
            asked.config,
            model=model or asked.config.model,
            run=run,
            resume=True,
            device=load.pick_device(device),
            dtype=asked.dtype,
            budget=None,
            kv_budget=None,
            memory=None,
            max_kl=None,
            space="default",
            calib=None,
            eval=None,
        )  # fmt: skip  what these stood for is in the question
        plan, profile = make_plan(config, budgets_needed=False), Profile.load(run)
        plan = replace(plan, budgets=asked.budgets, candidates=asked.candidates)
        loaded = load.load_model(plan.source, config.device, asked.dtype)
        if model_fingerprint(loaded) != asked.model:
            raise UserError(f"{config.model!r} has other weights than the model of the study {study!r}")
        progress(1, 1)
    question = make_question(plan, asked.table, profile)
    opened.sampler = make_sampler(opened.user_attrs["sampler"], question.space, config.seed)
    objective = make_objective(
        question, Yardstick(loaded, plan.units, asked.ids), plan, profile.calibration, config.seed, processes
    )
    done: list[int] = []
    with clock.stage("trials", "measuring trials") as progress:

        def tell(trial: Any) -> None:
            done.append(trial.number)
            progress(len(done), len(opened.get_trials(deepcopy=False)))

        Reaper(opened).check()
        work(opened, objective, None if timeout is None else start + timeout, tell)
    return Worked(study, tuple(done), round(time.monotonic() - start, 3))
