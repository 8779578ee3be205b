"""The front, its knees, and the inverse question."""

from __future__ import annotations

import itertools
import math

import pytest

from autoq.allocation.front import knees, limit_of, sweep, sweep_total
from autoq.allocation.problem import Limit, Option, Problem
from autoq.allocation.smallest import smallest_within
from autoq.allocation.solver import solve, total_bits, total_damage
from autoq.budget import BITS_TOLERANCE
from autoq.errors import UserError
from tests.trials import fake


def test_a_steady_fall_has_no_knee() -> None:
    bits = [2 + 0.25 * i for i in range(20)]
    assert knees(bits, [2.0 ** (-2 * b) for b in bits]) == []


def test_a_bend_is_a_knee_and_so_are_two() -> None:
    bits = [float(b) for b in range(2, 10)]
    one = [math.exp(-3 * min(b, 4) - 0.2 * max(0, b - 4)) for b in bits]
    assert knees(bits, one) == [2]
    two = [math.exp(-3 * min(b, 4) - 0.8 * max(0, min(b, 7) - 4) - 0.01 * max(0, b - 7)) for b in bits]
    assert knees(bits, two) == [2, 5]


def test_points_that_a_smaller_one_beats_and_zero_damage_are_passed_over() -> None:
    assert knees([1, 2, 3, 4, 5, 6], [1.0, 0.1, 5.0, 0.09, 0.08, 0.0]) == [1]
    assert knees([1, 2], [1.0, 0.1]) == []
    assert knees([], []) == []


def test_the_total_front_never_rises_and_counts_what_is_left_out() -> None:
    asked = fake.question()
    names = sorted(asked.problem.options)
    weights, caches = frozenset(names[:9]), frozenset(names[9:])
    count = sum(u.numel for u in asked.units.units)
    points = sweep_total(asked.problem, (weights, 1000), (caches, 500), 800, [count * b for b in (3, 4, 5, 6, 8)])
    assert len(points) == 4  # 3 bits cannot be met
    assert all(a.predicted_kl > b.predicted_kl and a.total_bytes < b.total_bytes for a, b in itertools.pairwise(points))
    choice = solve(Problem(asked.problem.options, (Limit("x", weights | caches, count * 4),)))
    assert points[0].total_bytes == -(-(total_bits(choice, weights | caches) + 800) // 8)
    assert points[0].bits == total_bits(choice, weights) / 1000


@pytest.mark.parametrize("damage", [8.0, 2.0, 0.5, 0.01])
def test_the_smallest_recipe_within_a_damage_is_the_end_of_the_front(damage: float) -> None:
    asked = fake.question(traded=True)
    units = frozenset(asked.problem.options)
    choice = smallest_within(asked.problem, units, damage)
    assert total_damage(choice) <= damage
    bits = total_bits(choice, units)
    less = solve(Problem(asked.problem.options, (Limit("x", units, int(bits * 0.9995) - 1),)))
    assert total_damage(less) > damage


def test_a_damage_that_other_limits_do_not_allow_is_refused_with_the_least_there_is() -> None:
    asked = fake.question(bits=4.0)
    least = total_damage(fake.exact(asked))
    with pytest.raises(
        UserError, match=f"no recipe is predicted to cost at most 1e-05 nats: the least that the other limits allow is {least:.3g}"
    ):
        smallest_within(asked.problem, frozenset(asked.problem.options), 1e-5)


def test_a_point_takes_the_budgets_tolerance() -> None:
    limit = limit_of("front", frozenset({"a"}), 100000, 4.5)
    assert limit.bits == int((4.5 + BITS_TOLERANCE) * 100000)
    problem = Problem({"a": (Option("bf16", 1600000, 0.0), Option("nvfp4", 450002, 1.0))}, ())
    (point,) = sweep(problem, frozenset({"a"}), 100000, [4.5])
    assert point.formats == {"nvfp4": 1}
    assert point.bytes == 56251  # 450,002 bits, the last byte whole
