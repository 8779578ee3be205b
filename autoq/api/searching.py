"""Search a recipe: profile, correct, solve, try, confirm, write."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoq import recipe as recipes
from autoq.api.confirming import SOLUTION, Confirmed, UniformResult, confirm
from autoq.api.correcting import price
from autoq.api.fronts import point_json
from autoq.api.plan import Plan, make_plan
from autoq.api.profiling import Profiled, profile_plan
from autoq.api.recording import make_recipe
from autoq.api.shrinking import within_damage
from autoq.api.trialling import TrialsReport, check_trials, run_trials
from autoq.config import SearchConfig
from autoq.errors import UserError
from autoq.measure.divergence import Divergence, Yardstick
from autoq.measure.estimate import TRUSTED_KL, DamageTable, disagreeing_cells, predict
from autoq.report.progress import Clock, Reporter, Silent
from autoq.run_folder import RECIPE, RESULT
from autoq.search.engine import solve_for_engine
from autoq.search.exchange import Exchange, Solver, exchange
from autoq.search.front import FrontPoint, around, sweep
from autoq.search.problem import Option, Problem
from autoq.search.solver import solve, total_bits, total_damage

if TYPE_CHECKING:
    from autoq.api.validating import Validation


@dataclass(frozen=True)
class SearchResult:
    """A recipe, what was measured, and the front around it.

    Attributes:
        exchanges: with a budget for everything: what more memory for "weights" and "cache" would save. free_kl: what was
            predicted without the engine's limits on mixing, or None where there are none. confirmed: everything that was measured on
            the untouched text. trials: what came of them, or None. weak_cells: cells that were measured alone.
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
    confirmed: Confirmed | None = None
    trials: TrialsReport | None = None
    weak_cells: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the object that `autoq search --json` prints."""
        totals, predicted = self.recipe.totals, self.recipe.predicted
        return {
            "recipe": str(self.recipe_path),
            "bits": totals.bits,
            "bits_whole_model": totals.bits_whole_model,
            "kv_bits": totals.kv_bits,
            "predicted_kl": predicted.kl if predicted else None,
            "predicted_kl_stderr": predicted.stderr if predicted else None,
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
            "chosen": self.confirmed.best.label if self.confirmed else SOLUTION,
            "confirmed": self.confirmed.rows() if self.confirmed else [],
            "trials": None if self.trials is None else self.trials.to_json(),
            "weak_cells": self.weak_cells,
            "validation": None if self.validation is None else self.validation.to_json(),
        }


def search(config: SearchConfig, reporter: Reporter | None = None) -> SearchResult:
    """Take a model to a measured recipe: profile, correct, solve, try recipes nearby, confirm, write; check it on packed bytes if asked.

    The recipe is the one with the least measured KL on text that nothing was chosen on, of the exact solution, the best trials and the
    uniform formats of no more bits. Raises UserError for what the user can mend, AutoqError for the rest.
    """
    clock = Clock(reporter or Silent())
    with clock.stage("prepare", "reading the model's shapes"):
        plan = make_plan(config)
        if config.trials:
            check_trials(plan)
    done = profile_plan(plan, clock)
    profile, units = done.profile, plan.units
    with clock.stage("measure", "measuring the original") as progress:
        yardstick = Yardstick(done.model, units, done.eval_ids)
        floor = yardstick.noise_floor()
        progress(1, 1)
    prices = price(done, floor, clock)
    if config.max_kl is not None:
        plan = within_damage(done, prices, yardstick, clock)
        again = price(replace(done, plan=plan), floor, clock)  # now that it is known how few bits, weak cells may be wanted
        if again.cells:
            prices, plan = again, within_damage(done, again, yardstick, clock)
        done = replace(done, plan=plan)
    with clock.stage("solve", "solving") as progress:
        problem = plan.problem(prices.table)
        choice = solve_for_engine(problem, units, plan.engine)
        free = choice if plan.engine.mixing == "free" else solve(problem)
        progress(1, 1)
    candidates = {SOLUTION: choice}
    trials = None
    if config.trials:
        trials = run_trials(done, prices.table, clock)
        candidates |= trials.finalists
    confirmed = confirm(done, problem, prices.table, candidates, yardstick, clock)
    choice, divergence = confirmed.best.choice, confirmed.best.divergence
    prediction = predict(profile, units, {u: o.format for u, o in choice.items()}, factors=prices.factors, cells=prices.cells)
    front, kv_front = _fronts(plan, problem, choice)
    exchanges = _exchanges(plan, problem, choice) if plan.budgets.memory else {}
    recipe = make_recipe(done, choice, prices.table, prediction, divergence, floor, confirmed, trials)
    path = done.run.path / RECIPE
    if kept := keep_other_budget(path, recipe):
        clock.reporter.say(f"the recipe for {kept[1]} that was here is kept as {kept[0]}")
    recipe.write(path)
    warnings = _warnings(done, confirmed, prices.table)
    if config.max_kl is not None and divergence.mean_kl > config.max_kl:
        warnings = (f"the recipe measured {divergence.mean_kl:.4g} nats, above --max-kl {config.max_kl:g}: ask for less", *warnings)
    validation = None
    if config.validate:
        from autoq.api.validating import validate_on

        validation = validate_on(yardstick, recipe, path, config.validate, config.seed, clock)
        recipe = validation.recipe
    return SearchResult(
        recipe, path, done.run.path, units.coverage(), divergence, floor, confirmed.uniforms, front, kv_front, clock.seconds, warnings,
        config.options(), validation, exchanges, None if plan.engine.mixing == "free" else total_damage(free), confirmed, trials,
        prices.measured,
    )  # fmt: skip


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


def _fronts(plan: Plan, problem: Problem, choice: dict[str, Option]) -> tuple[tuple[FrontPoint, ...], tuple[FrontPoint, ...]]:
    sides = plan.sides()

    def side(name: str) -> tuple[FrontPoint, ...]:
        if name not in sides:
            return ()
        names, values = sides[name]
        return tuple(sweep(problem, names, values, around(total_bits(choice, names) / max(1, values)), _solver(plan, name)))

    return side("weights"), side("cache")


def _exchanges(plan: Plan, problem: Problem, choice: dict[str, Option]) -> dict[str, Exchange]:
    return {name: exchange(problem, choice, names, _solver(plan, name)) for name, (names, _) in plan.sides().items()}


def _solver(plan: Plan, side: str) -> Solver:
    """Return what solves one side within the engine's limits, which are about caches."""
    return solve if side == "weights" else lambda problem: solve_for_engine(problem, plan.units, plan.engine)


