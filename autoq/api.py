"""The verbs: search, profile, front, show, memory. The command line and notebooks call these and nothing below."""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autoq import __version__
from autoq import recipe as recipes
from autoq.budget import Budget, parse_budget
from autoq.config import SearchConfig
from autoq.cost.bits import weight_cost
from autoq.cost.kv_memory import cache_bits, cache_values, context_of, kv_cost
from autoq.errors import AutoqError, UserError, unknown
from autoq.formats.catalog import KV_FORMATS, kv_format, weight_format
from autoq.formats.format import KVFormat
from autoq.measure.damage import Candidates, weight_refusal
from autoq.measure.divergence import Divergence, Yardstick
from autoq.measure.estimate import DamageTable, Prediction, correction_factors, damage_table, disagreeing_cells, predict
from autoq.measure.profile import Fingerprint, Profile, make_profile, model_fingerprint, text_fingerprint
from autoq.model import load
from autoq.model.quantized import Assignment
from autoq.model.quantized import quantized as apply_assignment
from autoq.model.text import STDLIB, sequences, text_sources
from autoq.model.units import ModelUnits, find_units, uncacheable
from autoq.report.memory import peak_bytes
from autoq.report.progress import Clock, Reporter, Silent
from autoq.run_folder import RECIPE, RunFolder, make_folder, open_run
from autoq.search.baselines import Uniform, fair_uniforms, uniform_caches, uniform_weights
from autoq.search.corrections import measure_uniform
from autoq.search.front import FrontPoint, around, sweep
from autoq.search.problem import Option, Problem, make_problem
from autoq.search.solver import solve, total_bits
from autoq.search.space import load_space

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MOST_UNIFORMS = 6  # uniform recipes measured beside a result


@dataclass(frozen=True)
class Plan:
    """What is known before any weight is read: the model's units and shapes, the candidates, the budgets."""

    config: SearchConfig
    source: load.ModelSource
    model_config: PreTrainedConfig
    units: ModelUnits
    candidates: Candidates
    budget: Budget | None
    kv_budget: Budget | None
    context: int
    run: RunFolder
    notes: tuple[str, ...]

    def problem(self, damage: DamageTable | None = None) -> Problem:
        """Return the allocation problem; raises UserError for a budget that cannot be met."""
        return make_problem(self.units, self.candidates, self.budget, self.kv_budget, self.context, damage)


@dataclass(frozen=True)
class Profiled:
    """A loaded model with its profile."""

    plan: Plan
    model: PreTrainedModel
    ids: torch.Tensor
    eval_ids: torch.Tensor
    profile: Profile
    run: RunFolder
    clock: Clock


@dataclass(frozen=True)
class UniformResult:
    uniform: Uniform
    divergence: Divergence


@dataclass(frozen=True)
class SearchResult:
    """A recipe, what was measured, and the front around it."""

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
            "front": [_point_json(p) for p in self.front],
            "kv_front": [_point_json(p) for p in self.kv_front],
            "run": str(self.run),
            "warnings": list(self.warnings),
        }


