"""What a little more memory would save: the exchange rate between bytes and nats, on each side of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autoq.allocation.problem import Limit, Option, Problem
from autoq.allocation.solver import solve, total_bits, total_damage

Solver = Callable[[Problem], dict[str, Option]]
STEP = 0.02  # of what a side takes now; single formats are steps of some percent


@dataclass(frozen=True)
class Exchange:
    """One side of a recipe.

    Attributes:
        bytes: what it takes. more: bytes offered on top. saved: nats of predicted KL that these would save.
    """

    bytes: int
    more: int
    saved: float

    @property
    def nats_per_gib(self) -> float:
        """Nats that a GiB would save at this rate."""
        return self.saved / self.more * 2**30 if self.more else 0.0


def exchange(problem: Problem, choice: dict[str, Option], units: frozenset[str], solver: Solver = solve) -> Exchange:
    """Return what the units of one side (the weights, or the caches) would gain from STEP more bits, or one unit's step if that is more.

    `solver` keeps what else the solution has to keep (an engine's limits). Both solutions are of that side alone, so that a side bound by a limit of its own can be compared with one that is not.
    """
    options = {u: o for u, o in problem.options.items() if u in units}
    now = total_bits(choice, units)
    steps = [
        o.bits - choice[u].bits
        for u, found in options.items()
        for o in found
        if o.bits > choice[u].bits and o.damage < choice[u].damage
    ]
    more = max(1, int(now * STEP), min(steps, default=0))  # what buys nothing for any unit says nothing

    def best(bits: int) -> float:
        return total_damage(solver(replace(problem, options=options, limits=(Limit("exchange", units, bits),))))

    return Exchange(-(-now // 8), more // 8, max(0.0, best(now) - best(now + more)))
