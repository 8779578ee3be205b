"""What is known before any weight is read: names resolved, and what cannot work refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autoq.allocation.engine import feasible_ways
from autoq.allocation.problem import Problem, make_problem
from autoq.allocation.space import load_space
from autoq.budget import Budget, Budgets, parse_budget, parse_bytes
from autoq.config import SearchConfig
from autoq.cost.engines import Engine, engine_of, loads
from autoq.cost.kv_memory import cache_values, context_of
from autoq.cost.targets import Target, target_of
from autoq.errors import UserError
from autoq.exporters.consumers import consumer_of
from autoq.exporters.limits import computed, serving
from autoq.formats.catalog import WEIGHT_FORMATS, kv_format
from autoq.formats.format import KVFormat
from autoq.measure.damage import Candidates, cache_refusal, weight_refusal
from autoq.measure.estimate import DamageTable
from autoq.model import load
from autoq.model.cache_units import unsearchable
from autoq.model.given import Given
from autoq.model.text import text_sources
from autoq.model.unit import ModelUnits
from autoq.model.units import find_units
from autoq.run_folder import RunFolder, open_run

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Plan:
    """What is known before any weight is read: the model's units and shapes, the candidates, the budgets."""

    config: SearchConfig
    source: load.ModelSource
    model_config: PreTrainedConfig
    units: ModelUnits
    candidates: Candidates
    budgets: Budgets
    engine: Engine
    run: RunFolder
    notes: tuple[str, ...]
    given: Given

    @property
    def limit(self) -> int | None:
        """The model's maximum of tokens, or None where it has none."""
        found: int | None = getattr(self.model_config.get_text_config(decoder=True), "max_position_embeddings", None)
        return found

    def problem(self, damage: DamageTable | None = None) -> Problem:
        """Return the allocation problem; raises UserError for a budget that cannot be met."""
        return make_problem(self.units, self.candidates, self.budgets, damage)

    def sides(self) -> dict[str, tuple[frozenset[str], int]]:
        """Return name -> (units, number of values) of what is searched: "weights", "cache"."""
        units, budgets = self.units, self.budgets
        found = {}
        if budgets.search_weights:
            found["weights"] = frozenset(u.name for u in units.weights), units.searched
        if budgets.search_caches:
            values = sum(cache_values(u, budgets.tokens, budgets.batch) for u in units.caches)
            found["cache"] = frozenset(u.name for u in units.caches), values
        return found


def make_plan(config: SearchConfig, budgets_needed: bool = True, given: Given | None = None) -> Plan:
    """Resolve names and refuse what cannot work, before any weight is read.

    Args:
        given: what is in memory already.

    Raises UserError for an unknown name, an impossible budget, or a model that is no causal language model.
    """
    for option in ("budget", "kv_budget", "memory", "calib", "eval", "space", "model", "consumer"):
        if getattr(config, option) == "":
            raise UserError(f"--{option.replace('_', '-')} is empty: give a value, or leave the option out")
    asked = _budgets(config, budgets_needed)
    engine, space = engine_of(config.engine), load_space(config.space)
    if config.consumer != "none":
        consumer = consumer_of(config.consumer)
        engine, space = serving(consumer, engine), replace(space, weights=computed(consumer, space.weights))
    candidates, removed = runnable(with_engine(space, engine), target_of(config.target))
    if asked.search_weights and not candidates.weights:
        option = "--budget" if asked.weights else "--memory"
        raise UserError(f"{option} needs weight formats, but {_left_of(config)} has none")
    if asked.search_caches and not (candidates.keys and candidates.values):
        option = "--kv-budget" if asked.kv else "--memory"
        raise UserError(f"{option} needs formats for keys and values, but {_left_of(config)} lacks them")
    given = given or Given()
    if given.ids is None:
        text_sources(config.calib, config.eval)
    load.dtype_name(config.dtype, "cpu")
    device = load.pick_device(config.device)
    source = load.model_source(config.model) if given.model is None else load.ModelSource(config.model, config.model)
    model_config, empty = given.shapes(source)
    units, candidates, notes = searchable(find_units(empty, config.include), empty, candidates, asked.search_caches)
    if not units.weights:
        raise UserError(f"{config.model!r} has no weight that autoq can quantize")
    text_config = model_config.get_text_config(decoder=True)
    limit = getattr(text_config, "max_position_embeddings", None)
    if limit and given.ids is None and config.seq_len > limit:
        raise UserError(f"--seq-len is {config.seq_len}, beyond this model's maximum of {limit} tokens")
    run = open_run(config.run, config.resume, source.short_name)
    if engine.head_dim_multiple > 1 and (odd := {u.head_dim for u in units.caches if u.head_dim % engine.head_dim_multiple}):
        raise UserError(
            f"{engine.option} {engine.name} needs a head_dim that is a multiple of {engine.head_dim_multiple}, and this model's is {max(odd)}"
        )
    budgets = replace(asked, context=context_of(text_config, config.context), page=engine.page)
    plan = Plan(
        replace(config, device=device), source, model_config, units, candidates, budgets, engine, run, (*removed, *notes), given
    )
    problem = plan.problem()
    if engine.mixing != "free" and units.caches:
        feasible_ways(problem, units, engine)
    return plan