def make_plan(config: SearchConfig, budgets_needed: bool = True) -> Plan:
    """Resolve names and refuse what cannot work, before any weight is read.

    Raises UserError for an unknown name, an impossible budget, or a model that is no causal language model.
    """
    for option in ("budget", "kv_budget", "calib", "eval", "space", "model"):
        if getattr(config, option) == "":
            raise UserError(f"--{option.replace('_', '-')} is empty: give a value, or leave the option out")
    if budgets_needed and config.budget is None and config.kv_budget is None:
        raise UserError("give a budget: --budget 4.5bits for the weights, --kv-budget 6bits for the cache, or both")
    budget = parse_budget(config.budget) if config.budget else None
    kv_budget = parse_budget(config.kv_budget, "--kv-budget") if config.kv_budget else None
    if kv_budget is not None and kv_budget.unit != "bits":
        raise UserError(f"--kv-budget {kv_budget.text!r}: give bits per cached value, such as 6bits")
    candidates = load_space(config.space)
    if budget is not None and not candidates.weights:
        raise UserError(f"--budget needs weight formats, but the search space {config.space!r} has none")
    if kv_budget is not None and not (candidates.keys and candidates.values):
        raise UserError(f"--kv-budget needs formats for keys and values, but the search space {config.space!r} lacks them")
    text_sources(config.calib, config.eval)
    load.dtype_name(config.dtype, "cpu")
    device = load.pick_device(config.device)
    source = load.model_source(config.model)
    model_config = load.load_config(source)
    empty = load.empty_model(model_config)
    units, candidates, notes = _searchable(find_units(empty, config.include), empty, candidates, kv_budget is not None)
    if not units.weights:
        raise UserError(f"{config.model!r} has no weight that autoq can quantize")
    text_config = model_config.get_text_config(decoder=True)
    limit = getattr(text_config, "max_position_embeddings", None)
    if limit and config.seq_len > limit:
        raise UserError(f"--seq-len is {config.seq_len}, beyond this model's maximum of {limit} tokens")
    run = open_run(config.run, config.resume, source.short_name)
    context, config = context_of(text_config, config.context), replace(config, device=device)
    plan = Plan(config, source, model_config, units, candidates, budget, kv_budget, context, run, notes)
    plan.problem()
    return plan


def _searchable(
    units: ModelUnits, empty: PreTrainedModel, candidates: Candidates, kv_wanted: bool
) -> tuple[ModelUnits, Candidates, tuple[str, ...]]:
    """Leave out the cache of a model whose keys and values autoq cannot reach, and formats that no head_dim fits.

    Returns (units, candidates, what to say); raises UserError where that is what was asked for.
    """
    if reason := uncacheable(empty):
        if kv_wanted:
            raise UserError(f"--kv-budget: {reason}")
        return (
            replace(units, units=units.weights),
            replace(candidates, keys=(), values=()),
            (f"the KV cache is not profiled: {reason}",),
        )
    notes: list[str] = []

    def fitting(formats: tuple[KVFormat, ...]) -> tuple[KVFormat, ...]:
        kept = []
        for fmt in formats:
            try:
                for unit in units.caches:
                    fmt.for_head_dim(unit.head_dim)
                kept.append(fmt)
            except UserError as error:
                notes.append(str(error))
        return tuple(kept)

    fitted = replace(candidates, keys=fitting(candidates.keys), values=fitting(candidates.values))
    return units, fitted, tuple(dict.fromkeys(notes))


def search(config: SearchConfig, reporter: Reporter | None = None) -> SearchResult:
    """Take a model to a measured recipe: profile, correct, solve, measure, write.

    Raises UserError for what the user can mend, AutoqError for the rest.
    """
    clock = Clock(reporter or Silent())
    with clock.stage("prepare", "reading the model's shapes"):
        plan = make_plan(config)
    done = _profiled(plan, clock)
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
        choice = solve(problem)
        prediction = predict(profile, units, {u: o.format for u, o in choice.items()}, factors=factors)
        front, kv_front = _fronts(plan, problem, choice)
        progress(1, 1)
    assignment = assignment_of(units, choice, profile.absmax)
    with clock.stage("measure", "measuring the recipe") as progress:
        divergence = yardstick.measure(assignment, progress)
    uniforms = _measure_uniforms(plan, done, table, choice, yardstick, clock)
    recipe = _make_recipe(done, choice, table, prediction, divergence, floor, uniforms)
    path = done.run.path / RECIPE
    recipe.write(path)
    warnings = _warnings(plan, done, divergence, uniforms, choice, table)
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
    )


def profile(config: SearchConfig, reporter: Reporter | None = None) -> Profiled:
    """Score every unit and candidate format, or finish or reuse the profile in the run folder."""
    clock = Clock(reporter or Silent())
    with clock.stage("prepare", "reading the model's shapes"):
        plan = make_plan(config, budgets_needed=False)
    return _profiled(plan, clock)


