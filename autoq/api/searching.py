"""Search a recipe: profile, correct, solve, measure, write."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoq import recipe as recipes
from autoq.api.applying import assignment_of
from autoq.api.fronts import point_json
from autoq.api.plan import Plan, make_plan
from autoq.api.profiling import Profiled, profile_plan
from autoq.api.recording import UniformResult, make_recipe
from autoq.config import SearchConfig
from autoq.cost.kv_memory import cache_values
from autoq.errors import UserError
from autoq.measure.divergence import Divergence, Yardstick
from autoq.measure.estimate import TRUSTED_KL, DamageTable, correction_factors, damage_table, disagreeing_cells, predict
from autoq.model.quantized import Assignment
from autoq.model.text import cut_again
from autoq.report.progress import Clock, Reporter, Silent
from autoq.run_folder import RECIPE, RESULT
from autoq.search.baselines import fair_uniforms
from autoq.search.corrections import measure_uniform
from autoq.search.engine import solve_for_engine
from autoq.search.exchange import Exchange, Solver, exchange
from autoq.search.front import FrontPoint, around, sweep
from autoq.search.problem import Option, Problem
from autoq.search.solver import solve, total_bits, total_damage

if TYPE_CHECKING:
    from autoq.api.validating import Validation

MOST_UNIFORMS = 5  # uniform recipes measured beside a result


@dataclass(frozen=True)
class SearchResult:
    """A recipe, what was measured, and the front around it.

    Attributes:
        exchanges: with a budget for everything: what more memory for "weights" and "cache" would save. free_kl: what was
            predicted without the engine's limits on mixing, or None where there are none.
    """

    recipe: recipes.Recipe
    recipe_path: Path
    run: Path
    coverage: str
    divergence: Divergence
    noise_floor: float
    uniforms: tuple[UniformResult, ...]
    front: tuple[FrontPoint, ...]
    kv_front: tuple[FrontPoint, ...]
    seconds: dict[str, float]
    warnings: tuple[str, ...]
    options: str
    validation: Validation | None = None
    exchanges: dict[str, Exchange] = field(default_factory=dict)
    free_kl: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the object that `autoq search --json` prints."""
        totals, predicted = self.recipe.totals, self.recipe.predicted
        return {
            "recipe": str(self.recipe_path),
            "bits": totals.bits,
            "bits_whole_model": totals.bits_whole_model,
            "kv_bits": totals.kv_bits,
            "predicted_kl": predicted.kl,
            "predicted_kl_stderr": predicted.stderr,
            "measured_kl": self.divergence.mean_kl,
            "measured_kl_stderr": self.divergence.stderr,
            "perplexity": self.divergence.perplexity,
            "perplexity_original": self.divergence.perplexity_original,
            "top1_agreement": self.divergence.top1_agreement,
            "uniform": [
                {
                    "format": r.uniform.name,
                    "bits": r.uniform.bits,
                    "kv_bits": r.uniform.kv_bits,
                    "measured_kl": r.divergence.mean_kl,
                }
                for r in self.uniforms
            ],
            "seconds": self.seconds,
            "noise_floor": self.noise_floor,
            "front": [point_json(p) for p in self.front],
            "kv_front": [point_json(p) for p in self.kv_front],
            "run": str(self.run),
            "warnings": list(self.warnings),
            "total_bytes": totals.weight_bytes + totals.kv_bytes,
            "exchange": {k: {**asdict(e), "nats_per_gib": e.nats_per_gib} for k, e in self.exchanges.items()},
            "predicted_kl_without_engine": self.free_kl,
            "validation": None if self.validation is None else self.validation.to_json(),
        }