def _left_of(config: SearchConfig) -> str:
    parts = [f"--target {config.target}"] if config.target != "any" else []
    parts += [f"--engine {config.engine}"] if config.engine != "none" else []
    parts += [f"--consumer {config.consumer}"] if config.consumer != "none" else []
    return (
        f"what {' and '.join(parts)} can run of the search space {config.space!r}"
        if parts
        else f"the search space {config.space!r}"
    )


def _budgets(config: SearchConfig, needed: bool) -> Budgets:
    """Read the budgets; the context is not resolved yet."""
    is_bounded = config.budget is not None or config.kv_budget is not None or config.memory is not None
    if needed and not is_bounded and not config.front and config.max_kl is None:
        raise UserError(
            "give a budget: --budget 4.5bits for the weights, --kv-budget 6bits for the cache, --memory 24GiB for both together; "
            "or --max-kl 0.05 for the smallest recipe within that damage"
        )
    if not is_bounded and (config.front or config.max_kl is not None):
        everything = parse_budget("16bits")
        return Budgets(
            everything if config.sides != "cache" else None, everything if config.sides != "weights" else None, batch=config.batch
        )
    weights = parse_budget(config.budget) if config.budget else None
    kv = parse_budget(config.kv_budget, "--kv-budget") if config.kv_budget else None
    memory = Budget(config.memory.strip(), parse_bytes(config.memory, "--memory"), "bytes") if config.memory else None
    for option, side in (("--budget", weights), ("--kv-budget", kv)):
        if memory is not None and side is not None and side.unit == "bytes" and side.value >= memory.value:
            raise UserError(
                f"{option} {side.text} contradicts --memory {memory.text}, which holds weights and cache: lower it, or leave it out"
            )
    return Budgets(weights, kv, memory, batch=config.batch)


def with_engine(candidates: Candidates, engine: Engine) -> Candidates:
    """Leave out weights that the engine does not load, and add the cache formats it serves.

    The space's own cache formats stay, to say what the engine's way of mixing costs.
    """
    candidates = replace(candidates, weights=tuple(f for f in candidates.weights if loads(engine, f, WEIGHT_FORMATS)))
    if engine.kv_formats is None or not candidates.keys:
        return candidates
    served = tuple(kv_format(name) for name in sorted(engine.kv_formats))
    if engine.mixing == "free":
        return replace(candidates, keys=served, values=served)
    return replace(
        candidates,
        keys=tuple(dict.fromkeys((*candidates.keys, *served))),
        values=tuple(dict.fromkeys((*candidates.values, *served))),
    )


def runnable(candidates: Candidates, target: Target) -> tuple[Candidates, tuple[str, ...]]:
    """Leave out the formats that a device cannot run; return (the others, what was left out and why)."""
    notes: dict[str, list[str]] = {}

    def able(formats: tuple[Any, ...]) -> tuple[Any, ...]:
        kept = []
        for fmt in formats:
            if reason := target.refusal(fmt):
                notes.setdefault(reason, []).append(fmt.name)
            else:
                kept.append(fmt)
        return tuple(kept)

    found = Candidates(able(candidates.weights), able(candidates.keys), able(candidates.values))
    return found, tuple(f"left out {', '.join(dict.fromkeys(names))}: {reason}" for reason, names in notes.items())


def searchable(
    units: ModelUnits, empty: PreTrainedModel, candidates: Candidates, kv_wanted: bool
) -> tuple[ModelUnits, Candidates, tuple[str, ...]]:
    """Leave out the cache of a model whose keys and values autoq cannot reach, and formats that no head_dim fits.

    Returns (units, candidates, what to say); raises UserError where that is what was asked for.
    """
    if reason := unsearchable(empty):
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
    if kv_wanted and notes and not (fitted.keys and fitted.values):
        raise UserError(f"the cache of this model fits none of the formats: {notes[0]}")
    return units, fitted, tuple(dict.fromkeys(notes))


def refusals(plan: Plan) -> list[str]:
    """Say which candidate formats some units cannot take, and why."""
    found: dict[str, int] = {}
    for unit in plan.units.weights:
        for fmt in plan.candidates.weights:
            if reason := weight_refusal(unit, fmt):
                key = reason.split(": ", 1)[1]
                found[key] = found.get(key, 0) + 1
    for unit in plan.units.caches:
        for kv in plan.candidates.keys if unit.kind == "key" else plan.candidates.values:
            if reason := cache_refusal(unit, kv):
                key = reason.split(": ", 1)[1]
                found[key] = found.get(key, 0) + 1
    return [f"{reason} ({count} units)" for reason, count in found.items()]
