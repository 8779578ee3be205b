"""Answer `--max-kl`: find the budgets whose recipe measures within a damage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autoq.allocation.engine import solve_for_engine
from autoq.allocation.problem import Option, Problem
from autoq.allocation.smallest import smallest_within
from autoq.allocation.solver import total_bits
from autoq.api.applying import assignment_of
from autoq.api.correcting import Prices
from autoq.api.plan import Plan
from autoq.api.profiling import Profiled
from autoq.budget import BITS_TOLERANCE, Budget
from autoq.display.progress import Clock
from autoq.errors import UserError
from autoq.measure.divergence import Yardstick
from autoq.model.quantized import Assignment, DecodedWeights

ROUNDS = 8  # recipes measured for one damage
LOOKS = 3  # at the text that the result is measured on
CLOSE = 1.02  # of the damages asked of the prediction, below which the search for it ends


@dataclass
class Bracket:
    """Predicted damages whose recipes measured within the limit (`passed`) and above it."""

    passed: float = 0.0
    failed: float = float("inf")

    def next(self, tried: float, measured: float, limit: float) -> float | None:
        """Take in a measurement and return what to ask of the prediction next, or None where it is close enough."""
        if measured <= limit:
            self.passed = max(self.passed, tried)
        else:
            self.failed = min(self.failed, tried)
        if self.passed and self.failed < CLOSE * self.passed:
            return None
        wish = tried * limit / measured if measured > 0 else 2 * tried
        if not self.passed < wish < self.failed:
            wish = (self.passed * self.failed) ** 0.5 if self.passed and self.failed < float("inf") else wish
        return wish


def within_damage(done: Profiled, prices: Prices, yardstick: Yardstick, clock: Clock) -> Plan:
    """Return the plan with the smallest budgets whose exact solution measures at most `max_kl`.

    The budgets are found on the trials' text, where a recipe counts as its mean KL plus a standard error. The result is then looked at on the
    yardstick's text; where it is above the damage there, it is looked for again within as much less, at most LOOKS times in all.
    Raises UserError where no recipe is within the damage.
    """
    plan, limit = done.plan, done.plan.config.max_kl
    assert limit is not None
    assert done.trial_ids is not None
    problem, units = plan.problem(prices.table), frozenset().union(*(side for side, _ in plan.sides().values()))
    trials = Yardstick(done.model, plan.units, done.trial_ids)
    decoded = DecodedWeights.beside(done.model)
    known: dict[str, float] = {}

    def assignment(choice: dict[str, Option]) -> Assignment:
        return assignment_of(plan.units, choice, done.profile.calibration)

    def upper(choice: dict[str, Option]) -> float:
        """Mean KL and its standard error on the trials' text."""
        key = " ".join(option.format for option in choice.values())
        if key not in known:
            found = trials.measure(assignment(choice), decoded=decoded)
            known[key] = found.mean_kl + found.stderr
        return known[key]

    goal = limit
    with clock.stage("shrink", "finding the smallest recipe") as progress:
        for look in range(LOOKS):
            progress(look, LOOKS)
            best = _bracketed(goal, lambda target: _smallest(problem, units, target, plan), upper, units)
            if best is None:
                raise UserError(f"--max-kl {limit:g}: no recipe of this space measured within it; allow more, or add formats")
            confirmed = yardstick.measure(assignment(best), decoded=decoded).mean_kl
            if confirmed <= limit:
                break
            goal *= 0.98 * limit / confirmed
        progress(LOOKS, LOOKS)
    assert best is not None
    return with_budgets(plan, best)


def _bracketed(
    goal: float, solve: Callable[[float], dict[str, Option]], measured: Callable[[dict[str, Option]], float], units: frozenset[str]
) -> dict[str, Option] | None:
    """Return the smallest recipe found that measures at most `goal`, or None."""
    bracket, target, best = Bracket(), goal, None
    for _ in range(ROUNDS):
        choice = solve(target)
        kl = measured(choice)
        if kl <= goal and (best is None or total_bits(choice, units) <= total_bits(best, units)):
            best = choice
        wish = bracket.next(target, kl, goal)
        if wish is None or wish == target:
            break
        target = wish
    return best


def _smallest(problem: Problem, units: frozenset[str], target: float, plan: Plan) -> dict[str, Option]:
    return smallest_within(problem, units, target, lambda p: solve_for_engine(p, plan.units, plan.engine))


def with_budgets(plan: Plan, choice: dict[str, Option]) -> Plan:
    """Return the plan with the bits that a recipe takes as its budgets, so that everything else is compared at those."""
    asked = {name: total_bits(choice, side) / values for name, (side, values) in plan.sides().items()}
    weights, kv = plan.budgets.weights, plan.budgets.kv
    if "weights" in asked:
        weights = _bits(asked["weights"])
    if "cache" in asked and not plan.budgets.in_bytes:
        kv = _bits(asked["cache"])
    return replace(plan, budgets=replace(plan.budgets, weights=weights, kv=kv))


def _bits(value: float) -> Budget:
    return Budget(f"{value:.4f}bits", value - BITS_TOLERANCE + 1e-9, "bits")
