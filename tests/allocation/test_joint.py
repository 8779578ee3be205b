"""One budget for weights and cache, what engines can mix, what more memory buys, and fair uniforms."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from autoq.allocation.baselines import fair_uniforms
from autoq.allocation.engine import solve_for_engine
from autoq.allocation.exchange import exchange
from autoq.allocation.problem import Limit, Option, Problem, make_problem
from autoq.allocation.solver import solve, total_bits, total_damage
from autoq.budget import Budgets, parse_budget
from autoq.cost.bits import weight_cost
from autoq.cost.engines import ENGINES, Engine
from autoq.cost.kv_memory import kv_cost
from autoq.errors import UserError
from autoq.formats.catalog import kv_format, weight_format
from autoq.measure.damage import Candidates
from autoq.model.unit import ModelUnits
from autoq.model.units import find_units
from tests.conftest import build, llama_config

WEIGHTS = ("int8", "nvfp4", "int4_g64")
CACHES = ("fp8", "nvfp4", "int8_head", "int4_token")


@pytest.fixture(scope="module")
def units() -> ModelUnits:
    return find_units(build(llama_config()))


@pytest.fixture(scope="module")
def candidates() -> Candidates:
    caches = tuple(kv_format(n) for n in CACHES)
    return Candidates(tuple(weight_format(n) for n in WEIGHTS), caches, caches)


@pytest.fixture(scope="module")
def damage(units: ModelUnits, candidates: Candidates) -> dict[str, dict[str, float]]:
    """A damage for every cell: fewer bits cost more, and every unit a little differently."""
    found: dict[str, dict[str, float]] = {}
    for i, unit in enumerate(units.units):
        names = [f.name for f in candidates.for_unit(unit)]
        found[unit.name] = {n: (1 + i % 5) * (j + 1) ** 2 * 1e-3 * (1.3 if unit.kind == "key" else 1) for j, n in enumerate(names)}
    return found


def problem_of(units: ModelUnits, candidates: Candidates, damage: Any, memory: str, **more: Any) -> tuple[Problem, Budgets]:
    budgets = Budgets(memory=parse_budget(memory, "--memory"), context=256, batch=3, **more)
    return make_problem(units, candidates, budgets, damage), budgets


def test_weights_and_cache_share_one_budget_in_bytes(units: ModelUnits, candidates: Candidates, damage: Any) -> None:
    problem, budgets = problem_of(units, candidates, damage, "160KB")
    choice = solve(problem)
    weights = weight_cost(units, {u.name: weight_format(choice[u.name].format) for u in units.weights})
    kv, _ = kv_cost(units, {u.name: kv_format(choice[u.name].format) for u in units.caches}, budgets.context, budgets.batch)
    assert weights.whole_bits + kv <= 8 * 160_000
    assert weights.whole_bits + kv > 0.97 * 8 * 160_000
    # No split of the same bytes between the sides costs less.
    sides = frozenset(u.name for u in units.weights), frozenset(u.name for u in units.caches)
    compared = 0
    for share in (0.9, 0.97, 0.99, 1.01, 1.03, 1.1):
        bits = int(total_bits(choice, sides[0]) * share)
        rest = total_bits(choice, sides[0] | sides[1]) - bits
        try:
            split = make_problem(
                units,
                candidates,
                Budgets(parse_budget(f"{bits / units.searched}bits"), parse_budget(f"{rest // 8}B"), None, 256, 3),
                damage,
            )
        except UserError:
            continue
        assert total_damage(solve(split)) >= total_damage(choice) - 1e-9
        compared += 1
    assert compared >= 3


def test_budgets_combine(units: ModelUnits, candidates: Candidates, damage: Any) -> None:
    free = solve(problem_of(units, candidates, damage, "160KB")[0])
    bound, _ = problem_of(units, candidates, damage, "160KB", kv=parse_budget("4.6bits"))
    choice = solve(bound)
    caches = frozenset(u.name for u in units.caches)
    _, values = kv_cost(units, {}, 256, 3)
    assert total_bits(choice, caches) <= 4.601 * values
    assert total_damage(choice) >= total_damage(free)
    assert [limit.name for limit in bound.limits] == ["--kv-budget", "--memory"]


def test_less_than_the_least_says_the_range(units: ModelUnits, candidates: Candidates, damage: Any) -> None:
    with pytest.raises(
        UserError, match=r"--memory 10KB cannot be met: the least this space reaches is .*MiB with .*, the most .*MiB with bf16"
    ):
        problem_of(units, candidates, damage, "10KB")


@pytest.mark.parametrize("name", ["vllm", "sglang", "tensorrt-llm", "one of two"])
def test_an_engine_is_served_exactly(name: str, units: ModelUnits, candidates: Candidates, damage: Any) -> None:
    """Against every mix of caches that the engine has, each with the exact weights."""
    engine = ENGINES.get(name) or Engine(name, frozenset({"fp8", "nvfp4"}), "two")
    problem, _ = problem_of(units, candidates, damage, "160KB")
    choice = solve_for_engine(problem, units, engine)
    assert total_bits(choice, frozenset(problem.options)) <= problem.limits[0].bits
    served = [n for n in ("bf16", *CACHES) if n == "bf16" or n in (engine.kv_formats or ())]
    layers = sorted({u.module for u in units.caches})
    best = float("inf")
    for mix in itertools.product(itertools.product(served, repeat=2), repeat=len(layers)):
        used = {f for pair in mix for f in pair} - {"bf16"}
        if engine.mixing != "two" and (any(k != v for k, v in mix) or len(used) > 1):
            continue
        if engine.mixing == "one" and len(set(mix)) > 1:
            continue
        if engine.mixing == "two" and len(set(mix)) > 1:
            continue
        fixed = dict(problem.options)
        for module, (k, v) in zip(layers, mix, strict=True):
            for kind, fmt in (("key", k), ("value", v)):
                fixed[f"{module}.{kind}"] = tuple(o for o in problem.options[f"{module}.{kind}"] if o.format == fmt)
        least = sum(min(o.bits for o in options) for options in fixed.values())
        if least <= problem.limits[0].bits:
            best = min(best, total_damage(solve(Problem(fixed, problem.limits))))
    assert total_damage(choice) == pytest.approx(best)
    assert total_damage(choice) >= total_damage(solve(problem))


def test_an_engine_that_cannot_meet_the_budget_says_so(units: ModelUnits, candidates: Candidates, damage: Any) -> None:
    problem, _ = problem_of(units, candidates, damage, "142KB")
    only_8_bit = Engine("eight", frozenset({"fp8"}), "one")
    with pytest.raises(UserError, match="--engine eight cannot meet the budgets: of this space and target it serves bf16, fp8"):
        solve_for_engine(problem, units, only_8_bit)


def test_more_memory_saves_what_a_larger_budget_does(units: ModelUnits, candidates: Candidates, damage: Any) -> None:
    problem, _ = problem_of(units, candidates, damage, "160KB")
    choice = solve(problem)
    saved = []
    for side in (units.weights, units.caches):
        names = frozenset(u.name for u in side)
        found = exchange(problem, choice, names)
        bits = total_bits(choice, names)
        assert found.bytes == -(-bits // 8)
        assert found.more >= int(0.02 * bits) // 8
        alone = {u: o for u, o in problem.options.items() if u in names}
        now, then = (total_damage(solve(Problem(alone, (Limit("one side", names, n),)))) for n in (bits, bits + 8 * found.more))
        assert found.saved == pytest.approx(now - then, abs=1e-12)
        saved.append(found.saved)
    assert max(saved) > 0


def test_the_cache_fits_at_every_context_up_to_the_one_asked_for(units: ModelUnits) -> None:
    channel = (kv_format("int4_channel"),)
    found = Candidates(tuple(weight_format(n) for n in WEIGHTS), channel, channel)
    damage = {u.name: {f.name: 0.01 * (i + 1) for i, f in enumerate(found.for_unit(u))} for u in units.units}
    for memory in ("146KB", "155KB", "170KB"):
        problem, _ = problem_of(units, found, damage, memory)
        choice = solve(problem)
        weights = weight_cost(units, {u.name: weight_format(choice[u.name].format) for u in units.weights}).whole_bits
        caches = {u.name: kv_format(choice[u.name].format) for u in units.caches}
        for context in range(200, 257):
            assert weights + kv_cost(units, caches, context, 3)[0] <= 8 * parse_budget(memory).value


def test_exchange_keeps_an_engines_limits(units: ModelUnits, candidates: Candidates, damage: Any) -> None:
    problem, _ = problem_of(units, candidates, damage, "160KB")
    engine = ENGINES["sglang"]
    choice = solve_for_engine(problem, units, engine)
    names = frozenset(u.name for u in units.caches)
    used: list[set[str]] = []

    def solver(one: Problem) -> dict[str, Option]:
        found = solve_for_engine(one, units, engine)
        used.append({o.format for o in found.values()})
        return found

    exchange(problem, choice, names, solver)
    assert used
    assert all(len(formats) == 1 for formats in used)


def test_uniforms_meet_every_budget(units: ModelUnits, candidates: Candidates, damage: Any) -> None:
    _, budgets = problem_of(units, candidates, damage, "160KB")
    found = fair_uniforms(units, candidates, damage, {}, budgets, ENGINES["none"], 50)
    assert found
    for uniform in found:
        whole = weight_cost(units, uniform.assignment.weights).whole_bits
        assert whole + kv_cost(units, uniform.assignment.caches, 256, 3)[0] <= 8 * 160_000
    assert [u.predicted_kl for u in found] == sorted(u.predicted_kl for u in found)
    assert "bf16" not in [u.name for u in found]
    for_vllm = fair_uniforms(units, candidates, damage, {}, budgets, ENGINES["vllm"], 50)
    assert {u.kv for u in for_vllm} <= {"bf16", "fp8", "nvfp4", "int8_head"}
