"""Solve the allocation exactly: a multiple-choice knapsack as a 0/1 program (HiGHS, through scipy)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix

from autoq.allocation.problem import Option, Problem
from autoq.errors import AutoqError


def solve(problem: Problem) -> dict[str, Option]:
    """Return the option of every unit with the least summed damage within all limits.

    Deterministic: options that another one beats or equals in both bits and damage are dropped first, in a fixed order.
    HiGHS stops within a tolerance of the largest damage in the problem, so options that alone cost more than a solution found
    are dropped and the rest is solved again, until nothing changes.
    Raises AutoqError if the limits contradict each other (`make_problem` refuses a single impossible one).
    """
    options = {unit: undominated(found) for unit, found in problem.options.items()}
    choice = _within(problem, options, _milp(problem, options))
    while True:
        total = total_damage(choice)
        fewer = {unit: tuple(o for o in found if o.damage <= total) for unit, found in options.items()}
        if fewer == options:
            return choice
        again = _within(problem, fewer, _milp(problem, fewer))
        options, choice = fewer, min(choice, again, key=total_damage)


def _milp(problem: Problem, options: dict[str, tuple[Option, ...]]) -> dict[str, Option]:
    flat = [(unit, option) for unit, found in options.items() for option in found]
    row_of = {unit: i for i, unit in enumerate(options)}
    rows = np.array([row_of[unit] for unit, _ in flat])
    ones = coo_matrix((np.ones(len(flat)), (rows, np.arange(len(flat)))), shape=(len(options), len(flat)))
    constraints = [LinearConstraint(ones.tocsr(), 1, 1)]
    for limit in problem.limits:
        bits = np.array([float(option.bits) if unit in limit.units else 0.0 for unit, option in flat])
        constraints.append(LinearConstraint(bits / max(1, limit.bits), -np.inf, 1.0))
    damage = np.array([option.damage for _, option in flat])
    scale = damage.max() or 1.0
    with _quiet_highs():
        result = milp(
            damage / scale,
            constraints=constraints,
            integrality=np.ones(len(flat), dtype=np.int64),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 1e-9},
        )
    if result.x is None:
        raise AutoqError(f"the budgets cannot be met together ({result.message})")
    return {unit: option for (unit, option), x in zip(flat, result.x, strict=True) if x > 0.5}


@contextmanager
def _quiet_highs() -> Iterator[None]:
    """HiGHS writes some notices straight to file descriptor 1, where --json allows nothing else."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def undominated(options: tuple[Option, ...]) -> tuple[Option, ...]:
    """Drop every option that another one beats or equals in both bits and damage; cheapest first."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda o: (o.bits, o.damage, o.format)):
        if not kept or option.damage < kept[-1].damage:
            kept.append(option)
    return tuple(kept)


def total_damage(choice: dict[str, Option]) -> float:
    """Return the summed predicted damage in nats per token."""
    return sum(option.damage for option in choice.values())


def total_bits(choice: dict[str, Option], units: frozenset[str]) -> int:
    """Return the stored bits of some units."""
    return sum(option.bits for unit, option in choice.items() if unit in units)


def _within(problem: Problem, options: dict[str, tuple[Option, ...]], choice: dict[str, Option]) -> dict[str, Option]:
    """HiGHS keeps limits within a tolerance; count again in integers and step down where a few bits are over."""
    for limit in problem.limits:
        while (over := total_bits(choice, limit.units) - limit.bits) > 0:
            steps = [
                (cheaper.damage - choice[unit].damage, unit, cheaper)
                for unit in sorted(limit.units)
                for cheaper in options[unit]
                if choice[unit].bits - cheaper.bits >= over
            ]
            if not steps:
                raise AutoqError(f"the solver returned a recipe {over} bits above {limit.name}")
            _, unit, cheaper = min(steps, key=lambda s: (s[0], s[1]))
            choice = {**choice, unit: cheaper}
    return choice
