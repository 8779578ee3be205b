"""Answer `--max-kl`: find the budgets whose recipe measures within a damage."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoq.api.applying import assignment_of
from autoq.api.correcting import Prices
from autoq.api.plan import Plan
from autoq.api.profiling import Profiled
from autoq.budget import BITS_TOLERANCE, Budget
from autoq.errors import UserError
from autoq.measure.divergence import Divergence, Yardstick
from autoq.model.quantized import DecodedWeights
from autoq.report.progress import Clock
from autoq.search.engine import solve_for_engine
from autoq.search.problem import Option, Problem
from autoq.search.smallest import smallest_within
from autoq.search.solver import total_bits

ROUNDS = 8  # recipes measured
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
    """Return the plan with the smallest budgets whose exact solution measures at most `max_kl`, by a standard error.

    Budgets are found on the trials' text, and the result is looked at once on the yardstick's: where it is above the damage there,
    the next smaller damage is asked for. Raises UserError where no recipe is within the damage.
    """
    plan, limit = done.plan, done.plan.config.max_kl
    assert limit is not None
    assert done.trial_ids is not None
    problem, units = plan.problem(prices.table), frozenset().union(*(side for side, _ in plan.sides().values()))
    trials = Yardstick(done.model, plan.units, done.trial_ids)
    decoded = DecodedWeights.beside(done.model)
    bracket, target, best = Bracket(), limit, None
    with clock.stage("shrink", "finding the smallest recipe") as progress:
        for i in range(ROUNDS):
            progress(i, ROUNDS)
            choice = _smallest(problem, units, target, plan)
            kl = _upper(trials.measure(assignment_of(plan.units, choice, done.profile.calibration), decoded=decoded))
            if kl <= limit:
                kl = max(
                    kl, _upper(yardstick.measure(assignment_of(plan.units, choice, done.profile.calibration), decoded=decoded))
                )
            if kl <= limit and (best is None or total_bits(choice, units) <= total_bits(best, units)):
                best = choice
            wish = bracket.next(target, kl, limit)
            if wish is None or wish == target:
                break
            target = wish
        progress(ROUNDS, ROUNDS)
    if best is None:
        raise UserError(
            f"--max-kl {limit:g}: no recipe of this space measured within it in {ROUNDS} tries; allow more, or add formats"
        )
    return with_budgets(plan, best)


def _smallest(problem: Problem, units: frozenset[str], target: float, plan: Plan) -> dict[str, Option]:
    return smallest_within(problem, units, target, lambda p: solve_for_engine(p, plan.units, plan.engine))


def _upper(found: Divergence) -> float:
    """Mean KL and its standard error: what a recipe is taken to cost."""
    return found.mean_kl + found.stderr


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
