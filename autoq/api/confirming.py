"""Measure the recipes that are left on text that nothing was chosen on, and say which one is the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoq.allocation.baselines import Uniform, fair_uniforms
from autoq.allocation.problem import Option, Problem, choice_of
from autoq.allocation.solver import total_damage
from autoq.api.applying import assignment_of
from autoq.api.plan import Plan
from autoq.api.profiling import Profiled
from autoq.display.progress import Clock
from autoq.measure.divergence import Divergence, Yardstick
from autoq.measure.estimate import DamageTable

MOST_UNIFORMS = 5  # uniform recipes measured beside a result, the most promising ones; after trials on one side every one
SOLUTION = "exact solution"


@dataclass(frozen=True)
class UniformResult:
    """A uniform recipe and what it measured."""

    uniform: Uniform
    divergence: Divergence


@dataclass(frozen=True)
class Candidate:
    """A recipe that was measured on the untouched text.

    Attributes:
        label: "exact solution", "trial 17", "uniform nvfp4".
    """

    label: str
    choice: dict[str, Option]
    divergence: Divergence


@dataclass(frozen=True)
class Confirmed:
    """The measured candidates, the exact solution first, and the uniform recipes among them once more."""

    candidates: tuple[Candidate, ...]
    uniforms: tuple[UniformResult, ...]

    @property
    def best(self) -> Candidate:
        """The candidate with the least mean KL; the exact solution where nothing is below it."""
        return min(self.candidates, key=lambda c: c.divergence.mean_kl)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each candidate: its KL, and how much more than the best one's, paired by window, with its error."""
        found = []
        for candidate in self.candidates:
            difference, error = candidate.divergence.minus(self.best.divergence)
            found.append(
                {
                    "recipe": candidate.label, "predicted_kl": total_damage(candidate.choice), "measured_kl": candidate.divergence.mean_kl,
                    "measured_kl_stderr": candidate.divergence.stderr, "more_than_best": difference, "stderr": error,
                    "is_best": candidate is self.best,
                }
            )  # fmt: skip
        return found


def confirm(
    done: Profiled,
    problem: Problem,
    table: DamageTable,
    recipes: Mapping[str, dict[str, Option]],
    yardstick: Yardstick,
    clock: Clock,
) -> Confirmed:
    """Measure the recipes and every promising uniform one of no more bits on the yardstick's text.

    Args:
        recipes: label -> recipe, the exact solution first.
    """
    plan, calibration = done.plan, done.profile.calibration
    candidates: list[Candidate] = []
    name = "measuring the recipe" if len(recipes) == 1 else "confirming the best recipes"
    with clock.stage("measure", name) as progress:
        for i, (label, choice) in enumerate(recipes.items()):
            if len(recipes) == 1:
                found = yardstick.measure(assignment_of(plan.units, choice, calibration), progress)
            else:
                progress(i, len(recipes))
                found = yardstick.measure(assignment_of(plan.units, choice, calibration))
            candidates.append(Candidate(label, choice, found))
        progress(len(recipes), len(recipes))
    uniforms = _measure_uniforms(plan, done, table, yardstick, clock)
    candidates += [Candidate(f"uniform {r.uniform.name}", choice_of(problem, r.uniform.formats), r.divergence) for r in uniforms]
    return Confirmed(tuple(candidates), uniforms)


def _measure_uniforms(
    plan: Plan, done: Profiled, table: DamageTable, yardstick: Yardstick, clock: Clock
) -> tuple[UniformResult, ...]:
    most = None if plan.config.trials and len(plan.sides()) == 1 else MOST_UNIFORMS  # of two sides there are some hundred pairs
    chosen = fair_uniforms(plan.units, plan.candidates, table, done.profile.calibration, plan.budgets, plan.engine, most)
    found = []
    with clock.stage("measure", "measuring uniform formats") as progress:
        for i, uniform in enumerate(chosen):
            progress(i, len(chosen))
            found.append(UniformResult(uniform, yardstick.measure(uniform.assignment)))
        progress(len(chosen), len(chosen))
    return tuple(sorted(found, key=lambda r: (r.divergence.mean_kl, r.uniform.name)))