def search(config: SearchConfig, reporter: Reporter | None = None) -> SearchResult:
    """Take a model to a measured recipe: profile, correct, solve, measure, write; then check it on packed bytes if asked to.

    Raises UserError for what the user can mend, AutoqError for the rest.
    """
    clock = Clock(reporter or Silent())
    with clock.stage("prepare", "reading the model's shapes"):
        plan = make_plan(config)
    done = profile_plan(plan, clock)
    profile, units, model = done.profile, plan.units, done.model
    with clock.stage("measure", "measuring the original") as progress:
        yardstick = Yardstick(model, units, done.eval_ids)
        floor = yardstick.noise_floor()
        progress(1, 1)
    if config.correct:
        with clock.stage("correct", "checking uniform formats") as progress:
            _correct(done, progress)
    factors = correction_factors(profile, units, min(config.correct, len(done.ids)), floor) if config.correct else {}
    table = damage_table(profile, units, factors=factors)
    with clock.stage("solve", "solving") as progress:
        problem = plan.problem(table)
        choice = solve_for_engine(problem, units, plan.engine)
        free = choice if plan.engine.mixing == "free" else solve(problem)
        prediction = predict(profile, units, {u: o.format for u, o in choice.items()}, factors=factors)
        front, kv_front = _fronts(plan, problem, choice)
        exchanges = _exchanges(plan, problem, choice) if plan.budgets.memory else {}
        progress(1, 1)
    assignment = assignment_of(units, choice, profile.calibration)
    with clock.stage("measure", "measuring the recipe") as progress:
        divergence = yardstick.measure(assignment, progress)
    uniforms = _measure_uniforms(plan, done, table, yardstick, clock)
    recipe = make_recipe(done, choice, table, prediction, divergence, floor, uniforms)
    path = done.run.path / RECIPE
    if kept := keep_other_budget(path, recipe):
        clock.reporter.say(f"the recipe for {kept[1]} that was here is kept as {kept[0]}")
    recipe.write(path)
    warnings = _warnings(plan, done, divergence, uniforms, choice, table)
    validation = None
    if config.validate:
        from autoq.api.validating import validate_on

        validation = validate_on(yardstick, recipe, path, config.validate, config.seed, clock)
        recipe = validation.recipe
    return SearchResult(
        recipe,
        path,
        done.run.path,
        units.coverage(),
        divergence,
        floor,
        uniforms,
        front,
        kv_front,
        clock.seconds,
        warnings,
        config.options(),
        validation,
        exchanges,
        None if plan.engine.mixing == "free" else total_damage(free),
    )


def keep_other_budget(path: Path, recipe: recipes.Recipe) -> tuple[Path, str] | None:
    """Move a recipe of another budget, and its figures, out of the way; return (where to, its budget), or None."""
    try:
        before = recipes.read_recipe(path).budget
    except UserError:
        return None
    if before == recipe.budget:
        return None
    budget = (
        " and ".join(
            f"{side} {text}" for side, text in (("weights", before.weights), ("kv", before.kv), ("memory", before.memory)) if text
        )
        or "no budget"
    )
    suffix = re.sub(r"[^A-Za-z0-9.]+", "-", budget.replace("weights ", "").replace("%", "percent"))
    kept = path.with_name(f"recipe-{suffix}.yaml")
    names = (f"{suffix}-{i}" for i in itertools.count(2))
    while kept.exists():  # kept for another context, batch, engine or target, or in another round
        suffix = next(names)
        kept = path.with_name(f"recipe-{suffix}.yaml")
    os.replace(path, kept)
    figures = path.with_name(RESULT)
    if figures.is_file():
        os.replace(figures, figures.with_name(f"result-{suffix}.json"))
    return kept, budget


def _correct(done: Profiled, progress: Any) -> None:
    """Measure the uniform formats of the sides that have a budget, where the profile lacks them."""
    plan, profile, units = done.plan, done.profile, done.plan.units
    uniform: dict[str, Assignment] = {}
    for kind, asked, formats in (
        ("weight", plan.budgets.search_weights, plan.candidates.weights),
        ("key", plan.budgets.search_caches, plan.candidates.keys),
        ("value", plan.budgets.search_caches, plan.candidates.values),
    ):
        for fmt in formats if asked else ():
            able = [u.name for u in units.units if u.kind == kind and fmt in plan.candidates.for_unit(u)]
            chosen: Any = dict.fromkeys(able, fmt)
            weights, caches = (chosen, {}) if kind == "weight" else ({}, chosen)
            uniform[f"{kind}/{fmt.name}"] = Assignment(weights, caches, profile.calibration)
    sequences = min(plan.config.correct, len(done.ids))
    windows = cut_again(done.ids[:sequences], done.eval_ids.shape[1], done.bos)
    if measure_uniform(profile, lambda: Yardstick(done.model, units, windows), sequences, windows.shape[1], uniform, progress):
        profile.save(done.run.path)