def _profiled(plan: Plan, clock: Clock) -> Profiled:
    config, say, run = plan.config, clock.reporter.say, plan.run
    say(plan.units.coverage())
    for reason in (*plan.notes, *refusals(plan)):
        say(reason)
    with clock.stage("load", "loading the model") as progress:
        tokenizer = load.load_tokenizer(plan.source)
        calib, measure = text_sources(config.calib, config.eval)
        limit = getattr(plan.model_config.get_text_config(decoder=True), "max_position_embeddings", None)
        ids = sequences(tokenizer, calib, config.samples, config.seq_len)
        eval_ids = sequences(tokenizer, measure, config.eval_samples, min(config.eval_len, limit or config.eval_len))
        model = load.load_model(plan.source, config.device, config.dtype)
        units = plan.units
        if [u.name for u in find_units(model, config.include).weights] != [u.name for u in units.weights]:
            raise AutoqError("the loaded model has other layers than its config says")
        progress(1, 1)
    if kind := load.gguf_type(plan.source):
        say(f"warning: the weights of this GGUF are {kind} already; another format of as few bits may look better than it is")
    say(f"computing in {load.dtype_name(config.dtype, config.device)} on {config.device}; run folder {run.path}")
    make_folder(run.path)
    fingerprint = Fingerprint(
        model_fingerprint(model), text_fingerprint(ids), config.seed, len(ids), ids.shape[1],
        load.dtype_name(config.dtype, config.device), config.include,
    )  # fmt: skip
    with clock.stage("profile", "profiling") as progress:
        profile = make_profile(
            model, units, plan.candidates, ids, fingerprint, run.path, config.batch, config.low_memory, progress, say
        )
    run.describe(_description(plan))
    if peak := peak_bytes():
        held = sum(p.numel() * p.element_size() for p in model.parameters())
        say(f"peak memory of the process {peak / 2**30:.2f} GiB, of which the model is {held / 2**30:.2f} GiB")
    return Profiled(plan, model, ids, eval_ids, profile, run, clock)


def refusals(plan: Plan) -> list[str]:
    """Say which candidate formats some units cannot take, and why."""
    found: dict[str, int] = {}
    for unit in plan.units.weights:
        for fmt in plan.candidates.weights:
            if reason := weight_refusal(unit, fmt):
                key = reason.split(": ", 1)[1]
                found[key] = found.get(key, 0) + 1
    return [f"{reason} ({count} units)" for reason, count in found.items()]


def _description(plan: Plan) -> dict[str, Any]:
    config = plan.config
    return {
        "model": config.model,
        "space": config.space,
        "include": list(config.include),
        "context": plan.context,
        "calib": config.calib or STDLIB,
        "seed": config.seed,
        "samples": config.samples,
        "seq_len": config.seq_len,
        "version": __version__,
    }


def _correct(done: Profiled, progress: Any) -> None:
    """Measure the uniform formats of the sides that have a budget, where the profile lacks them."""
    plan, profile, units = done.plan, done.profile, done.plan.units
    uniform: dict[str, Assignment] = {}
    for kind, asked, formats in (
        ("weight", plan.budget, plan.candidates.weights),
        ("key", plan.kv_budget, plan.candidates.keys),
        ("value", plan.kv_budget, plan.candidates.values),
    ):
        for fmt in formats if asked else ():
            able = [u.name for u in units.units if u.kind == kind and fmt in plan.candidates.for_unit(u)]
            chosen: Any = dict.fromkeys(able, fmt)
            weights, caches = (chosen, {}) if kind == "weight" else ({}, chosen)
            uniform[f"{kind}/{fmt.name}"] = Assignment(weights, caches, profile.absmax)
    sequences = min(plan.config.correct, len(done.ids))
    if all(profile.uniform_kl.get(key, (0.0, 0))[1] == sequences for key in uniform):
        return
    measure_uniform(profile, Yardstick(done.model, units, done.ids[:sequences]), uniform, progress)
    profile.save(done.run.path)


