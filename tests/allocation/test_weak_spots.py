"""Weak cells that the solution wants are measured until it settles; the recipe never gets worse on the text it is checked on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from autoq.allocation.problem import Limit, Option, Problem
from autoq.allocation.solver import solve
from autoq.allocation.weak_spots import COMPANY, WeakSpots, is_weak, measure_weak_spots
from autoq.measure.estimate import DamageTable
from autoq.model.unit import ModelUnits, Unit, WeightTensor

BITS = {"bf16": 16, "nvfp4": 4.5, "int3_g64_asym": 3.3, "int2_g32_asym_lsq": 2.6}
WEAK = "int2_g32_asym_lsq"
UNITS = ModelUnits(
    tuple(Unit(f"u{i}", "weight", "o", i, (WeightTensor(f"u{i}", f"u{i}.weight", (10, 100), "linear"),)) for i in range(8)),
    (),
    8000,
)


def problem(table: DamageTable) -> Problem:
    options = {u: tuple(Option(f, int(1000 * b), table[u].get(f, 0.0)) for f, b in BITS.items()) for u in table}
    return Problem(options, (Limit("--budget", frozenset(table), 3000 * 8),))


def predicted(weak: float = 0.05) -> DamageTable:
    return {f"u{i}": {"nvfp4": 0.01 * (i + 1), "int3_g64_asym": 0.03 * (i + 1), WEAK: weak * (i + 1)} for i in range(8)}


class Truth:
    """What the cells cost in truth: weak ones `factors` times their prediction alone, and `company` times that together."""

    def __init__(self, factors: Mapping[str, float], company: float = 1.0, weak: float = 0.05) -> None:
        self.factors, self.company, self.weak = factors, company, weak
        self.measured: list[tuple[str, str]] = []
        self.recipes: list[float] = []

    def cell(self, unit: Unit, fmt: str) -> float:
        self.measured.append((unit.name, fmt))
        return self.of(unit.name, fmt)

    def of(self, unit: str, fmt: str) -> float:
        return predicted(self.weak)[unit][fmt] * (self.factors.get(unit, 1.0) if fmt == WEAK else 1.0)

    def recipe(self, choice: Mapping[str, Option]) -> float:
        found = sum(
            self.of(u, o.format) * (self.company if o.format == WEAK else 1.0) for u, o in choice.items() if o.format != "bf16"
        )
        self.recipes.append(found)
        return found


def run(truth: Truth, most: int = 100) -> tuple[WeakSpots, float, float]:
    """Return what was found, and the true damage of the recipe without and with it."""
    table = predicted(truth.weak)
    found = measure_weak_spots(table, table, UNITS, lambda t: solve(problem(t)), truth.cell, truth.recipe, most)
    after = {u: {**row, **found.cells.get(u, {})} for u, row in table.items()}
    return found, truth.recipe(solve(problem(table))), truth.recipe(solve(problem(after)))


def test_only_cells_outside_the_trusted_range_are_weak() -> None:
    weight, key = UNITS.units[0], replace(UNITS.units[0], kind="key", tensors=(), kv_heads=1, head_dim=64)
    assert is_weak(weight, WEAK, 0.001)
    assert not is_weak(weight, "int3_g64_asym", 0.4)
    assert is_weak(weight, "int3_g64_asym", 0.6)
    assert not is_weak(weight, "bf16", 0.0)
    assert is_weak(key, "int2_channel", 0.001)
    assert is_weak(key, "int8_channel+tier512>int2_channel", 0.001)
    assert not is_weak(key, "int4_channel", 0.001)


def test_a_solution_without_weak_cells_measures_nothing() -> None:
    truth = Truth({})
    table = {u: {**row, WEAK: 100.0} for u, row in predicted().items()}
    roomy = lambda t: solve(replace(problem(t), limits=(Limit("--budget", frozenset(t), 8000 * 8),)))  # noqa: E731
    found = measure_weak_spots(table, table, UNITS, roomy, truth.cell, truth.recipe, 100)
    assert found == WeakSpots(rounds=1)
    assert not truth.measured
    assert not truth.recipes


def test_cells_that_are_worse_than_predicted_are_left_for_others() -> None:
    truth = Truth({"u0": 20.0, "u1": 20.0})
    found, before, after = run(truth)
    assert found.is_settled
    assert after < before
    assert len(truth.measured) == len(set(truth.measured))  # none twice
    assert {fmt for _, fmt in truth.measured} == {WEAK}
    assert found.company > 0


def test_one_factor_for_company_is_found_by_measuring_recipes() -> None:
    truth = Truth({}, company=2.0, weak=0.035)
    found, before, after = run(truth)
    by_factor = {}
    for factor in COMPANY:
        priced = {u: {**row, WEAK: row[WEAK] * factor} for u, row in predicted(truth.weak).items()}
        by_factor[factor] = truth.recipe(solve(problem(priced)))
    assert found.company == min(by_factor, key=lambda f: by_factor[f]) > 1
    assert after == min(by_factor.values()) < 0.9 * before


def test_what_does_not_help_is_left_out() -> None:
    class Contrary(Truth):
        def recipe(self, choice: Mapping[str, Option]) -> float:
            return 1.0 + len(self.recipes) + 0.0 * super().recipe(choice)  # the first recipe, without corrections, is the best

    found, _, _ = run(Contrary({"u0": 20.0}))
    assert found.company == 0.0
    assert found.cells == {}
    assert found.measured


def test_the_measuring_budget_is_kept_and_its_end_is_told() -> None:
    truth = Truth({f"u{i}": 5.0 for i in range(8)})
    found, _, _ = run(truth, most=2)
    assert len(truth.measured) == 2
    assert not found.is_settled


def test_a_weak_cell_that_was_not_measured_is_judged_by_those_that_were() -> None:
    truth = Truth({f"u{i}": 0.5 for i in range(8)})
    found, _, _ = run(truth, most=1)
    assert len(truth.measured) == 1
    assert found.company > 0
    assert {u: row[WEAK] for u, row in found.cells.items()} == pytest.approx(
        {u: 0.5 * found.company * row[WEAK] for u, row in predicted().items()}
    )
