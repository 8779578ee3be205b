"""Correct the prediction where it can be checked cheaply: every format's column, and the weak cells that the solution wants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from autoq.allocation.corrections import measure_uniform
from autoq.allocation.engine import solve_for_engine
from autoq.allocation.problem import Option, recipe_hash
from autoq.allocation.weak_spots import Cells, measure_weak_spots
from autoq.api.applying import assignment_of
from autoq.api.profiling import Profiled
from autoq.display.progress import Clock
from autoq.formats.catalog import kv_format, weight_format
from autoq.measure.divergence import Yardstick
from autoq.measure.estimate import DamageTable, Predictor, correction_factors, damage_table
from autoq.measure.profile import Profile, UniformKL
from autoq.model.quantized import Assignment
from autoq.model.text import cut_again
from autoq.model.unit import ModelUnits, Unit


@dataclass(frozen=True)
class Prices:
    """The damage to solve with.

    Attributes:
        factors: "kind/format" -> what its column was multiplied with. cells: unit -> format -> what stands in place of the prediction.
        measured: how many of these were measured.
    """

    table: DamageTable
    factors: dict[str, float]
    cells: Cells = field(default_factory=dict)
    measured: int = 0

    def predictor(self, profile: Profile, units: ModelUnits) -> Predictor:
        """Return what predicts choices with these corrections, and their errors."""
        return Predictor(profile, units, factors=self.factors, cells=self.cells)


def price(done: Profiled, floor: float, clock: Clock) -> Prices:
    """Return the corrected damage of every cell; what was measured for it is kept in the profile."""
    plan, profile, units = done.plan, done.profile, done.plan.units
    factors: dict[str, float] = {}
    if plan.config.correct:
        with clock.stage("correct", "checking uniform formats") as progress:
            _measure_columns(done, progress)
        factors = correction_factors(profile, units, _sequences(done), floor)
    table = damage_table(profile, units, factors=factors)
    if not plan.config.weak:
        return Prices(table, factors)
    return _with_weak_spots(done, table, factors, clock)


def _sequences(done: Profiled) -> int:
    """Number of the profile's sequences that corrections are measured on."""
    return min(done.plan.config.correct or len(done.ids), len(done.ids))


def _windows(done: Profiled) -> torch.Tensor:
    return cut_again(done.ids[: _sequences(done)], done.eval_ids.shape[1], done.bos)


def _measure_columns(done: Profiled, progress: Any) -> None:
    """Measure the uniform formats of the sides that have a budget, where the profile lacks them."""
    plan, profile, units = done.plan, done.profile, done.plan.units
    uniform: dict[str, Assignment] = {}
    for kind, asked, formats in (
        ("weight", plan.budgets.search_weights, plan.candidates.weights),
        ("key", plan.budgets.search_caches, plan.candidates.keys),
        ("value", plan.budgets.search_caches, plan.candidates.values),
    ):
        for fmt in formats if asked else ():
            able = [u.name for u in units.units if u.kind == kind and fmt in plan.candidates.for_unit(u)]
            chosen: Any = dict.fromkeys(able, fmt)
            weights, caches = (chosen, {}) if kind == "weight" else ({}, chosen)
            uniform[f"{kind}/{fmt.name}"] = Assignment(weights, caches, profile.calibration)
    windows = _windows(done)
    if measure_uniform(
        profile, lambda: Yardstick(done.model, units, windows), _sequences(done), windows.shape[1], uniform, progress
    ):
        profile.save(done.run.path)


def _with_weak_spots(done: Profiled, table: DamageTable, factors: dict[str, float], clock: Clock) -> Prices:
    plan, profile, units = done.plan, done.profile, done.plan.units
    sequences, windows = _sequences(done), _windows(done)
    plain, on_these = damage_table(profile, units), damage_table(profile.first(sequences), units)
    text = (sequences, windows.shape[1])
    fresh = 0

    @cache
    def yardstick() -> Yardstick:
        return Yardstick(done.model, units, windows)

    def once(known: dict[str, UniformKL], key: str, assignment: Assignment) -> float:
        """Measure an assignment, or read what it measured on this text before."""
        nonlocal fresh
        if key not in known or known[key][1:] != text:
            known[key] = UniformKL(yardstick().measure(assignment).mean_kl, *text)
            fresh += 1
        return known[key].kl

    def hardness(unit: Unit, fmt: str) -> float:
        """Damage of that column on the whole profile over that on these sequences."""
        of_kind = [u.name for u in units.units if u.kind == unit.kind and fmt in plain.get(u.name, {})]
        here = sum(on_these[u][fmt] for u in of_kind)
        return sum(plain[u][fmt] for u in of_kind) / here if here > 0 else 1.0

    def measure(unit: Unit, fmt: str) -> float:
        alone: Any = {unit.name: weight_format(fmt) if unit.kind == "weight" else kv_format(fmt)}
        weights, caches = (alone, {}) if unit.kind == "weight" else ({}, alone)
        assignment = Assignment(weights, caches, profile.calibration)
        return once(profile.cell_kl, f"{unit.name}/{fmt}", assignment) * hardness(unit, fmt)

    def measure_recipe(choice: Mapping[str, Option]) -> float:
        return once(profile.recipe_kl, recipe_hash(choice), assignment_of(units, dict(choice), profile.calibration))

    def solved(damage: DamageTable) -> dict[str, Option]:
        return solve_for_engine(plan.problem(damage), units, plan.engine)

    with clock.stage("weak", "measuring weak spots") as progress:
        found = measure_weak_spots(table, plain, units, solved, measure, measure_recipe, plan.config.weak, progress)
        progress(1, 1)
    if fresh:
        profile.save(done.run.path)
    count = sum(map(len, found.measured.values()))
    if count:
        rest = "" if found.is_settled else f"; --weak {plan.config.weak} ended it before the solution was settled"
        use = f"taken {found.company:g} times" if found.company else "left out, since the recipe without them measured less"
        clock.reporter.say(
            f"{count} cells outside the trusted range were measured alone, in {found.rounds - 1} rounds, and {use}{rest}"
        )
    return Prices(damage_table(profile, units, factors=factors, cells=found.cells), factors, found.cells, count)