def _warnings(done: Profiled, confirmed: Confirmed, table: DamageTable) -> tuple[str, ...]:
    found, choice = [], confirmed.best.choice
    if confirmed.best.label.startswith("uniform "):
        difference, error = confirmed.candidates[0].divergence.minus(confirmed.best.divergence)
        found.append(
            f"{confirmed.best.label} is the result: it measured {difference:.4f} nats (error {error:.4f}) less than the search's own "
            "recipe; profile more samples"
        )
    if heavy := done.profile.heavy_sequences():
        found.append(
            f"sequences {', '.join(map(str, heavy))} carry most of the predicted damage: "
            "profile more samples, or look at their text"
        )
    low = [u for u, o in choice.items() if table.get(u, {}).get(o.format, 0.0) > TRUSTED_KL]
    if low:
        found.append(f"{len(low)} units are predicted above {TRUSTED_KL} nats, outside the trusted range: read the measured figure")
    cells = disagreeing_cells(done.profile, done.plan.units)
    chosen_cells = [c for c in cells if choice[c[0]].format == c[1]]
    if chosen_cells:
        unit, fmt, ratio = chosen_cells[0]
        found.append(
            f"{len(chosen_cells)} chosen cells have a plain mean far from the steady estimate (most: {unit} {fmt}, {ratio:.2g} x): more samples would tell"
        )
    return tuple(found)
