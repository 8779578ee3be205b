"""What is known before any weight is read: names resolved, and what cannot work refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autoq.budget import Budget, parse_budget
from autoq.config import SearchConfig
from autoq.cost.kv_memory import context_of
from autoq.errors import UserError
from autoq.formats.format import KVFormat
from autoq.measure.damage import Candidates, weight_refusal
from autoq.measure.estimate import DamageTable
from autoq.model import load
from autoq.model.text import text_sources
from autoq.model.units import ModelUnits, find_units, uncacheable
from autoq.run_folder import RunFolder, open_run
from autoq.search.problem import Problem, make_problem
from autoq.search.space import load_space

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
    budget: Budget | None
    kv_budget: Budget | None
    context: int
    run: RunFolder
    notes: tuple[str, ...]

    def problem(self, damage: DamageTable | None = None) -> Problem:
        """Return the allocation problem; raises UserError for a budget that cannot be met."""
        return make_problem(self.units, self.candidates, self.budget, self.kv_budget, self.context, damage)


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
    units, candidates, notes = searchable(find_units(empty, config.include), empty, candidates, kv_budget is not None)
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


def searchable(
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


def refusals(plan: Plan) -> list[str]:
    """Say which candidate formats some units cannot take, and why."""
    found: dict[str, int] = {}
    for unit in plan.units.weights:
        for fmt in plan.candidates.weights:
            if reason := weight_refusal(unit, fmt):
                key = reason.split(": ", 1)[1]
                found[key] = found.get(key, 0) + 1
    return [f"{reason} ({count} units)" for reason, count in found.items()]
