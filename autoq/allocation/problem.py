"""The allocation problem: options for every unit, and limits on what they may store together."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoq.budget import Budget, Budgets
from autoq.cost.bits import unit_bits
from autoq.cost.kv_memory import cache_bits, cache_values, peak_bits
from autoq.errors import UserError
from autoq.formats.catalog import kv_format, weight_format
from autoq.model.unit import ModelUnits, Unit

if TYPE_CHECKING:
    from autoq.measure.damage import Candidates
    from autoq.measure.estimate import DamageTable


@dataclass(frozen=True)
class Option:
    """One format for one unit: bits stored (at the context length, for a cache) and predicted damage in nats."""

    format: str
    bits: int
    damage: float


@dataclass(frozen=True)
class Limit:
    """At most `bits` over the options of these units."""

    name: str
    units: frozenset[str]
    bits: int


@dataclass(frozen=True)
class Problem:
    """Choose one option for each unit, minimising the summed damage within the limits."""

    options: dict[str, tuple[Option, ...]]
    limits: tuple[Limit, ...]


def choice_of(problem: Problem, formats: Mapping[str, str]) -> dict[str, Option]:
    """Return the options with these formats (unit -> name); a unit without one keeps 16 bit."""
    found = {}
    for unit, options in problem.options.items():
        by_format = {o.format: o for o in options}
        found[unit] = by_format.get(formats.get(unit, ""), options[0])
    return found


def recipe_hash(choice: Mapping[str, Option]) -> str:
    """Return 12 hex digits that name a recipe."""
    lines = "\n".join(f"{unit} {option.format}" for unit, option in sorted(choice.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:12]


def unit_options(
    unit: Unit, candidates: Candidates, budgets: Budgets, damage: dict[str, float] | None = None
) -> tuple[Option, ...]:
    """Return the options of a unit, the 16-bit original first; without damage (None) every option costs 0 nats."""
    found = [Option("bf16", _bits(unit, "bf16", budgets), 0.0)]
    for fmt in candidates.for_unit(unit):
        if not fmt.is_original and (damage is None or fmt.name in damage):
            found.append(Option(fmt.name, _bits(unit, fmt.name, budgets), damage[fmt.name] if damage else 0.0))
    return tuple(found)


def _bits(unit: Unit, name: str, budgets: Budgets) -> int:
    if unit.kind == "weight":
        return unit_bits(unit, weight_format(name))
    cost = peak_bits if budgets.in_bytes else cache_bits
    return cost(unit, kv_format(name), budgets.tokens, budgets.batch)


def make_problem(units: ModelUnits, candidates: Candidates, budgets: Budgets, damage: DamageTable | None = None) -> Problem:
    """Return the problem; raises UserError when a budget cannot be met, naming the reachable range.

    A kind without a budget keeps 16 bit, so that the damage is that of what was asked for.
    """
    options: dict[str, tuple[Option, ...]] = {}
    for unit in units.units:
        searched = budgets.search_weights if unit.kind == "weight" else budgets.search_caches
        every = unit_options(unit, candidates, budgets, None if damage is None else damage.get(unit.name, {}))
        options[unit.name] = every if searched else every[:1]
    limits = []
    other = 16 * (units.parameters - units.searched)
    values = sum(cache_values(u, budgets.tokens, budgets.batch) for u in units.caches)
    if (asked := budgets.weights) is not None:
        bits = asked.limit_bits(units.searched, other, 16 * units.parameters)
        limits.append(_limit("--budget", asked, units.weights, options, bits, other))
    if (asked := budgets.kv) is not None:
        limits.append(_limit("--kv-budget", asked, units.caches, options, asked.limit_bits(values), 0))
    if (asked := budgets.memory) is not None:
        bits = asked.limit_bits(units.searched + values, other)
        limits.append(_limit("--memory", asked, units.units, options, bits, other))
    return Problem(options, tuple(limits))


def _limit(
    name: str, budget: Budget, units: tuple[Unit, ...], options: dict[str, tuple[Option, ...]], bits: int, other: int
) -> Limit:
    if not units:
        raise UserError(f"{name} {budget.text}: this model has nothing to search there")
    least = [min(options[u.name], key=lambda o: o.bits) for u in units]
    most = [max(options[u.name], key=lambda o: o.bits) for u in units]
    floor, ceiling = sum(o.bits for o in least), sum(o.bits for o in most)
    if bits < floor:
        raise UserError(
            f"{name} {budget.text} cannot be met: the least this space reaches is {_shown(budget, floor, ceiling, other)} "
            f"with {_names(least)}, the most {_shown(budget, ceiling, ceiling, other)} with bf16"
        )
    return Limit(name, frozenset(u.name for u in units), bits)


def _shown(budget: Budget, bits: int, ceiling: int, other: int) -> str:
    if budget.unit == "bytes":
        return f"{(bits + other) / 8 / 2**20:.4g}MiB"
    if budget.unit == "percent":
        return f"{100 * (bits + other) / (ceiling + other):.4g}%"
    return f"{16 * bits / ceiling:.4g}bits"


def _names(options: list[Option]) -> str:
    return " and ".join(sorted({o.format for o in options}))
