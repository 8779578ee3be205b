"""Search a recipe: profile, correct, solve, try, confirm, write."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autoq import recipe as recipes
from autoq.allocation.engine import solve_for_engine
from autoq.allocation.exchange import Exchange, Solver, exchange
from autoq.allocation.front import FrontPoint, around, sweep
from autoq.allocation.problem import Option, Problem
from autoq.allocation.solver import solve, total_bits, total_damage
from autoq.api.confirming import SOLUTION, Confirmed, UniformResult, confirm
from autoq.api.correcting import Prices, price
from autoq.api.fronts import FrontResult, point_json, predicted_fronts
from autoq.api.plan import Plan, make_plan
from autoq.api.pricing import cache_by_context
from autoq.api.profiling import Profiled, profile_plan
from autoq.api.recipe import Recipe
from autoq.api.recording import make_recipe
from autoq.api.reporting import report
from autoq.api.shrinking import within_damage
from autoq.api.tradeoffs import measure_front
from autoq.api.trialling import TrialsReport, check_trials, run_trials
from autoq.config import SearchConfig
from autoq.display.findings import Findings
from autoq.display.html import search_html
from autoq.display.progress import Clock, Reporter, Silent
from autoq.display.words import answer
from autoq.errors import UserError, python_words
from autoq.kinds import check_kind
from autoq.measure.divergence import Divergence, Yardstick
from autoq.measure.estimate import TRUSTED_KL, DamageTable, disagreeing_cells
from autoq.measure.profile import Profile
from autoq.model.given import Given, borrowed
from autoq.run_folder import RECIPE, RESULT, write_atomically
from autoq.urls import without_password

if TYPE_CHECKING:
    from autoq.api.validating import Validation


@dataclass(frozen=True, repr=False)
class SearchResult:
    """A recipe, what was measured, and the front around it.

    Attributes:
        recipe: the one that measured least.
        recipe_path: its file.
        run: the run folder.
        plan: the model's units, the candidate formats, the options and budgets.
        profile: the samples behind the prediction.
        prices: the corrected damage of every unit and format, in nats per token.
        divergence: what the recipe measured, token by token.
        noise_floor: KL of a change that means nothing.
        confirmed: everything that was measured on the untouched text.
        weight_front: the least predicted damage around the chosen bits per weight.
        kv_front: the same of the cache.
        seconds: by stage.
        warnings: in words.
        exchanges: with a budget for everything, what more memory for "weights" and "cache" would save.
        free_kl: what was predicted without the engine's limits on mixing, or None where there are none.
        trials: what came of them, or None.
        validation: on packed bytes, or None.
    """

    recipe: Recipe
    recipe_path: Path
    run: Path
    plan: Plan
    profile: Profile
    prices: Prices
    divergence: Divergence
    noise_floor: float
    confirmed: Confirmed
    weight_front: tuple[FrontPoint, ...]
    kv_front: tuple[FrontPoint, ...]
    seconds: dict[str, float]
    warnings: tuple[str, ...]
    exchanges: dict[str, Exchange] = field(default_factory=dict)
    free_kl: float | None = None
    trials: TrialsReport | None = None
    validation: Validation | None = None

    @property
    def uniforms(self) -> tuple[UniformResult, ...]:
        """The uniform recipes that were measured beside the result."""
        return self.confirmed.uniforms

    @property
    def options(self) -> str:
        """The command-line options that make the same profile again."""
        return self.plan.config.options()

    @property
    def findings(self) -> Findings:
        """The recipe and every figure, as `load_run` reads them again from the run folder."""
        facts = self.to_json() | {"damage": self.prices.table}
        return Findings(self.recipe, facts, self.run, self.plan.config.storage)

    def front(
        self, budgets: Sequence[float] | None = None, measure: Sequence[float] = (), measure_kv: Sequence[float] = ()
    ) -> FrontResult:
        """Return the least predicted damage at every budget, and measure recipes where asked.

        Args:
            budgets: bits per value to solve each side at.
            measure: bits per weight at which to measure a recipe.
            measure_kv: bits per cached value at which to measure one.
        """
        with python_words():
            for name, given in (("budgets", budgets), ("measure", measure), ("measure_kv", measure_kv)):
                check_kind(name, given, None)
            if measure or measure_kv:
                return measure_front(self.run, budgets, measure, measure_kv, given=self.plan.given)
            plan, engine, totals = self.plan, self.plan.engine, self.recipe.totals
            found = predicted_fronts(
                self.run, plan.units, plan.candidates, self.prices.table, plan.budgets.context, budgets, plan.budgets.batch,
                lambda problem: solve_for_engine(problem, plan.units, engine), self.prices.predictor(self.profile, plan.units).error,
            )  # fmt: skip
            return replace(found, chosen=(totals.bits, totals.kv_bits))

    def report(self, out: Path | str | None = None) -> Path:
        """Write the report, one HTML file, and return where: by default report.html in the run folder."""
        return report(self.findings, out)

    def __repr__(self) -> str:
        return f"<SearchResult {answer(self.recipe, self.to_json())} In {self.run}>"

    def _repr_html_(self) -> str:
        return search_html(self.findings)

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
            "front": [point_json(p) for p in self.weight_front],
            "kv_front": [point_json(p) for p in self.kv_front],
            "run": str(self.run),
            "asked": asked_json(self.plan.config),
            "coverage": self.plan.units.coverage(),
            "notes": list(self.plan.notes),
            "context": cache_by_context(self.plan, self.recipe),
            "warnings": list(self.warnings),
            "total_bytes": totals.weight_bytes + totals.kv_bytes,
            "exchange": {k: {**asdict(e), "nats_per_gib": e.nats_per_gib} for k, e in self.exchanges.items()},
            "predicted_kl_without_engine": self.free_kl,
            "chosen": self.confirmed.best.label,
            "confirmed": self.confirmed.rows(),
            "trials": None if self.trials is None else self.trials.to_json(),
            "weak_cells": self.prices.measured,
            "validation": None if self.validation is None else self.validation.to_json(),
        }


def search(config: SearchConfig, reporter: Reporter | None = None, given: Given | None = None) -> SearchResult:
    """Take a model to a measured recipe: profile, correct, solve, try recipes nearby, confirm, write; check it on packed bytes if asked.

    Args:
        given: what is in memory already; a given model is as before afterwards.

    The recipe is the one with the least measured KL on text that nothing was chosen on, of the exact solution, the best trials and the
    uniform formats of no more bits. Raises UserError for what the user can mend, AutoqError for the rest.
    """
    given = given or Given()
    with borrowed(given.model):
        return _search(config, Clock(reporter or Silent()), given)


def _search(config: SearchConfig, clock: Clock, given: Given) -> SearchResult:
    with clock.stage("prepare", "reading the model's shapes"):
        plan = make_plan(config, given=given)
        if config.trials:
            check_trials(plan)
        if config.validate:
            from autoq.kernels.launch import tile

            tile(torch.device(plan.config.device))  # raises where no kernel can run, before hours of work
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
    predictor = prices.predictor(profile, units)
    prediction = predictor({u: o.format for u, o in choice.items()})
    front, kv_front = _fronts(plan, problem, choice, predictor.error)
    exchanges = _exchanges(plan, problem, choice) if plan.budgets.memory else {}
    recipe = make_recipe(done, choice, prices.table, prediction, divergence, floor, confirmed, trials)
    path = done.run.path / RECIPE
    if kept := keep_other_budget(path, recipe):
        clock.reporter.say(f"the recipe for {kept[1]} that was here is kept as {kept[0]}")
    recipe.write(path)
    recipe = Recipe.of(recipe, path)
    warnings = _warnings(done, confirmed, prices.table)
    if config.max_kl is not None and divergence.mean_kl > config.max_kl:
        warnings = (f"the recipe measured {divergence.mean_kl:.4g} nats, above --max-kl {config.max_kl:g}: ask for less", *warnings)
    result = SearchResult(
        recipe, path, done.run.path, plan, profile, prices, divergence, floor, confirmed, front, kv_front, clock.seconds, warnings,
        exchanges, None if plan.engine.mixing == "free" else total_damage(free), trials,
    )  # fmt: skip
    _write(result)
    if config.validate:
        from autoq.api.validating import validate_on

        validation = validate_on(yardstick, recipe, path, config.validate, config.seed, clock)
        result = replace(result, recipe=validation.recipe, validation=validation)
        _write(result)
    return result


def _write(result: SearchResult) -> None:
    """Put the figures beside the recipe."""
    write_atomically(result.run / RESULT, json.dumps(result.findings.facts, indent=1) + "\n")


def asked_json(config: SearchConfig) -> dict[str, Any]:
    """Return the options of a search that are not the defaults, without passwords."""
    defaults = asdict(SearchConfig())
    found = {name: value for name, value in asdict(config).items() if value != defaults[name] or name == "model"}
    return {k: without_password(str(v)) if k in ("storage", "run") else v for k, v in found.items()}


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


def _fronts(
    plan: Plan, problem: Problem, choice: dict[str, Option], error: Callable[[dict[str, str]], float]
) -> tuple[tuple[FrontPoint, ...], tuple[FrontPoint, ...]]:
    sides = plan.sides()

    def side(name: str) -> tuple[FrontPoint, ...]:
        if name not in sides:
            return ()
        names, values = sides[name]
        return tuple(sweep(problem, names, values, around(total_bits(choice, names) / max(1, values)), _solver(plan, name), error))

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
