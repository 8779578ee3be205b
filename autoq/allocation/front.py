"""The front: the least predicted damage at every budget, from one profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoq.allocation.exchange import Solver
from autoq.allocation.problem import Limit, Problem
from autoq.allocation.solver import solve, total_bits, total_damage
from autoq.budget import BITS_TOLERANCE
from autoq.errors import UserError

KNEE = 0.03  # depth below a chord, of the range


@dataclass(frozen=True)
class FrontPoint:
    """What the best recipe within a budget stores, in effective bits and in bytes, and its predicted KL in nats per token.

    Attributes:
        stderr: of the prediction over the profile's sequences; None where nobody asked for it.
    """

    bits: float
    bytes: int
    predicted_kl: float
    formats: dict[str, int]
    stderr: float | None = None


def limit_of(name: str, units: frozenset[str], values: int, bits: float) -> Limit:
    """Return the limit of so many bits per value, within the tolerance of a budget."""
    return Limit(name, units, int((bits + BITS_TOLERANCE) * values))


def sweep(
    problem: Problem, units: frozenset[str], values: int, budgets: list[float], solver: Solver = solve,
    error: Callable[[dict[str, str]], float] | None = None,
) -> list[FrontPoint]:  # fmt: skip
    """Solve one side of the problem (the weights, or the caches) at each budget in bits per value; unreachable ones are left out.

    Args:
        error: returns the standard error of what is predicted for a choice unit -> format.
    """
    options = {u: o for u, o in problem.options.items() if u in units}
    floor = sum(min(o.bits for o in found) for found in options.values())
    points: dict[float, FrontPoint] = {}
    for budget in sorted(budgets):
        limit = limit_of("front", units, values, budget)
        if limit.bits < floor:
            continue
        try:
            choice = solver(replace(problem, options=options, limits=(limit,)))
        except UserError:  # an engine's limits leave nothing there
            continue
        stored = total_bits(choice, units)
        formats: dict[str, int] = {}
        for option in choice.values():
            formats[option.format] = formats.get(option.format, 0) + 1
        bits = stored / values
        stderr = error({u: o.format for u, o in choice.items()}) if error is not None else None
        points[bits] = FrontPoint(bits, -(-stored // 8), total_damage(choice), dict(sorted(formats.items())), stderr)
    return list(points.values())


@dataclass(frozen=True)
class TotalPoint:
    """The best recipe within a budget for weights and caches together.

    Attributes:
        total_bytes: of all weights, what is left out too, and of the cache. bits, kv_bits: per searched weight and cached value.
    """

    total_bytes: int
    bits: float
    kv_bits: float
    predicted_kl: float


def sweep_total(
    problem: Problem, weights: tuple[frozenset[str], int], caches: tuple[frozenset[str], int], other_bits: int, budgets: Sequence[int], solver: Solver = solve
) -> list[TotalPoint]:  # fmt: skip
    """Solve both sides together at each budget in bits; unreachable ones are left out.

    Args:
        weights, caches: (units, number of values). other_bits: stored by what is not searched; the budgets leave it out.
    """
    units = weights[0] | caches[0]
    floor = sum(min(o.bits for o in problem.options[u]) for u in units)
    points: dict[int, TotalPoint] = {}
    for budget in sorted(budgets):
        if budget < floor:
            continue
        try:
            choice = solver(replace(problem, limits=(Limit("front", units, budget),)))
        except UserError:  # an engine's limits leave nothing there
            continue
        of_weights, of_caches = (total_bits(choice, side) for side, _ in (weights, caches))
        size = -(-(of_weights + of_caches + other_bits) // 8)
        points[size] = TotalPoint(size, of_weights / weights[1], of_caches / caches[1], total_damage(choice))
    return list(points.values())


def knees(sizes: Sequence[float], damages: Sequence[float]) -> list[int]:
    """Return the indices of a front's knees: where more memory begins to buy less.

    A point is one if it lies furthest below the chord between the ends, or between two other knees and ends by more than KNEE of the range, in
    (memory, log damage) scaled to 1 (Satopaa et al. 2011, "Finding a Kneedle in a Haystack"). Damage falls by a steady factor a bit,
    so that the log is what bends. Points that a smaller one beats are passed over.

    Args:
        sizes: ascending.
    """
    inside: list[int] = []
    for i, damage in enumerate(damages):
        if damage > 0 and (not inside or (damage < damages[inside[-1]] and sizes[i] > sizes[inside[-1]])):
            inside.append(i)
    if len(inside) < 3:
        return []
    x = [sizes[i] for i in inside]
    y = [math.log(damages[i]) for i in inside]
    if x[-1] <= x[0] or max(y) <= min(y):
        return []
    x, y = [(v - x[0]) / (x[-1] - x[0]) for v in x], [(v - min(y)) / (max(y) - min(y)) for v in y]
    found: list[int] = []
    _knees_between(x, y, 0, len(x) - 1, found)
    return [inside[i] for i in sorted(found)]


def _knees_between(x: Sequence[float], y: Sequence[float], first: int, last: int, found: list[int]) -> None:
    if last - first < 2:
        return
    slope = (y[last] - y[first]) / (x[last] - x[first])
    depth, at = max((y[first] + slope * (x[i] - x[first]) - y[i], i) for i in range(first + 1, last))
    if depth > KNEE:
        found.append(at)
        _knees_between(x, y, first, at, found)
        _knees_between(x, y, at, last, found)


def around(bits: float) -> list[float]:
    """Budgets around a chosen one, half a bit apart nearby and wider further out."""
    steps = (-1.5, -1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
    return [round(bits + s, 4) for s in steps if bits + s > 1]
