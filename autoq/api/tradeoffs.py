"""Measure fronts: points of the predicted one, or what a study with several objectives found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autoq.allocation.engine import solve_for_engine
from autoq.allocation.problem import Option
from autoq.api.applying import assignment_of
from autoq.api.confirming import Candidate, Confirmed
from autoq.api.correcting import Prices, price
from autoq.api.fronts import FrontResult, MeasuredPoint, described, predicted_fronts
from autoq.api.plan import Plan, make_plan
from autoq.api.profiling import Profiled, profile_plan
from autoq.api.recording import make_recipe
from autoq.api.trialling import check_trials, run_trials
from autoq.budget import Budget
from autoq.config import SearchConfig
from autoq.display.progress import Clock, Reporter, Silent
from autoq.errors import UserError
from autoq.measure.divergence import Yardstick
from autoq.measure.profile import Profile
from autoq.model.given import Given, borrowed
from autoq.model.quantized import DecodedWeights
from autoq.model.text import STDLIB
from autoq.run_folder import RunFolder, write_atomically

FOLDER, FILE = "front", "front.json"
MOST_POINTS = 12  # of a study's front are confirmed


def measure_front(
    run: Path,
    budgets: Sequence[float] | None,
    weights: Sequence[float],
    caches: Sequence[float],
    eval_: str | None = None,
    reporter: Reporter | None = None,
    given: Given | None = None,
) -> FrontResult:
    """Return the predicted fronts of a run, and measure the recipes of some budgets.

    Args:
        weights, caches: bits per value; the other side stays in 16 bit. given: what is in memory already.
    """
    given = given or Given()
    with borrowed(given.model):
        return _measure_front(run, budgets, weights, caches, eval_, Clock(reporter or Silent()), given)


def _measure_front(
    run: Path, budgets: Sequence[float] | None, weights: Sequence[float], caches: Sequence[float], eval_: str | None, clock: Clock, given: Given
) -> FrontResult:  # fmt: skip
    known, made = described(run, given), Profile.load(run).fingerprint
    description = RunFolder(run).description()
    try:
        measuring: dict[str, Any] = {
            name: int(description[name]) for name in ("eval_samples", "eval_len", "correct", "weak") if name in description
        }
        config = replace(
            known, run=run, resume=True, front=True, sides="both" if caches else "weights", eval=eval_ or _named(description.get("eval"), given.eval_ids), dtype=made.dtype,
            calib=_named(description["calib"], given.ids), seed=int(description["seed"]),
            samples=int(description["samples"]), seq_len=int(description["seq_len"]),
            **measuring,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the run.json in {str(run)!r} lacks or garbles {error}: search or profile there again") from error
    done, yardstick, prices, floor = _prepared(config, clock, given)
    plan = done.plan
    recipes: dict[str, tuple[dict[str, Option], Prices]] = {}
    for side, asked in (("weights", weights), ("cache", caches)):
        for bits in asked:
            budget = Budget(f"{bits:g}bits", bits, "bits")
            alone = replace(plan.budgets, weights=budget if side == "weights" else None, kv=budget if side == "cache" else None)
            limited = replace(plan, budgets=alone)
            try:
                limited.problem()
            except UserError as error:
                raise UserError(f"{bits:g} bits for the {side} cannot be met: {error}") from error
            own = price(replace(done, plan=limited), floor, clock)  # at few bits the solution wants weak cells, which are measured
            recipes[f"{side} {bits:g}bits"] = solve_for_engine(limited.problem(own.table), plan.units, plan.engine), own
    points = _measured(done, recipes, yardstick, clock)
    front = predicted_fronts(
        run,
        plan.units,
        plan.candidates,
        prices.table,
        plan.budgets.context,
        budgets,
        solver=lambda problem: solve_for_engine(problem, plan.units, plan.engine),
        error=prices.predictor(done.profile, plan.units).error,
    )
    return replace(front, measured=points)


def _named(text: str | None, ids: torch.Tensor | None) -> str | None:
    """Return what --calib or --eval was, or None for the default and for ids that are given again."""
    return None if text in (None, STDLIB) or ids is not None else text


def search_front(config: SearchConfig, reporter: Reporter | None = None, given: Given | None = None) -> FrontResult:
    """Profile, correct, and return the front of damage against memory; with trials a study measures it, and its recipes are written.

    Writes front.json, and front/recipe-*.yaml for each measured recipe that no other beats, into the run folder.
    """
    given = given or Given()
    with borrowed(given.model):
        return _search_front(config, Clock(reporter or Silent()), given)


def _search_front(config: SearchConfig, clock: Clock, given: Given) -> FrontResult:
    done, yardstick, prices, floor = _prepared(config, clock, given)
    plan, run = done.plan, done.run.path
    front = predicted_fronts(
        run, plan.units, plan.candidates, prices.table, plan.budgets.context, None, plan.budgets.batch,
        lambda problem: solve_for_engine(problem, plan.units, plan.engine), prices.predictor(done.profile, plan.units).error,
    )  # fmt: skip
    if config.trials:
        trials = run_trials(done, prices.table, clock)
        recipes = {label: (choice, prices) for label, choice in _spread(trials.finalists).items()}
        points = _measured(done, recipes, yardstick, clock, run / FOLDER, floor)
        front = replace(front, measured=points, trials=trials)
    write_atomically(run / FILE, json.dumps(front.to_json(), indent=1) + "\n")
    return front


def _prepared(config: SearchConfig, clock: Clock, given: Given) -> tuple[Profiled, Yardstick, Prices, float]:
    with clock.stage("prepare", "reading the model's shapes"):
        plan: Plan = make_plan(config, given=given)
        if config.trials:
            check_trials(plan, 1 + len(plan.sides()))
    done = profile_plan(plan, clock)
    with clock.stage("measure", "measuring the original") as progress:
        yardstick = Yardstick(done.model, plan.units, done.eval_ids)
        floor = yardstick.noise_floor()
        progress(1, 1)
    return done, yardstick, price(done, floor, clock), floor


def _spread(recipes: Mapping[str, dict[str, Option]]) -> dict[str, dict[str, Option]]:
    """Leave as many as are confirmed, spread evenly over their bits."""
    ordered = sorted(recipes, key=lambda name: sum(o.bits for o in recipes[name].values()))
    if len(ordered) > MOST_POINTS:
        ordered = [ordered[round(i * (len(ordered) - 1) / (MOST_POINTS - 1))] for i in range(MOST_POINTS)]
    return {name: recipes[name] for name in ordered}


def _measured(
    done: Profiled,
    recipes: Mapping[str, tuple[dict[str, Option], Prices]],
    yardstick: Yardstick,
    clock: Clock,
    folder: Path | None = None,
    floor: float = 0.0,
) -> tuple[MeasuredPoint, ...]:
    """Measure recipes on the untouched text, ordered by bytes; with a folder, leave out those that another one beats and write the others."""
    plan, decoded = done.plan, DecodedWeights.beside(done.model)
    found = []
    with clock.stage("measure", "measuring the front") as progress:
        for i, (label, (choice, _)) in enumerate(recipes.items()):
            progress(i, len(recipes))
            divergence = yardstick.measure(assignment_of(plan.units, choice, done.profile.calibration), decoded=decoded)
            found.append(Candidate(label, choice, divergence))
        progress(len(recipes), len(recipes))
    points = []
    for candidate in found:
        formats, prices = {u: o.format for u, o in candidate.choice.items()}, recipes[candidate.label][1]
        prediction = prices.predictor(done.profile, plan.units)(formats)
        recipe = make_recipe(
            done, candidate.choice, prices.table, prediction, candidate.divergence, floor, Confirmed((candidate,), ())
        )
        totals, kl = recipe.totals, candidate.divergence
        point = MeasuredPoint(
            candidate.label,
            totals.bits,
            totals.kv_bits,
            totals.weight_bytes + totals.kv_bytes,
            prediction.kl,
            kl.mean_kl,
            kl.stderr,
        )
        points.append((point, recipe))
    points.sort(key=lambda pair: (pair[0].total_bytes, pair[0].measured_kl))
    if folder is None:
        return tuple(point for point, _ in points)
    kept = [(p, r) for p, r in points if not any(_beats(q, p) for q, _ in points)]
    folder.mkdir(exist_ok=True)
    before, written = set(folder.glob("recipe-*.yaml")), []
    for point, recipe in kept:
        kv = f"-kv{point.kv_bits:.3f}" if point.kv_bits < 16 else ""
        path = folder / f"recipe-{point.bits:.3f}bits{kv}-{point.label.replace(' ', '')}.yaml"
        recipe.write(path)
        written.append(replace(point, recipe=path))
    for old in before - {point.recipe for point in written}:  # of an earlier front
        old.unlink()
    return tuple(written)


def _beats(one: MeasuredPoint, other: MeasuredPoint) -> bool:
    """Return True if a point is no worse in anything, and better in something."""
    pairs = [(one.measured_kl, other.measured_kl), (one.bits, other.bits), (one.kv_bits, other.kv_bits)]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)
