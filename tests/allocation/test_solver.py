"""The exact solver against brute force, and budgets at their ends (case 16)."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from autoq.allocation.front import sweep
from autoq.allocation.problem import Limit, Option, Problem, make_problem
from autoq.allocation.solver import solve, total_bits, total_damage
from autoq.allocation.space import load_space
from autoq.budget import Budgets, parse_budget, parse_size
from autoq.errors import UserError
from autoq.model.unit import ModelUnits
from autoq.model.units import find_units
from tests.conftest import llama_config


def random_problem(seed: int, units: int = 6, options: int = 4, limits: int = 1) -> Problem:
    rng = random.Random(seed)
    table = {}
    for i in range(units):
        found = [Option("bf16", 1600, 0.0)]
        found += [Option(f"f{j}", rng.randint(200, 900), rng.random()) for j in range(options - 1)]
        table[f"u{i}"] = tuple(found)
    names = list(table)
    made = [Limit("a", frozenset(names), rng.randint(units * 500, units * 900))]
    if limits == 2:
        made.append(Limit("b", frozenset(names[:3]), 3 * 800))
    return Problem(table, tuple(made))


def brute_force(problem: Problem) -> float:
    best = float("inf")
    for combination in itertools.product(*problem.options.values()):
        choice = dict(zip(problem.options, combination, strict=True))
        if all(total_bits(choice, limit.units) <= limit.bits for limit in problem.limits):
            best = min(best, total_damage(choice))
    return best


@pytest.mark.parametrize("limits", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_the_solution_is_the_best_there_is(seed: int, limits: int) -> None:
    problem = random_problem(seed, limits=limits)
    choice = solve(problem)
    assert set(choice) == set(problem.options)
    assert all(total_bits(choice, limit.units) <= limit.bits for limit in problem.limits)
    assert total_damage(choice) == pytest.approx(brute_force(problem), abs=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_one_huge_cell_does_not_blur_the_small_ones(seed: int) -> None:
    """HiGHS's tolerances are relative to the largest damage; tiny damages beside a 50-nat cell must still be told apart."""
    rng = random.Random(seed)
    table = {f"u{i}": tuple(Option(f"f{j}", rng.randint(200, 900), 10 ** rng.uniform(-7, -4)) for j in range(4)) for i in range(7)}
    table["u0"] = (*table["u0"], Option("huge", 100, 50.0))
    problem = Problem(table, (Limit("a", frozenset(table), 7 * 450),))
    best = brute_force(problem)
    if best < 1:
        assert total_damage(solve(problem)) == pytest.approx(best, rel=1e-9)


def test_the_same_problem_has_the_same_solution_whatever_the_order() -> None:
    problem = random_problem(3)
    turned = Problem({u: tuple(reversed(o)) for u, o in problem.options.items()}, problem.limits)
    assert solve(problem) == solve(turned)


def test_two_hundred_units_never_exceed_the_budget_by_a_bit() -> None:
    problem = random_problem(1, units=200, options=9)
    choice = solve(problem)
    assert total_bits(choice, problem.limits[0].units) <= problem.limits[0].bits


def test_the_front_falls_and_every_point_is_the_solution_of_its_own_budget() -> None:
    problem = random_problem(5, units=12)
    names = frozenset(problem.options)
    points = sweep(problem, names, 12, [300, 400, 500, 700, 900, 1600])
    assert [p.bits for p in points] == sorted(p.bits for p in points)
    assert [p.predicted_kl for p in points] == sorted((p.predicted_kl for p in points), reverse=True)
    assert points[-1].predicted_kl == 0.0


@pytest.fixture(scope="module")
def units() -> ModelUnits:
    with torch.device("meta"):
        return find_units(AutoModelForCausalLM.from_config(llama_config(hidden_size=256, intermediate_size=512)))


@pytest.mark.parametrize("budget", ["1bits", "1", "30KiB", "5%"])
def test_case_16_a_budget_below_the_floor_names_the_reachable_range(units: ModelUnits, budget: str) -> None:
    with pytest.raises(UserError, match=r"least .* reaches is .* with int2_g32_asym_lsq.* most .*bf16"):
        make_problem(units, load_space("default"), Budgets(parse_budget(budget)))


@pytest.mark.parametrize("budget", ["16bits", "99", "100%", "1GiB"])
def test_case_16_at_the_ceiling_everything_stays_in_16_bit(units: ModelUnits, budget: str) -> None:
    candidates = load_space("default")
    damage = {u.name: {f.name: 1.0 for f in candidates.for_unit(u)} for u in units.units}
    choice = solve(make_problem(units, candidates, Budgets(parse_budget(budget)), damage))
    assert {o.format for o in choice.values()} == {"bf16"}


def test_a_budget_of_4_5_bits_admits_uniform_nvfp4(units: ModelUnits) -> None:
    from autoq.cost.bits import weight_cost
    from autoq.formats.catalog import weight_format

    cost = weight_cost(units, {u.name: weight_format("nvfp4") for u in units.weights})
    assert 4.5 < cost.effective < 4.501
    assert cost.searched_bits <= parse_budget("4.5bits").limit_bits(units.searched)


def test_a_side_without_a_budget_keeps_16_bit(units: ModelUnits) -> None:
    problem = make_problem(units, load_space("default"), Budgets(kv=parse_budget("6bits"), context=1024))
    assert all(len(problem.options[u.name]) == 1 for u in units.weights)
    assert all(len(problem.options[u.name]) > 5 for u in units.caches)


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("4.5bits", 4.5, "bits"),
        ("4.5", 4.5, "bits"),
        ("60MiB", 60 * 2**20, "bytes"),
        ("2GB", 2e9, "bytes"),
        ("35%", 35, "percent"),
        ("3 bit", 3, "bits"),
    ],
)
def test_budgets_are_read(text: str, value: float, unit: str) -> None:
    budget = parse_budget(text)
    assert (budget.value, budget.unit) == (value, unit)


@pytest.mark.parametrize("text", ["", "bits", "-3bits", "0", "4.5 apples", "nan", "1e3bits", "4,5bits", "0%"])
def test_other_budgets_are_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(UserError, match=r"bits per value .*bytes .*share"):
        parse_budget(text)


def test_bytes_and_percent_limit_the_whole_model() -> None:
    assert parse_budget("100B").limit_bits(10, other_bits=300) == 500
    assert parse_budget("50%").limit_bits(10, other_bits=40, original_bits=200) == 60


@pytest.mark.parametrize(("text", "tokens"), [("4096", 4096), ("32k", 32768), ("1M", 2**20)])
def test_contexts_are_read(text: str, tokens: int) -> None:
    assert parse_size(text) == tokens


@pytest.mark.parametrize("name", ["nothing", "defualt"])
def test_an_unknown_space_is_refused_with_the_nearest_name(name: str) -> None:
    with pytest.raises(UserError, match="Known: blackwell, default, int, plain"):
        load_space(name)
