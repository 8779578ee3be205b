"""Write down what a search chose and measured, and where it came from."""

from __future__ import annotations

import math
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoq import __version__
from autoq import recipe as recipes
from autoq.api.confirming import Confirmed, UniformResult
from autoq.api.plan import Plan
from autoq.api.profiling import Profiled
from autoq.cost.bits import weight_cost
from autoq.cost.kv_memory import cache_bits, cache_values, kv_cost
from autoq.formats.calibration import Calibration
from autoq.formats.catalog import kv_format, weight_format
from autoq.measure.divergence import Divergence
from autoq.measure.estimate import DamageTable, Prediction
from autoq.model.text import STDLIB
from autoq.recipe_formats import describe, encode_mean
from autoq.search.problem import Option
from autoq.urls import without_password

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
) -> recipes.Recipe:
    """Return the recipe of a choice unit -> option, with what was predicted, what was measured, and its provenance."""
    plan, units, calibration = done.plan, done.plan.units, done.profile.calibration
    used = {fmt: weight_format(fmt) for fmt in sorted({choice[u.name].format for u in units.weights})}
    kv_used = {fmt: kv_format(fmt) for fmt in sorted({choice[u.name].format for u in units.caches})}
    kv_written = {one.name: one for fmt in kv_used.values() for one in fmt.chain}
    cost = weight_cost(units, {u.name: used[choice[u.name].format] for u in units.weights})
    budgets = plan.budgets
    tokens, batch = budgets.tokens, budgets.batch
    kv_bits, kv_values = kv_cost(units, {u.name: kv_used[choice[u.name].format] for u in units.caches}, tokens, batch)

    def damage(unit: str) -> float:
        return six_digits(table.get(unit, {}).get(choice[unit].format, 0.0))

    weights = {
        u.name: recipes.WeightEntry(
            format=choice[u.name].format, role=u.role, layer=u.layer, bits=six_digits(choice[u.name].bits / u.numel),
            numel=u.numel, predicted_kl=damage(u.name), tensors=tuple(t.name for t in u.tensors),
        )
        for u in units.weights
    }  # fmt: skip
    layers: dict[str, dict[str, Any]] = {}
    for u in units.caches:
        entry = layers.setdefault(u.module, {"layer": u.layer, "module": u.module, "values_per_token": u.numel})
        bits = cache_bits(u, kv_used[choice[u.name].format], tokens, batch) / cache_values(u, tokens, batch)
        entry[u.kind] = _cache_entry(choice[u.name].format, bits, damage(u.name), calibration[u.name])
    return recipes.Recipe(
        schema_version=1,
        model=recipes.ModelEntry(
            id=plan.config.model, fingerprint=done.profile.fingerprint.model,
            architecture=type(done.model).__name__, parameters=units.parameters,
        ),
        budget=recipes.BudgetEntry(
            weights=budgets.weights.text if budgets.weights else None, kv=budgets.kv.text if budgets.kv else None,
            memory=budgets.memory.text if budgets.memory else None, context=budgets.context, batch=batch,
            engine=plan.engine.name, target=plan.config.target, max_kl=plan.config.max_kl,
        ),
        totals=recipes.TotalsEntry(
            bits=cost.effective, bits_whole_model=cost.whole_model, kv_bits=kv_bits / max(1, kv_values),
            weight_bytes=-(-cost.whole_bits // 8), kv_bytes=-(-kv_bits // 8),
        ),
        predicted=recipes.PredictedEntry(kl=six_digits(prediction.kl), stderr=six_digits(prediction.stderr) if math.isfinite(prediction.stderr) else None, estimator="steady, corrected" if plan.config.correct else "steady"),
        measured=recipes.MeasuredEntry(
            kl=six_digits(divergence.mean_kl), kl_stderr=six_digits(divergence.stderr),
            kl_percentiles={k: six_digits(v) for k, v in divergence.percentiles().items()},
            top1_agreement=six_digits(divergence.top1_agreement), perplexity=six_digits(divergence.perplexity),
            perplexity_original=six_digits(divergence.perplexity_original),
            perplexity_ratio_stderr=six_digits(divergence.perplexity_ratio_stderr), noise_floor=six_digits(floor),
            windows=len(done.eval_ids), tokens_per_window=done.eval_ids.shape[1],
            text=plan.config.eval or plan.config.calib or STDLIB,
            uniform=tuple(_uniform_entry(r, divergence) for r in confirmed.uniforms), chosen=confirmed.best.label,
            trials=None if trials is None else _trials_entry(confirmed, trials),
        ),
        formats={name: describe(f) for name, f in used.items()},
        kv_formats={name: describe(f) for name, f in kv_written.items()},
        weights=weights,
        kv=tuple(recipes.KVEntry(**entry) for entry in layers.values()),
        left_out={entry.reason: entry.numel for entry in units.left_out},
        provenance=_provenance(plan, done),
    )  # fmt: skip


def _cache_entry(name: str, bits: float, damage: float, known: Calibration) -> recipes.CacheEntry:
    chain = kv_format(name).chain
    is_centred, is_rotated = any(f.center for f in chain), any(f.rotate for f in chain)
    return recipes.CacheEntry(
        format=name, bits=six_digits(bits), predicted_kl=damage, absmax=six_digits(known.absmax),
        absmax_centered=six_digits(known.centered) if is_centred else None,
        absmax_rotated=six_digits(known.rotated) if is_rotated else None,
        mean=encode_mean(known.mean) if is_centred else None,
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


def _provenance(plan: Plan, done: Profiled) -> recipes.ProvenanceEntry:
    packages = ("autoq", "torch", "transformers", "scipy")
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = __version__ if name == "autoq" else "?"
    arguments = [without_password(a) for a in sys.argv[1:] if a]
    return recipes.ProvenanceEntry(
        command="autoq " + " ".join(arguments) if Path(sys.argv[0]).name in ("autoq", "__main__.py") else "python API",
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        seed=plan.config.seed, space=plan.config.space, profile_text=plan.config.calib or STDLIB,
        profile_sequences=len(done.ids), profile_tokens=done.ids.shape[1],
        dtype=done.profile.fingerprint.dtype, device=plan.config.device, versions=versions,
    )  # fmt: skip


def six_digits(value: float) -> float:
    """Six significant digits: what a measurement can bear, and what a diff can show."""
    return float(f"{value:.6g}")
