"""A packed cache that is checked while it runs: kernels against the reference at every encode, bytes against the cost model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from autoq.formats import reference
from autoq.formats.format import Format
from autoq.formats.reference import Packed
from autoq.model.packed import differences, same_bits
from autoq.model.packed_cache import PackedLayer, PackedSlidingLayer, QuantizedKVCache
from autoq.model.packed_tokens import Backend, PackedTokens


@dataclass
class CacheCheck:
    """What the checks showed.

    Attributes:
        differs: cache unit ("layer 3 key") -> parts in which kernel and reference differ in a bit: "codes", "scales", "zero points",
            "values". bits: cache unit -> (stored, priced), where they are not the same.
    """

    differs: dict[str, set[str]] = field(default_factory=dict)
    bits: dict[str, tuple[int, int]] = field(default_factory=dict)

    def listen(self, cache: QuantizedKVCache) -> None:
        """Check every encode of a cache that holds nothing yet."""
        for name, side, _ in _sides(cache):
            for one in _chain(side):
                if one.backend is not None:
                    one.backend = self._checked(name, one.backend)

    def weigh(self, cache: QuantizedKVCache) -> None:
        """Compare the bytes held with what the cost model counts: the same, and no more where a window may have left the sink behind."""
        for name, side, layer in _sides(cache):
            if side.values_held:
                batch, heads, tokens, head_dim = side.shape
                has_window = isinstance(layer, PackedSlidingLayer)
                if has_window:
                    tokens = min(layer.cumulative_length, layer.sliding_window + max(one.unit for one in side.fmt.chain) - 1)
                priced = side.fmt.storage_bits(tokens, heads, head_dim, batch)
                if 8 * side.nbytes > priced or (8 * side.nbytes < priced and not has_window):
                    self.bits[name] = (8 * side.nbytes, priced)

    def problems(self) -> list[str]:
        """Say what is wrong, a sentence a cache unit."""
        found = [f"{name}: kernel and reference differ in {', '.join(sorted(parts))}" for name, parts in self.differs.items()]
        found += [f"{name}: it takes {s / 8:g} bytes, the cost model counts {p / 8:g}" for name, (s, p) in self.bits.items()]
        return found

    def _checked(self, name: str, backend: Backend) -> Backend:
        def encode(fmt: Format, x: torch.Tensor, absmax: torch.Tensor | None) -> Packed:
            packed, expected = backend.encode(fmt, x, absmax), reference.encode(fmt, x, absmax=absmax)
            parts = differences(packed, expected)
            if not same_bits(backend.decode(packed), reference.decode(expected)):
                parts.add("values")
            if parts:
                self.differs.setdefault(name, set()).update(parts)
            return packed

        return replace(backend, encode=encode)


def _sides(cache: QuantizedKVCache) -> Iterator[tuple[str, PackedTokens, PackedLayer]]:
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, PackedLayer):
            yield f"layer {index} key", layer.key, layer
            yield f"layer {index} value", layer.value, layer


def _chain(side: PackedTokens) -> Iterator[PackedTokens]:
    yield side
    if side.older is not None:
        yield from _chain(side.older)