def assignment_of(units: ModelUnits, choice: dict[str, Option], absmax: dict[str, float]) -> Assignment:
    """Return the formats behind a solution."""
    return Assignment(
        {u.name: weight_format(choice[u.name].format) for u in units.weights},
        {u.name: kv_format(choice[u.name].format) for u in units.caches},
        absmax,
    )


def _fronts(plan: Plan, problem: Problem, choice: dict[str, Option]) -> tuple[tuple[FrontPoint, ...], tuple[FrontPoint, ...]]:
    units, sides = plan.units, []
    for members, values, asked in (
        (units.weights, units.searched, plan.budget),
        (units.caches, sum(cache_values(u, plan.context) for u in units.caches), plan.kv_budget),
    ):
        names = frozenset(u.name for u in members)
        bits = total_bits(choice, names) / max(1, values)
        sides.append(tuple(sweep(problem, names, values, around(bits))) if asked else ())
    return sides[0], sides[1]


def _measure_uniforms(
    plan: Plan, done: Profiled, table: DamageTable, choice: dict[str, Option], yardstick: Yardstick, clock: Clock
) -> tuple[UniformResult, ...]:
    units, absmax = plan.units, done.profile.absmax
    weights = uniform_weights(units, plan.candidates, table, absmax) if plan.budget else []
    caches = uniform_caches(units, plan.candidates, table, absmax, plan.context) if plan.kv_budget else []
    bits, kv_bits = None, plan.kv_budget.value if plan.kv_budget else None
    if plan.budget:
        bits = plan.budget.value if plan.budget.unit == "bits" else _bits(units, choice)
    chosen = fair_uniforms(weights, caches, bits, kv_bits, MOST_UNIFORMS)
    found = []
    with clock.stage("measure", "measuring uniform formats") as progress:
        for i, uniform in enumerate(chosen):
            progress(i, len(chosen))
            found.append(UniformResult(uniform, yardstick.measure(uniform.assignment)))
        progress(len(chosen), len(chosen))
    return tuple(sorted(found, key=lambda r: (r.divergence.mean_kl, r.uniform.name)))


def _bits(units: ModelUnits, choice: dict[str, Option]) -> float:
    return total_bits(choice, frozenset(u.name for u in units.weights)) / max(1, units.searched)


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
    low = [u for u, o in choice.items() if table.get(u, {}).get(o.format, 0.0) > 0.5]
    if low:
        found.append(f"{len(low)} units are predicted above 0.5 nats, outside the trusted range: read the measured figure")
    cells = disagreeing_cells(done.profile, plan.units)
    chosen_cells = [c for c in cells if choice[c[0]].format == c[1]]
    if chosen_cells:
        unit, fmt, ratio = chosen_cells[0]
        found.append(
            f"{len(chosen_cells)} chosen cells disagree with the pooled estimate (most: {unit} {fmt}, raw {ratio:.2g} x pooled)"
        )
    return tuple(found)


