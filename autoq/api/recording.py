"""Write down what a search chose and measured, and where it came from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from autoq import recipe as recipes
from autoq.allocation.problem import Option
from autoq.api.confirming import Confirmed, UniformResult
from autoq.api.entries import cache_entries, provenance, totals, weight_entries, written_out
from autoq.api.measuring import measured_entry, six_digits
from autoq.api.profiling import Profiled, measure_text, profile_text
from autoq.api.recipe import Recipe
from autoq.formats.catalog import kv_format, weight_format
from autoq.measure.divergence import Divergence
from autoq.measure.estimate import DamageTable, Prediction

if TYPE_CHECKING:
    from autoq.api.trialling import TrialsReport


def make_recipe(
    done: Profiled,
    choice: dict[str, Option],
    table: DamageTable,
    prediction: Prediction,
    divergence: Divergence,
    floor: float,
    confirmed: Confirmed,
    trials: TrialsReport | None = None,
) -> Recipe:
    """Return the recipe of a choice unit -> option, with what was predicted, what was measured, and its provenance."""
    plan, units = done.plan, done.plan.units
    weights = {u.name: weight_format(choice[u.name].format) for u in units.weights}
    caches = {u.name: kv_format(choice[u.name].format) for u in units.caches}
    budgets = plan.budgets
    tokens, batch = budgets.tokens, budgets.batch

    def damage(unit: str) -> float:
        return six_digits(table.get(unit, {}).get(choice[unit].format, 0.0))

    return Recipe(
        schema_version=1,
        model=recipes.ModelEntry(
            id=plan.config.model, fingerprint=done.profile.fingerprint.model,
            architecture=type(done.model).__name__, parameters=units.parameters,
        ),
        budget=recipes.BudgetEntry(
            weights=budgets.weights.text if budgets.weights else None, kv=budgets.kv.text if budgets.kv else None,
            memory=budgets.memory.text if budgets.memory else None, context=budgets.context, batch=batch,
            engine=plan.config.engine, consumer=plan.config.consumer, target=plan.config.target, max_kl=plan.config.max_kl,
        ),
        totals=totals(units, weights, caches, tokens, batch),
        predicted=recipes.PredictedEntry(kl=six_digits(prediction.kl), stderr=six_digits(prediction.stderr) if math.isfinite(prediction.stderr) else None, estimator="steady, corrected" if plan.config.correct else "steady"),
        measured=measured_entry(
            divergence, floor, measure_text(plan),
            [_uniform_entry(r, divergence) for r in confirmed.uniforms], confirmed.best.label,
            None if trials is None else _trials_entry(confirmed, trials),
        ),
        formats=written_out(weights),
        kv_formats=written_out(caches),
        weights=weight_entries(units, weights, damage),
        kv=cache_entries(units, caches, done.profile.calibration, damage, tokens, batch),
        left_out={entry.reason: entry.numel for entry in units.left_out},
        provenance=provenance(
            plan.config.seed, plan.config.space, profile_text(plan), len(done.ids), done.ids.shape[1],
            done.profile.fingerprint.dtype, plan.config.device,
        ),
    )  # fmt: skip


def _trials_entry(confirmed: Confirmed, trials: TrialsReport) -> recipes.TrialsEntry:
    difference, error = confirmed.best.divergence.minus(confirmed.candidates[0].divergence)
    return recipes.TrialsEntry(
        study=trials.study, measured=trials.measured, windows=trials.windows, recipe_minus_solution=six_digits(difference),
        stderr=six_digits(error),
    )  # fmt: skip


def _uniform_entry(result: UniformResult, divergence: Divergence) -> recipes.UniformEntry:
    difference, error = divergence.minus(result.divergence)
    return recipes.UniformEntry(
        format=result.uniform.name, bits=six_digits(result.uniform.bits), kv_bits=six_digits(result.uniform.kv_bits),
        measured_kl=six_digits(result.divergence.mean_kl), recipe_minus_uniform=six_digits(difference), stderr=six_digits(error),
    )  # fmt: skip
