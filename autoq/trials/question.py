"""What a study asks: which recipes its trials may measure, and what each of them stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.trial import Trial

from autoq.allocation.problem import Limit, Option, Problem, choice_of, recipe_hash
from autoq.allocation.solver import total_bits, total_damage
from autoq.cost.engines import Engine
from autoq.model.unit import ModelUnits
from autoq.trials.multipliers import WIDTH, multiplier_groups, solve_multiplied

MOST_BITS = 9.0  # a front ends there
Choice = dict[str, Option]


@dataclass(frozen=True)
class Side:
    """What is searched and counted together: the weights, or the caches.

    Attributes:
        values: how many the budgets count. is_traded: what it stores is an objective of its own.
    """

    name: str
    units: frozenset[str]
    values: int
    is_traded: bool = False


@dataclass(frozen=True)
class Question:
    """The recipes of a study.

    Attributes:
        starts: recipes to measure early, by name: uniform formats, solutions for nearby budgets. corners: of a front, the bits of
            each traded side of the exact solutions to measure first.
    """

    problem: Problem
    units: ModelUnits
    engine: Engine
    sides: tuple[Side, ...]
    starts: Mapping[str, Choice] = field(default_factory=dict)
    corners: tuple[Mapping[str, float], ...] = ()

    @cached_property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Parameter name -> units whose damage it multiplies."""
        return multiplier_groups(self.units, self.problem)

    @cached_property
    def traded(self) -> tuple[Side, ...]:
        """The sides that are objectives beside the damage."""
        return tuple(side for side in self.sides if side.is_traded)

    @cached_property
    def space(self) -> dict[str, BaseDistribution]:
        """Every parameter with its distribution: log2 of multipliers, and bits per value of each side that is traded off."""
        found: dict[str, BaseDistribution] = {name: FloatDistribution(-WIDTH, WIDTH) for name in self.groups}
        for side in self.traded:
            floor = sum(min(o.bits for o in self.problem.options[u]) for u in side.units) / side.values
            found[f"{side.name}/bits"] = FloatDistribution(floor, max(floor, MOST_BITS))
        return found

    @cached_property
    def firsts(self) -> tuple[dict[str, float], ...]:
        """The parameters to measure first: those of the exact solution, or of exact solutions along a front."""
        zeros = dict.fromkeys(self.groups, 0.0)
        return tuple({**zeros, **corner} for corner in self.corners) if self.traded else (zeros,)

    def solve(self, values: Mapping[str, float]) -> Choice:
        """Return the recipe of these parameters."""
        problem = self.problem
        limits = [Limit(side.name, side.units, int(values[f"{side.name}/bits"] * side.values)) for side in self.traded]
        multipliers = {name: value for name, value in values.items() if name in self.groups}
        if limits:
            problem = replace(problem, limits=(*problem.limits, *limits))
        return solve_multiplied(problem, self.units, self.engine, self.groups, multipliers)

    def choice(self, trial: Trial) -> Choice:
        """Return the recipe of a trial: the one it was given, or that of the parameters it draws."""
        if (start := trial.user_attrs.get("start")) is not None:
            return self.starts[start]
        return self.solve({name: trial.suggest_float(name, d.low, d.high) for name, d in self.space.items()})

    def stored(self, choice: Choice) -> dict[str, Any]:
        """Return what a recipe takes and is predicted to cost, as a trial's user attributes."""
        found: dict[str, Any] = {"recipe": recipe_hash(choice), "predicted_kl": total_damage(choice)}
        for side, kind, size in (("weights", "bits", "weight_bytes"), ("cache", "kv_bits", "kv_bytes")):
            for known in self.sides:
                if known.name == side:
                    bits = total_bits(choice, known.units)
                    found |= {kind: bits / known.values, size: -(-bits // 8)}
        return found


def start_recipes(problem: Problem, uniforms: Mapping[str, Mapping[str, str]], nearby: Mapping[str, Choice]) -> dict[str, Choice]:
    """Return the recipes to measure first: uniform ones from unit -> format, and solutions for nearby budgets; none twice."""
    found = {f"uniform {name}": choice_of(problem, formats) for name, formats in uniforms.items()} | dict(nearby)
    known: dict[str, str] = {}
    for name, choice in found.items():
        known.setdefault(recipe_hash(choice), name)
    return {name: found[name] for name in known.values()}
