"""The front: the least predicted damage at every budget, from one profile."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoq.errors import UserError
from autoq.search.exchange import Solver
from autoq.search.problem import Limit, Problem
from autoq.search.solver import solve, total_bits, total_damage


@dataclass(frozen=True)
class FrontPoint:
    """Effective bits that the best recipe within a budget stores, and its predicted KL in nats per token."""

    bits: float
    predicted_kl: float
    formats: dict[str, int]


def sweep(problem: Problem, units: frozenset[str], values: int, budgets: list[float], solver: Solver = solve) -> list[FrontPoint]:
    """Solve one side of the problem (the weights, or the caches) at each budget in bits per value; unreachable ones are left out."""
    options = {u: o for u, o in problem.options.items() if u in units}
    floor = sum(min(o.bits for o in found) for found in options.values())
    points: dict[float, FrontPoint] = {}
    for budget in sorted(budgets):
        limit = Limit("front", units, int((budget + 0.001) * values))
        if limit.bits < floor:
            continue
        try:
            choice = solver(replace(problem, options=options, limits=(limit,)))
        except UserError:  # an engine's limits leave nothing there
            continue
        bits = total_bits(choice, units) / values
        formats: dict[str, int] = {}
        for option in choice.values():
            formats[option.format] = formats.get(option.format, 0) + 1
        points[bits] = FrontPoint(bits, total_damage(choice), dict(sorted(formats.items())))
    return list(points.values())


def around(bits: float) -> list[float]:
    """Budgets around a chosen one, half a bit apart nearby and wider further out."""
    steps = (-1.5, -1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
    return [round(bits + s, 4) for s in steps if bits + s > 1]
