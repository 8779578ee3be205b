"""What weights and caches take in memory, and what fits into a device's; a config alone is enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoq import recipe as recipes
from autoq.api.applying import recipe_assignment
from autoq.budget import Budgets
from autoq.cost.engines import Engine, engine_of
from autoq.cost.kv_memory import context_of, kv_cost
from autoq.cost.targets import Target, target_of
from autoq.display.html import memory_html
from autoq.errors import UserError
from autoq.formats.catalog import KV_FORMATS
from autoq.formats.format import KVFormat
from autoq.model.given import shapes_of
from autoq.model.unit import ModelUnits
from autoq.model.units import find_units

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autoq.api.plan import Plan

MOST_SEQUENCES = 2**20  # a model without a cache holds any number
MOST_TOKENS = 2**20


@dataclass(frozen=True, repr=False)
class Memory:
    """Prices of a model.

    Attributes:
        rows: weight and cache bytes for every KV format, context and batch.
        largest: with a device's memory, for every KV format the largest context by batch, and the largest batch by context; 0 where
            none fits.
        limit: the model's own maximum of tokens, or None.
        available: bytes of the device, or None.
        left_out: formats that engine or target cannot have, in words.
    """

    rows: list[dict[str, Any]]
    largest: list[dict[str, Any]]
    limit: int | None = None
    available: int | None = None
    left_out: tuple[str, ...] = ()

    def __repr__(self) -> str:
        from autoq.display.prices import memory_table
        from autoq.display.text import as_text

        return as_text(memory_table(self, "memory", self.available))

    def _repr_html_(self) -> str:
        return memory_html(self.rows, self.largest, self.limit)


@dataclass(frozen=True)
class _Prices:
    units: ModelUnits
    engine: Engine
    weight_bytes: int

    def cache(self, formats: Mapping[str, KVFormat], context: int, batch: int) -> int:
        tokens = Budgets(context=context, page=self.engine.page).tokens
        return -(-kv_cost(self.units, formats, tokens, batch)[0] // 8)

    def peak(self, formats: Mapping[str, KVFormat], context: int, batch: int) -> int:
        """Return the most that the cache takes on its way to this context."""
        tokens = Budgets(context=context, page=self.engine.page).tokens
        return -(-kv_cost(self.units, formats, tokens, batch, peak=True)[0] // 8)


def memory(
    model: PreTrainedModel | str, contexts: Sequence[int], batches: Sequence[int], recipe: recipes.Recipe | None = None,
    engine: str = "none", available: int | None = None, target: str = "any",
) -> Memory:  # fmt: skip
    """Price weights and cache for every KV format, context and batch; a config alone is enough.

    Weights are counted at 16 bit, or as the recipe stores them; with a recipe its own cache is a row too.

    Args:
        engine: counts its pages whole, and leaves out cache formats it cannot serve. available: bytes of the device.
        target: a device; cache formats it cannot run are left out.

    Raises UserError for a context beyond the model's maximum a batch of 0, or a recipe that engine or target cannot serve.
    """
    if not contexts or not batches:
        raise UserError("memory needs at least one context and one batch")
    for batch in batches:
        if batch < 1:
            raise UserError(f"a batch of {batch} holds no sequence: give 1 or more")
        if batch >= 2**31:
            raise UserError("a batch of 2^31 sequences and more is none: give fewer")
    _, config, empty = shapes_of(model)
    text_config = config.get_text_config(decoder=True)
    for context in contexts:
        context_of(text_config, context)
    has_head = recipe is not None and any(e.role == "head" for e in recipe.weights.values())
    units = find_units(empty, ("lm_head",) if has_head else ())
    prices = _Prices(units, engine_of(engine), recipe.totals.weight_bytes if recipe else 2 * units.parameters)
    formats = _cache_formats(units, prices.engine, target_of(target), recipe)
    rows = []
    contexts, batches = list(dict.fromkeys(contexts)), list(dict.fromkeys(batches))
    for context in contexts:
        for batch in batches:
            for name, assignment in formats.items():
                kv_bytes = prices.cache(assignment, context, batch)
                total = kv_bytes + prices.weight_bytes
                row = {"kv_format": name, "context": context, "batch": batch, "kv_bytes": kv_bytes,
                       "weight_bytes": prices.weight_bytes, "total_bytes": total}  # fmt: skip
                if available is not None:
                    peak = prices.peak(assignment, context, batch) + prices.weight_bytes  # at some length on the way
                    row |= {"peak_bytes": peak, "fits": peak <= available}
                rows.append(row)
    limit = getattr(text_config, "max_position_embeddings", None)
    left_out = _left_out(units, prices.engine, target_of(target), formats)
    if available is None:
        return Memory(rows, [], limit, None, left_out)
    longest = limit or 2**24
    return Memory(
        rows,
        [_largest(prices, n, f, contexts, batches, longest, available) for n, f in formats.items()],
        limit,
        available,
        left_out,
    )


def _cache_formats(
    units: ModelUnits, engine: Engine, target: Target, recipe: recipes.Recipe | None
) -> dict[str, dict[str, KVFormat]]:
    def is_served(fmt: KVFormat) -> bool:
        by_engine = fmt.is_original or engine.kv_formats is None or fmt.name in engine.kv_formats
        return by_engine and target.refusal(fmt) is None

    for name, fmt in recipe.cache_formats().items() if recipe else ():
        if not is_served(fmt):
            raise UserError(
                f"the recipe keeps {name} in {fmt.name}, which --engine {engine.name} or --target {target.name} does not serve"
            )
    served = {n: f for n, f in KV_FORMATS.items() if is_served(f)}
    found = {name: dict.fromkeys((u.name for u in units.caches), f) for name, f in served.items() if _fits_heads(f, units)}
    return {"recipe": dict(recipe_assignment(recipe, units).caches)} | found if recipe else found


def _left_out(units: ModelUnits, engine: Engine, target: Target, kept: Mapping[str, object]) -> tuple[str, ...]:
    """Say which cache formats are not priced, and why."""
    why: dict[str, list[str]] = {}
    for name, fmt in KV_FORMATS.items():
        if name in kept:
            continue
        reason = target.refusal(fmt) or (
            "no group fits this model's head_dim" if not _fits_heads(fmt, units) else f"{engine.name} does not serve it"
        )
        why.setdefault(reason, []).append(name)
    return tuple(f"left out {', '.join(names)}: {reason}" for reason, names in why.items())


def _fits_heads(fmt: KVFormat, units: ModelUnits) -> bool:
    try:
        for unit in units.caches:
            fmt.for_head_dim(unit.head_dim)
    except UserError:
        return False
    return True


def _largest(
    prices: _Prices, name: str, formats: Mapping[str, KVFormat], contexts: Sequence[int], batches: Sequence[int], longest: int,
    available: int,
) -> dict[str, Any]:  # fmt: skip
    def most(limit: int, cost: Callable[[int], int]) -> int:
        """Return the largest number up to `limit` whose cost fits; costs never fall."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if prices.weight_bytes + cost(middle) <= available else (low, middle - 1)
        return low

    return {
        "kv_format": name,
        "context_by_batch": {b: most(longest, lambda n, b=b: prices.peak(formats, n, b)) for b in batches},  # type: ignore[misc]
        "batch_by_context": {c: most(MOST_SEQUENCES, lambda n, c=c: prices.peak(formats, c, n)) for c in contexts},  # type: ignore[misc]
    }


def cache_by_context(plan: Plan, recipe: recipes.Recipe) -> list[dict[str, int]]:
    """Return the bytes of the recipe's cache, and of one in 16 bit, at doubling contexts up to the model's maximum or 1M tokens."""
    if not plan.units.caches:
        return []
    longest = context_of(plan.model_config.get_text_config(decoder=True)) if plan.limit is None else min(plan.limit, MOST_TOKENS)
    contexts = [2**i for i in range(7, 21) if 2**i < longest]
    formats, original = recipe.cache_formats(), KV_FORMATS["bf16"]
    rows = []
    for context in [*contexts, longest]:
        stored, _ = kv_cost(plan.units, formats, context, plan.budgets.batch)
        whole, _ = kv_cost(plan.units, dict.fromkeys(formats, original), context, plan.budgets.batch)
        rows.append({"context": context, "kv_bytes": -(-stored // 8), "kv_bytes_16bit": -(-whole // 8)})
    return rows
