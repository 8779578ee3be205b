"""What a trial may be: multipliers of 0 are the exact solution, and everything else is feasible too."""

from __future__ import annotations

import numpy as np
import pytest
from optuna.trial import FixedTrial

from autoq.allocation.engine import solve_for_engine
from autoq.allocation.problem import Limit, Option, Problem, choice_of, recipe_hash
from autoq.allocation.solver import total_bits, total_damage
from autoq.cost.engines import engine_of
from autoq.model.unit import ModelUnits, Unit
from autoq.trials.multipliers import multiplier_groups, solve_multiplied
from autoq.trials.question import Question, Side, start_recipes
from tests.trials import fake


def test_groups_are_roles_by_third_of_the_depth() -> None:
    groups = fake.question().groups
    assert list(groups) == ["qkv/early", "down/early", "qkv/middle", "down/middle", "qkv/late", "down/late"]
    assert groups["down/late"] == ("layers.6.down", "layers.7.down", "layers.8.down")
    assert sorted(u for members in groups.values() for u in members) == sorted(fake.question().problem.options)


def test_units_without_a_choice_are_no_parameter_and_a_head_has_no_depth() -> None:
    model = ModelUnits((Unit("lm_head", "weight", "head", None), Unit("a", "weight", "o", 0)), (), 1)
    two = (Option("bf16", 16, 0.0), Option("int8", 8, 0.1))
    assert list(multiplier_groups(model, Problem({"lm_head": two, "a": two[:1]}, ()))) == ["head"]


def test_zeros_are_the_exact_solution() -> None:
    asked = fake.question()
    assert asked.firsts == (dict.fromkeys(asked.groups, 0.0),)
    assert asked.solve(asked.firsts[0]) == fake.exact(asked)


def test_every_multiplier_meets_the_budget_with_the_options_own_damage() -> None:
    asked, rng = fake.question(), np.random.default_rng(1)
    limit, recipes = asked.problem.limits[0], set()
    for _ in range(40):
        choice = asked.solve({name: rng.uniform(-1, 1) for name in asked.groups})
        assert total_bits(choice, limit.units) <= limit.bits
        assert all(option in asked.problem.options[unit] for unit, option in choice.items())
        assert total_damage(choice) >= total_damage(fake.exact(asked)) - 1e-12
        recipes.add(recipe_hash(choice))
    assert len(recipes) > 5


def test_a_multiplier_moves_bits_to_the_units_it_makes_dearer() -> None:
    asked = fake.question()
    late = frozenset(asked.groups["down/late"])
    plain = total_bits(asked.solve(asked.firsts[0]), late)
    dearer = total_bits(asked.solve({**asked.firsts[0], "down/late": 3.0}), late)
    cheaper = total_bits(asked.solve({**asked.firsts[0], "down/late": -3.0}), late)
    assert cheaper < plain < dearer


def test_an_engine_keeps_its_limits_under_multipliers() -> None:
    layers = range(4)
    model = ModelUnits(
        tuple(Unit(f"{i}.{kind}", kind, kind[0].upper(), i, module=str(i), kv_heads=1, head_dim=64) for i in layers for kind in ("key", "value")),
        (), 0,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    options: dict[str, tuple[Option, ...]] = {
        u.name: (
            Option("bf16", 16, 0.0),
            Option("fp8_cast", 8, float(rng.uniform(1, 2))),
            Option("int8_head", 8, float(rng.uniform(1, 2))),
        )
        for u in model.units
    }
    problem = Problem(options, (Limit("--kv-budget", frozenset(options), 8 * 10),))
    engine = engine_of("vllm")
    groups = multiplier_groups(model, problem)
    assert engine.mixing == "one and skipped"
    for seed in range(5):
        values = {name: float(v) for name, v in zip(groups, np.random.default_rng(seed).uniform(-1, 1, len(groups)), strict=True)}
        choice = solve_multiplied(problem, model, engine, groups, values)
        assert all(choice[f"{i}.key"].format == choice[f"{i}.value"].format for i in layers)
        assert len({o.format for o in choice.values()} - {"bf16"}) <= 1
    assert solve_multiplied(problem, model, engine, groups, dict.fromkeys(groups, 0.0)) == solve_for_engine(problem, model, engine)


def test_given_recipes_are_taken_by_name_and_none_twice() -> None:
    asked = fake.question()
    assert list(asked.starts) == ["uniform nvfp4_lsq"]
    again = start_recipes(
        asked.problem,
        {"a": dict.fromkeys(asked.problem.options, "int8")},
        {"b": choice_of(asked.problem, dict.fromkeys(asked.problem.options, "int8"))},
    )
    assert list(again) == ["uniform a"]
    trial = FixedTrial({})
    trial.set_user_attr("start", "uniform nvfp4_lsq")
    assert {o.format for o in asked.choice(trial).values()} == {"nvfp4_lsq"}


def test_a_front_has_the_bits_of_a_side_as_a_parameter() -> None:
    asked = fake.question(traded=True)
    bounds = asked.space["weights/bits"]
    assert bounds.low == pytest.approx(3.3, abs=0.001)
    for bits in (3.5, 4.7, 8.2):
        choice = asked.solve({**dict.fromkeys(asked.groups, 0.0), "weights/bits": bits})
        stored = total_bits(choice, frozenset(choice)) / asked.units.searched
        assert bits - 0.5 < stored <= bits


def test_what_a_recipe_stores_is_told_in_optunas_attributes() -> None:
    asked = fake.question()
    found = asked.stored(fake.exact(asked))
    assert found["bits"] <= 5.0
    assert found["weight_bytes"] == -(-sum(o.bits for o in fake.exact(asked).values()) // 8)
    assert found["predicted_kl"] == pytest.approx(total_damage(fake.exact(asked)))
    assert Question(asked.problem, asked.units, asked.engine, (Side("cache", frozenset(asked.problem.options), 7),)).stored(
        fake.exact(asked)
    ).keys() >= {"kv_bits", "kv_bytes"}