def _make_recipe(
    done: Profiled,
    choice: dict[str, Option],
    table: DamageTable,
    prediction: Prediction,
    divergence: Divergence,
    floor: float,
    uniforms: tuple[UniformResult, ...],
) -> recipes.Recipe:
    plan, units = done.plan, done.plan.units
    used = {fmt: weight_format(fmt) for fmt in sorted({choice[u.name].format for u in units.weights})}
    kv_used = {fmt: kv_format(fmt) for fmt in sorted({choice[u.name].format for u in units.caches})}
    cost = weight_cost(units, {u.name: used[choice[u.name].format] for u in units.weights})
    kv_bits, kv_values = kv_cost(units, {u.name: kv_used[choice[u.name].format] for u in units.caches}, plan.context)

    def damage(unit: str) -> float:
        return _round(table.get(unit, {}).get(choice[unit].format, 0.0))

    weights = {
        u.name: recipes.WeightEntry(
            format=choice[u.name].format, role=u.role, layer=u.layer, bits=_round(choice[u.name].bits / u.numel),
            numel=u.numel, predicted_kl=damage(u.name), tensors=tuple(t.name for t in u.tensors),
        )
        for u in units.weights
    }  # fmt: skip
    layers: dict[str, dict[str, Any]] = {}
    for u in units.caches:
        entry = layers.setdefault(u.module, {"layer": u.layer, "module": u.module, "values_per_token": u.numel})
        bits = cache_bits(u, kv_used[choice[u.name].format], plan.context) / cache_values(u, plan.context)
        entry[u.kind] = recipes.CacheEntry(
            format=choice[u.name].format, bits=_round(bits), predicted_kl=damage(u.name), absmax=_round(done.profile.absmax[u.name])
        )
    return recipes.Recipe(
        schema_version=1,
        model=recipes.ModelEntry(
            id=plan.config.model, fingerprint=done.profile.fingerprint.model,
            architecture=type(done.model).__name__, parameters=units.parameters,
        ),
        budget=recipes.BudgetEntry(
            weights=plan.budget.text if plan.budget else None, kv=plan.kv_budget.text if plan.kv_budget else None, context=plan.context
        ),
        totals=recipes.TotalsEntry(
            bits=cost.effective, bits_whole_model=cost.whole_model, kv_bits=kv_bits / max(1, kv_values),
            weight_bytes=-(-cost.whole_bits // 8), kv_bytes=-(-kv_bits // 8),
        ),
        predicted=recipes.PredictedEntry(kl=_round(prediction.kl), stderr=_round(prediction.stderr) if math.isfinite(prediction.stderr) else None, estimator="pooled, corrected" if plan.config.correct else "pooled"),
        measured=recipes.MeasuredEntry(
            kl=_round(divergence.mean_kl), kl_stderr=_round(divergence.stderr),
            kl_percentiles={k: _round(v) for k, v in divergence.percentiles().items()},
            top1_agreement=_round(divergence.top1_agreement), perplexity=_round(divergence.perplexity),
            perplexity_original=_round(divergence.perplexity_original),
            perplexity_ratio_stderr=_round(divergence.perplexity_ratio_stderr), noise_floor=_round(floor),
            windows=len(done.eval_ids), tokens_per_window=done.eval_ids.shape[1],
            text=plan.config.eval or plan.config.calib or STDLIB,
            uniform=tuple(_uniform_entry(r, divergence) for r in uniforms),
        ),
        formats={name: recipes.describe(f) for name, f in used.items()},
        kv_formats={name: recipes.describe(f) for name, f in kv_used.items()},
        weights=weights,
        kv=tuple(recipes.KVEntry(**entry) for entry in layers.values()),
        left_out={entry.reason: entry.numel for entry in units.left_out},
        provenance=_provenance(plan, done),
    )  # fmt: skip


def _uniform_entry(result: UniformResult, divergence: Divergence) -> recipes.UniformEntry:
    difference, error = divergence.minus(result.divergence)
    return recipes.UniformEntry(
        format=result.uniform.name, bits=_round(result.uniform.bits), kv_bits=_round(result.uniform.kv_bits),
        measured_kl=_round(result.divergence.mean_kl), recipe_minus_uniform=_round(difference), stderr=_round(error),
    )  # fmt: skip


def _provenance(plan: Plan, done: Profiled) -> recipes.ProvenanceEntry:
    packages = ("autoq", "torch", "transformers", "scipy")
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = __version__ if name == "autoq" else "?"
    arguments = [a for a in sys.argv[1:] if a]
    return recipes.ProvenanceEntry(
        command="autoq " + " ".join(arguments) if Path(sys.argv[0]).name in ("autoq", "__main__.py") else "python API",
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        seed=plan.config.seed, space=plan.config.space, profile_text=plan.config.calib or STDLIB,
        profile_sequences=len(done.ids), profile_tokens=done.ids.shape[1],
        dtype=done.profile.fingerprint.dtype, device=plan.config.device, versions=versions,
    )  # fmt: skip


def _round(value: float) -> float:
    """Six significant digits: what a measurement can bear, and what a diff can show."""
    return float(f"{value:.6g}")


@dataclass(frozen=True)
class FrontResult:
    """The fronts of a run, weights and caches apart."""

    run: Path
    weights: tuple[FrontPoint, ...]
    kv: tuple[FrontPoint, ...]

    def to_json(self) -> dict[str, Any]:
        return {"run": str(self.run), "weights": [_point_json(p) for p in self.weights], "kv": [_point_json(p) for p in self.kv]}


def _point_json(point: FrontPoint) -> dict[str, Any]:
    return {"bits": point.bits, "predicted_kl": point.predicted_kl, "formats": point.formats}


def front(run: Path, budgets: Sequence[float] | None = None) -> FrontResult:
    """Return the predicted fronts of a finished profile; no model weights are read."""
    folder = RunFolder(run)
    description = folder.description()
    profile = Profile.load(run)
    if not profile.complete:
        raise UserError(
            f"the profile in {str(run)!r} has {profile.done} of {profile.fingerprint.sequences} sequences: finish it with --resume"
        )
    try:
        config = SearchConfig(model=description["model"], space=description["space"], include=tuple(description["include"]))
        context = int(description["context"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the run.json in {str(run)!r} lacks or garbles {error}: search or profile there again") from error
    empty = load.empty_model(load.load_config(load.model_source(config.model)))
    units, candidates, _ = _searchable(find_units(empty, config.include), empty, load_space(config.space), kv_wanted=False)
    measured_on = max((count for _, count in profile.uniform_kl.values()), default=0)
    factors = correction_factors(profile, units, measured_on) if measured_on else {}
    table = damage_table(profile, units, factors=factors)
    everything = parse_budget("16bits")
    kv = everything if candidates.keys and candidates.values else None
    problem = make_problem(units, candidates, everything if candidates.weights else None, kv, context, table)
    asked = list(budgets) if budgets else [2 + 0.25 * i for i in range(29)]
    sides = []
    for members, values in ((units.weights, units.searched), (units.caches, sum(cache_values(u, context) for u in units.caches))):
        sides.append(tuple(sweep(problem, frozenset(u.name for u in members), values, asked)) if members else ())
    if not sides[0] and not sides[1]:
        raise UserError(f"no budget of {', '.join(f'{b:g}' for b in asked)} bits can be met with this space: ask for more bits")
    return FrontResult(run, sides[0], sides[1])


def find_recipe(path: Path | None) -> Path:
    """Return the recipe file behind a path: the file itself, the one in a run folder, or that of the newest run."""
    if path is None:
        found = sorted(Path("runs").glob(f"*/{RECIPE}"), key=lambda p: p.stat().st_mtime)
        if not found:
            raise UserError("there is no recipe in 'runs': name a recipe file or a run folder")
        return found[-1]
    if path.is_dir():
        if not (path / RECIPE).is_file():
            raise UserError(f"the folder {str(path)!r} holds no {RECIPE}")
        return path / RECIPE
    return path


def show(recipe: recipes.Recipe) -> dict[str, Any]:
    """Return a recipe as `autoq show --json` prints it: units and totals."""
    units: list[dict[str, Any]] = [
        {"unit": name, "kind": "weight", "role": e.role, "layer": e.layer, "format": e.format, "bits": e.bits,
         "numel": e.numel, "predicted_kl": e.predicted_kl, "tensors": list(e.tensors)}
        for name, e in recipe.weights.items()
    ]  # fmt: skip
    for layer in recipe.kv:
        for kind, role, entry in (("key", "K", layer.key), ("value", "V", layer.value)):
            units.append(
                {"unit": f"{layer.module}.{kind}", "kind": kind, "role": role, "layer": layer.layer, "format": entry.format,
                 "bits": entry.bits, "numel": layer.values_per_token, "predicted_kl": entry.predicted_kl, "tensors": [layer.module]}
            )  # fmt: skip
    measured = recipe.measured
    return {
        "model": recipe.model.id,
        **recipe.totals.model_dump(),
        "predicted_kl": recipe.predicted.kl,
        "measured_kl": measured.kl if measured else None,
        "units": units,
    }


def check_names(recipe: recipes.Recipe, units: ModelUnits) -> None:
    """Raise UserError for the first unit or tensor of the recipe that the model does not have, with the nearest name."""
    weights = {u.name: u for u in units.weights}
    for name, entry in recipe.weights.items():
        if name not in weights:
            raise unknown("unit in the recipe:", name, weights)
        tensors = [t.name for t in weights[name].tensors]
        for tensor in entry.tensors:
            if tensor not in tensors:
                raise unknown(f"tensor in the recipe's unit {name}:", tensor, tensors)
    modules = {u.module for u in units.caches}
    for layer in recipe.kv:
        if layer.module not in modules:
            raise unknown("attention module in the recipe:", layer.module, modules)


def recipe_assignment(recipe: recipes.Recipe, units: ModelUnits) -> Assignment:
    """Return the assignment a recipe stands for; raises UserError if it names what the model does not have."""
    check_names(recipe, units)
    return Assignment(recipe.weight_formats(), recipe.cache_formats(), recipe.absmax())


@contextmanager
def quantized(model: PreTrainedModel, recipe: recipes.Recipe | Path | str) -> Iterator[PreTrainedModel]:
    """Run the block with a recipe's weights, keys and values in place of the model's own; everything is back afterwards.

    Raises UserError if the recipe names what the model does not have, or was made for a model with other weights.
    """
    loaded = recipe if isinstance(recipe, recipes.Recipe) else recipes.read_recipe(Path(recipe))
    made_for, is_ = loaded.model.fingerprint, model_fingerprint(model)
    if made_for != is_:
        raise UserError(f"the recipe was made for a model with other weights ({loaded.model.id}, {made_for}; this one is {is_})")
    has_head = any(e.role == "head" for e in loaded.weights.values())
    units = find_units(model, ("lm_head",) if has_head else ())
    with apply_assignment(model, units, recipe_assignment(loaded, units)) as changed:
        yield changed


def memory(
    model: str, contexts: Sequence[int], batches: Sequence[int], recipe: recipes.Recipe | None = None
) -> list[dict[str, Any]]:
    """Return rows of weight and cache bytes for every KV format, context and batch; a config alone is enough.

    Weights are counted at 16 bit, or as the recipe stores them; with a recipe its own cache is a row too.
    """
    for batch in batches:
        if batch < 1:
            raise UserError(f"a batch of {batch} holds no sequence: give 1 or more")
    config = load.load_config(load.model_source(model))
    empty = load.empty_model(config)
    if (reason := uncacheable(empty)) and "attention function" not in reason:
        raise UserError(reason)
    has_head = recipe is not None and any(e.role == "head" for e in recipe.weights.values())
    units = find_units(empty, ("lm_head",) if has_head else ())
    weight_bytes = recipe.totals.weight_bytes if recipe else 2 * units.parameters
    assignments: dict[str, dict[str, Any]] = {
        name: dict.fromkeys((u.name for u in units.caches), f) for name, f in KV_FORMATS.items()
    }
    if recipe:
        assignments = {"recipe": dict(recipe_assignment(recipe, units).caches)} | assignments
    rows = []
    for context in contexts:
        context_of(config.get_text_config(decoder=True), context)
        for batch in batches:
            for name, assignment in assignments.items():
                kv_bytes = batch * -(-kv_cost(units, assignment, context)[0] // 8)
                rows.append(
                    {"kv_format": name, "context": context, "batch": batch, "kv_bytes": kv_bytes,
                     "weight_bytes": weight_bytes, "total_bytes": kv_bytes + weight_bytes}
                )  # fmt: skip
    return rows


__all__ = [
    "FrontResult",
    "Plan",
    "Profiled",
    "SearchResult",
    "front",
    "make_plan",
    "memory",
    "profile",
    "quantized",
    "search",
    "show",
]
