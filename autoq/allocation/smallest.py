"""The inverse question: the fewest bits whose best recipe stays within a damage."""

from __future__ import annotations

from dataclasses import replace

from autoq.allocation.exchange import Solver
from autoq.allocation.problem import Limit, Option, Problem
from autoq.allocation.solver import solve, total_damage
from autoq.errors import AutoqError, UserError

STEPS = 16  # bisections: to 1/65536 of the range


def smallest_within(problem: Problem, units: frozenset[str], damage: float, solver: Solver = solve) -> dict[str, Option]:
    """Return the exact solution of the smallest budget for `units` whose predicted damage is at most `damage` nats per token.

    The damage of the best recipe falls as the budget grows, so that bisection finds it. The problem's own limits hold too.
    Raises UserError when they allow no recipe within that damage.
    """
    floor = sum(min(o.bits for o in problem.options[u]) for u in units)
    ceiling = sum(max(o.bits for o in problem.options[u]) for u in units)
    best = _solved(problem, units, ceiling, solver)
    if best is None or total_damage(best) > damage:
        least = "" if best is None else f": the least that the other limits allow is {total_damage(best):.3g}"
        raise UserError(f"no recipe is predicted to cost at most {damage:.3g} nats{least}")
    low, high = floor - 1, ceiling
    for _ in range(STEPS):
        if high - low <= 1:
            break
        middle = (low + high) // 2
        found = _solved(problem, units, middle, solver)
        if found is not None and total_damage(found) <= damage:
            high, best = middle, found
        else:
            low = middle
    return best


def _solved(problem: Problem, units: frozenset[str], bits: int, solver: Solver) -> dict[str, Option] | None:
    try:
        return solver(replace(problem, limits=(*problem.limits, Limit("--max-kl", units, bits))))
    except AutoqError:  # nothing is so small
        return None
