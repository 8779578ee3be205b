"""What weights and caches take in memory; a config alone is enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoq import recipe as recipes
from autoq.api.applying import recipe_assignment
from autoq.cost.kv_memory import context_of, kv_cost
from autoq.errors import UserError
from autoq.formats.catalog import KV_FORMATS
from autoq.model import load
from autoq.model.units import find_units, uncacheable


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
