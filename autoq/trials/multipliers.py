"""What a trial varies: multipliers on the predicted damage, by role and third of the depth.

The exact solver turns them into a recipe that meets every limit, so that each trial is feasible. All of them at 0 is the exact solution.
A choice of one format for each unit instead has some 10^100 points, of which hardly one meets a budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoq.allocation.engine import solve_for_engine
from autoq.allocation.problem import Option, Problem, choice_of
from autoq.cost.engines import Engine
from autoq.model.unit import ModelUnits

WIDTH = 1.0  # log2: damages between half and twice the prediction
DEPTHS = ("early", "middle", "late")


def multiplier_groups(units: ModelUnits, problem: Problem) -> dict[str, tuple[str, ...]]:
    """Return parameter name ("down/late", "K/early", "head") -> the units whose damage it multiplies; only units with a choice."""
    depth = 1 + max((u.layer for u in units.units if u.layer is not None), default=0)
    found: dict[str, list[str]] = {}
    for unit in units.units:
        if len(problem.options[unit.name]) > 1:
            third = "" if unit.layer is None else f"/{DEPTHS[3 * unit.layer // depth]}"
            found.setdefault(unit.role + third, []).append(unit.name)
    return {name: tuple(members) for name, members in found.items()}


def multiplied(problem: Problem, groups: Mapping[str, tuple[str, ...]], values: Mapping[str, float]) -> Problem:
    """Return the problem with the damage of every group's units times 2^value."""
    options = dict(problem.options)
    for name, value in values.items():
        for unit in groups[name]:
            options[unit] = tuple(replace(o, damage=o.damage * 2.0**value) for o in options[unit])
    return replace(problem, options=options)


def solve_multiplied(
    problem: Problem, units: ModelUnits, engine: Engine, groups: Mapping[str, tuple[str, ...]], values: Mapping[str, float]
) -> dict[str, Option]:
    """Return the exact solution under the multipliers, with the options' own bits and damage."""
    moved = {name: value for name, value in values.items() if value}
    choice = solve_for_engine(multiplied(problem, groups, moved), units, engine)
    return choice_of(problem, {unit: option.format for unit, option in choice.items()})
