"""Solve within what a serving engine can mix: the exact solution for each cache format it may be given, and the best of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoq.allocation.problem import Limit, Option, Problem
from autoq.allocation.solver import solve, total_damage
from autoq.cost.engines import Engine
from autoq.errors import UserError
from autoq.model.unit import ModelUnits, Unit


def solve_for_engine(problem: Problem, units: ModelUnits, engine: Engine) -> dict[str, Option]:
    """Return the option of every unit with the least summed damage that the engine can serve.

    Raises UserError when no format of the engine meets the budgets.
    """
    if engine.mixing == "free" or not units.caches:
        return solve(problem)
    return min((_expanded(problem, solve(p), merged) for p, merged in feasible_ways(problem, units, engine)), key=total_damage)


def feasible_ways(problem: Problem, units: ModelUnits, engine: Engine) -> list[tuple[Problem, dict[str, str]]]:
    """Return problems whose solutions the engine can serve, with the units merged into others (merged -> into).

    Raises UserError when no format of the engine meets the budgets.
    """
    found = [way for way in _ways(problem, units, engine) if _is_feasible(way[0])]
    if not found:
        left = {o.format for u in units.caches for o in problem.options[u.name] if _served(o, engine)}
        names = ", ".join(sorted(left))
        raise UserError(
            f"{engine.option} {engine.name} cannot meet the budgets: of this space and target it serves {names} ({engine.mixing}); ask for more memory"
        )
    return found


def _ways(problem: Problem, units: ModelUnits, engine: Engine) -> Iterator[tuple[Problem, dict[str, str]]]:
    """Yield every way, feasible or not."""
    names = sorted({o.format for u in units.caches for o in problem.options[u.name] if _served(o, engine)})
    keys, values = ([u for u in units.caches if u.kind == kind] for kind in ("key", "value"))
    if engine.mixing == "one and skipped":
        value_of = {u.module: u for u in values}
        for name in names:
            yield _merged(problem, [(u, value_of[u.module]) for u in keys], {"bf16", name})
        return
    for of_keys in names:
        for of_values in names if engine.mixing == "two" else [of_keys]:
            fixed = {u.name: _only(problem.options[u.name], of_keys) for u in keys}
            fixed |= {u.name: _only(problem.options[u.name], of_values) for u in values}
            if all(fixed.values()):
                yield replace(problem, options={**problem.options, **fixed}), {}


def _served(option: Option, engine: Engine) -> bool:
    return option.format == "bf16" or engine.kv_formats is None or option.format in engine.kv_formats


def _only(options: tuple[Option, ...], name: str) -> tuple[Option, ...]:
    return tuple(o for o in options if o.format == name)


def _merged(problem: Problem, layers: list[tuple[Unit, Unit]], names: set[str]) -> tuple[Problem, dict[str, str]]:
    """K and V of a layer as one unit, in one of these formats."""
    options = dict(problem.options)
    for key, value in layers:
        others = {o.format: o for o in options.pop(value.name)}
        options[key.name] = tuple(
            Option(o.format, o.bits + others[o.format].bits, o.damage + others[o.format].damage)
            for o in options[key.name]
            if o.format in names and o.format in others
        )
    gone = frozenset(value.name for _, value in layers)
    limits = tuple(Limit(limit.name, limit.units - gone, limit.bits) for limit in problem.limits)
    return Problem(options, limits), {value.name: key.name for key, value in layers}


def _is_feasible(problem: Problem) -> bool:
    least = {unit: min((o.bits for o in found), default=0) for unit, found in problem.options.items()}
    return all(problem.options.values()) and all(sum(least[u] for u in limit.units) <= limit.bits for limit in problem.limits)


def _expanded(problem: Problem, choice: dict[str, Option], merged: dict[str, str]) -> dict[str, Option]:
    """Give merged units the format of their partner, and both their own bits and damage."""
    formats = {unit: option.format for unit, option in choice.items()}
    formats |= {value: formats[key] for value, key in merged.items()}
    return {unit: _only(problem.options[unit], name)[0] for unit, name in formats.items()}
