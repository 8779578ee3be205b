"""Stored bits of the KV cache: by layer, at a context length and batch."""

from __future__ import annotations

from collections.abc import Mapping

from autoq.errors import UserError
from autoq.formats.catalog import kv_format
from autoq.formats.format import KVFormat
from autoq.model.unit import ModelUnits, Unit

DEFAULT_CONTEXT = 8192  # where --kv-budget in bits is counted, or the model's own maximum if that is shorter


def cached_tokens(unit: Unit, context: int) -> int:
    """Return how many tokens a layer keeps: a sliding window caps them."""
    return min(context, unit.window) if unit.window else context


def cache_bits(unit: Unit, fmt: KVFormat, context: int, batch: int = 1) -> int:
    """Return the bits that the K (or V) cache of one layer takes for `batch` sequences of `context` tokens."""
    return fmt.storage_bits(cached_tokens(unit, context), unit.kv_heads, unit.head_dim, batch)


def cache_values(unit: Unit, context: int, batch: int = 1) -> int:
    """Return the number of values in that cache."""
    return batch * cached_tokens(unit, context) * unit.kv_heads * unit.head_dim


def kv_cost(units: ModelUnits, assignment: Mapping[str, KVFormat], context: int, batch: int = 1) -> tuple[int, int]:
    """Return (stored bits, values) of the whole cache of `batch` sequences; a unit that is not assigned stays at 16 bit."""
    original = kv_format("bf16")
    bits = sum(cache_bits(u, assignment.get(u.name, original), context, batch) for u in units.caches)
    return bits, sum(cache_values(u, context, batch) for u in units.caches)


def context_of(config: object, asked: int | None = None) -> int:
    """Return the context length to price: what was asked, else DEFAULT_CONTEXT within the model's maximum.

    Raises UserError for a context longer than the model's maximum.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if asked is None:
        return min(DEFAULT_CONTEXT, limit) if limit else DEFAULT_CONTEXT
    if limit and asked > limit:
        raise UserError(f"a context of {asked:,} tokens is beyond this model's maximum of {limit:,}")
    return asked
