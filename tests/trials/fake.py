"""A question without a model, and a process that works on it: `python tests/trials/fake.py STORAGE RUN SECONDS`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from optuna.storages import BaseStorage
from optuna.study import Study

from autoq.allocation.problem import Limit, Option, Problem
from autoq.allocation.solver import solve
from autoq.cost.engines import engine_of
from autoq.model.unit import ModelUnits, Unit, WeightTensor
from autoq.trials.objective import Objective
from autoq.trials.question import Choice, Question, Side, start_recipes
from autoq.trials.storage import open_storage
from autoq.trials.study import Reaper, load_study, open_study, wait_for_others, work

LAYERS, BATCHES, SIZE = 9, 4, 4
FORMATS = (
    ("bf16", 16.0, 0.0),
    ("int8", 8.0, 0.002),
    ("mxfp6_e2m3", 6.25, 0.02),
    ("int4_g32_asym", 4.625, 0.18),
    ("nvfp4_lsq", 4.5, 0.2),
    ("int4_g64", 4.25, 0.3),
    ("int3_g64_asym", 3.3, 1.0),
)
STUDY = "fake"


def units() -> ModelUnits:
    found = [
        Unit(
            f"layers.{i}.{role}",
            "weight",
            role,
            i,
            (WeightTensor(f"layers.{i}.{role}", f"layers.{i}.{role}.weight", (64, 64 * width), "linear"),),
        )
        for i in range(LAYERS)
        for role, width in (("qkv", 1), ("down", 3))
    ]
    return ModelUnits(tuple(found), (), sum(u.numel for u in found))


def question(bits: float = 5.0, traded: bool = False, starts: bool = True) -> Question:
    model, rng = units(), np.random.default_rng(3)
    options = {}
    for unit in model.units:
        sensitivity = math.exp(rng.normal())
        options[unit.name] = tuple(Option(name, int(b * unit.numel), d * sensitivity) for name, b, d in FORMATS)
    names = frozenset(options)
    problem = Problem(options, () if traded else (Limit("--budget", names, int(bits * model.searched)),))
    first = {"nvfp4_lsq": dict.fromkeys(names, "nvfp4_lsq")} if starts else {}
    side = Side("weights", names, model.searched, is_traded=traded)
    return Question(problem, model, engine_of("none"), (side,), start_recipes(problem, first, {}))


def truth(asked: Question) -> dict[str, float]:
    """What a unit's damage really is, over its prediction: the late "down" units cost twice as much, the others half."""
    return {name: 2.0 if name.endswith("down") and int(name.split(".")[1]) >= 6 else 0.5 for name in asked.problem.options}


def measure(asked: Question, seconds: float = 0.0) -> Any:
    """Return the measure of a model that does not exist: the true damage times the difficulty of the window."""
    true, difficulty = truth(asked), np.random.default_rng(5).uniform(0.8, 1.2, BATCHES * SIZE)

    def run(choice: Choice, order: Sequence[int]) -> Iterator[dict[int, float]]:
        kl = sum(true[u] * o.damage for u, o in choice.items())
        for batch in order:
            time.sleep(seconds)
            yield {w: kl * difficulty[w] for w in range(SIZE * batch, SIZE * (batch + 1))}

    return run


def objective(asked: Question, seconds: float = 0.0) -> Objective:
    return Objective(asked, measure(asked, seconds), BATCHES)


def study_in(storage: BaseStorage, asked: Question, sampler: str = "tpe", seed: int = 0) -> Study:
    return open_study(storage, STUDY, asked, "the question", sampler, seed, {"sampler": sampler})


def exact(asked: Question) -> Choice:
    return solve(asked.problem)


def main() -> None:
    storage, run, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    url = None if storage == "journal" else storage
    asked = question()
    study = load_study(open_storage(url, run, grace=4), STUDY, url)
    from autoq.trials.samplers import make_sampler

    study.sampler = make_sampler(study.user_attrs["sampler"], asked.space, 0)
    print("ready", flush=True)
    reaper = Reaper(study)
    while True:
        work(study, objective(asked, seconds))
        if not wait_for_others(study, reaper):
            return


if __name__ == "__main__":
    main()
