"""Stored bits of the KV cache: by layer, at a context length and batch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autoq.errors import UserError
from autoq.formats.catalog import kv_format
from autoq.formats.format import KVFormat
from autoq.model.unit import ModelUnits, Unit

DEFAULT_CONTEXT = 8192  # where --kv-budget in bits is counted, or the model's own maximum if that is shorter


def cached_tokens(unit: Unit, context: int, fmt: KVFormat | None = None) -> int:
    """Return how many tokens a layer keeps: a sliding window caps them, but a channel format keeps whole groups."""
    group = max((one.unit for one in fmt.chain), default=1) if fmt else 1
    return min(context, unit.window + group - 1) if unit.window else context


def cache_bits(unit: Unit, fmt: KVFormat, context: int, batch: int = 1) -> int:
    """Return the bits that the K (or V) cache of one layer takes for `batch` sequences of `context` tokens."""
    return fmt.storage_bits(cached_tokens(unit, context, fmt), unit.kv_heads, unit.head_dim, batch)


def peak_bits(unit: Unit, fmt: KVFormat, context: int, batch: int = 1) -> int:
    """Return the most bits that the cache takes on its way to this context: the newest incomplete group is held in 16 bit."""
    group = math.lcm(*(one.unit for one in fmt.chain))
    return max(cache_bits(unit, fmt, n, batch) for n in range(max(0, context - group) + 1, context + 1))


def cache_values(unit: Unit, context: int, batch: int = 1) -> int:
    """Return the number of values in that cache."""
    return batch * cached_tokens(unit, context) * unit.kv_heads * unit.head_dim


def kv_cost(
    units: ModelUnits, assignment: Mapping[str, KVFormat], context: int, batch: int = 1, peak: bool = False
) -> tuple[int, int]:
    """Return (stored bits, values) of the whole cache of `batch` sequences; a unit that is not assigned stays at 16 bit.

    Args:
        peak: count what every layer takes at most on its way to the context.
    """
    original, cost = kv_format("bf16"), peak_bits if peak else cache_bits
    bits = sum(cost(u, assignment.get(u.name, original), context, batch) for u in units.caches)
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