def _sides(plan: Plan) -> dict[str, tuple[frozenset[str], int]]:
    """Return (units, number of values) of what is searched: "weights", "cache"."""
    units, budgets = plan.units, plan.budgets
    found = {}
    if budgets.search_weights:
        found["weights"] = frozenset(u.name for u in units.weights), units.searched
    if budgets.search_caches:
        values = sum(cache_values(u, budgets.tokens, budgets.batch) for u in units.caches)
        found["cache"] = frozenset(u.name for u in units.caches), values
    return found


def _fronts(plan: Plan, problem: Problem, choice: dict[str, Option]) -> tuple[tuple[FrontPoint, ...], tuple[FrontPoint, ...]]:
    sides = _sides(plan)

    def side(name: str) -> tuple[FrontPoint, ...]:
        if name not in sides:
            return ()
        names, values = sides[name]
        return tuple(sweep(problem, names, values, around(total_bits(choice, names) / max(1, values)), _solver(plan, name)))

    return side("weights"), side("cache")


def _exchanges(plan: Plan, problem: Problem, choice: dict[str, Option]) -> dict[str, Exchange]:
    return {name: exchange(problem, choice, names, _solver(plan, name)) for name, (names, _) in _sides(plan).items()}


def _solver(plan: Plan, side: str) -> Solver:
    """Return what solves one side within the engine's limits, which are about caches."""
    return solve if side == "weights" else lambda problem: solve_for_engine(problem, plan.units, plan.engine)


def _measure_uniforms(
    plan: Plan, done: Profiled, table: DamageTable, yardstick: Yardstick, clock: Clock
) -> tuple[UniformResult, ...]:
    chosen = fair_uniforms(plan.units, plan.candidates, table, done.profile.calibration, plan.budgets, plan.engine, MOST_UNIFORMS)
    found = []
    with clock.stage("measure", "measuring uniform formats") as progress:
        for i, uniform in enumerate(chosen):
            progress(i, len(chosen))
            found.append(UniformResult(uniform, yardstick.measure(uniform.assignment)))
        progress(len(chosen), len(chosen))
    return tuple(sorted(found, key=lambda r: (r.divergence.mean_kl, r.uniform.name)))


def _warnings(
    plan: Plan,
    done: Profiled,
    divergence: Divergence,
    uniforms: tuple[UniformResult, ...],
    choice: dict[str, Option],
    table: DamageTable,
) -> tuple[str, ...]:
    found = []
    for result in uniforms[:1]:
        difference, error = divergence.minus(result.divergence)
        if difference > 0:
            found.append(
                f"uniform {result.uniform.name} measured better than the recipe, by {difference:.4f} nats (error {error:.4f}): "
                "take it instead, or profile more samples"
            )
    if heavy := done.profile.heavy_sequences():
        found.append(
            f"sequences {', '.join(map(str, heavy))} carry most of the predicted damage: "
            "profile more samples, or look at their text"
        )
    low = [u for u, o in choice.items() if table.get(u, {}).get(o.format, 0.0) > TRUSTED_KL]
    if low:
        found.append(f"{len(low)} units are predicted above {TRUSTED_KL} nats, outside the trusted range: read the measured figure")
    cells = disagreeing_cells(done.profile, plan.units)
    chosen_cells = [c for c in cells if choice[c[0]].format == c[1]]
    if chosen_cells:
        unit, fmt, ratio = chosen_cells[0]
        found.append(
            f"{len(chosen_cells)} chosen cells have a plain mean far from the steady estimate (most: {unit} {fmt}, {ratio:.2g} x): more samples would tell"
        )
    return tuple(found)
