"""A KV cache that holds packed bytes: a drop-in `Cache` for any transformers model, K and V apart in every layer.

Tokens arrive in 16 bit; what a format keeps in 16 bit (the first `sink` tokens, the newest `residual` ones, the newest
incomplete group of a channel format) stays so, the rest is packed once and for all. Attention reads what decodes from the bytes,
its own newest token included, so that decoding token by token gives exactly what `quantized` computes in one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from autoq.codec import static_absmax
from autoq.errors import UserError
from autoq.formats import reference
from autoq.formats.format import Format, IntElement, KVFormat
from autoq.formats.reference import Packed, Scales
from autoq.formats.rounding import pack_bits, unpack_bits

if TYPE_CHECKING:
    from autoq.recipe import Recipe

Encode = Callable[[Format, torch.Tensor, "torch.Tensor | None"], Packed]
Decode = Callable[[Packed], torch.Tensor]
ORIGINAL = KVFormat("bf16", Format("bf16", None))


def _reference_encode(fmt: Format, x: torch.Tensor, absmax: torch.Tensor | None) -> Packed:
    return reference.encode(fmt, x, absmax=absmax)


@dataclass(frozen=True)
class Backend:
    """What encodes and decodes: the torch reference, or the kernels."""

    encode: Encode = _reference_encode
    decode: Decode = reference.decode


def kernels() -> Backend:
    """Return the Triton kernels (native on a GPU, interpreted on a CPU if Triton's interpreter is on)."""
    from autoq.kernels.decode import decode
    from autoq.kernels.encode import encode

    return Backend(encode, decode)


@dataclass
class PackedTokens:
    """The K or the V cache of one layer: [batch, KV heads, tokens, head_dim], most of it packed.

    Attributes:
        codes: uint8 [batch, KV heads, units, rows of a unit, bytes]; a unit is a token (one row of head_dim values) or, for a
            channel format, a group of tokens (head_dim rows of group values).
        scales: [batch, KV heads, units, rows, blocks] as stored. zeros: the zero points, one bit stream over all of them.
        sink, recent: [batch, KV heads, tokens, head_dim] in 16 bit, before and after the packed tokens.
    """

    fmt: KVFormat
    absmax: float
    backend: Backend
    codes: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    recent: torch.Tensor | None = None
    _static: torch.Tensor | None = field(default=None, init=False, repr=False)  # magnitude that the static scale covers
    _scale: torch.Tensor | None = field(default=None, init=False, repr=False)  # the static scale itself
    _head_dim: int = field(default=0, init=False, repr=False)
    _sunk: int = field(default=0, init=False, repr=False)  # tokens that went into the sink; a window may have left them behind

    @property
    def unit(self) -> int:
        """Tokens that are packed together."""
        return (self.fmt.values.block or 1) if self.fmt.axis == "channel" else 1

    @property
    def tokens(self) -> int:
        packed = 0 if self.codes is None else self.codes.shape[2] * self.unit
        return packed + sum(0 if t is None else t.shape[2] for t in (self.sink, self.recent))

    @property
    def values_held(self) -> int:
        """Number of cached values."""
        if self.recent is None:
            return 0
        batch, heads = self.recent.shape[:2]
        return batch * heads * self.tokens * self._head_dim

    @property
    def nbytes(self) -> int:
        """Bytes held; what is in 16 bit is counted as 2 bytes a value whatever the model computes in."""
        packed = sum(t.numel() * t.element_size() for t in (self.codes, self.zeros) if t is not None)
        if self.scales is not None and self.fmt.values.scale != "none":
            packed += self.scales.numel() * self.scales.element_size()
        return packed + sum(2 * t.numel() for t in (self.sink, self.recent) if t is not None)

    def append(self, x: torch.Tensor) -> None:
        """Add new tokens [batch, KV heads, tokens, head_dim], and pack what is no longer among the newest."""
        if self.recent is None:
            self.fmt = self.fmt.for_head_dim(x.shape[-1])
            self._static = static_absmax(self.fmt, self.absmax, x)
            self._head_dim = x.shape[-1]
        if self.fmt.sink and not self.fmt.is_original:
            room = max(0, self.fmt.sink - self._sunk)
            first, x = x[:, :, :room], x[:, :, room:]
            self.sink = first if self.sink is None else torch.cat([self.sink, first], dim=2)
            self._sunk += first.shape[2]
        recent = x if self.recent is None else torch.cat([self.recent, x], dim=2)
        ready = 0 if self.fmt.is_original else max(0, recent.shape[2] - self.fmt.residual) // self.unit * self.unit
        if ready:
            self._pack(recent[:, :, :ready])
        self.recent = recent[:, :, ready:]

    def read(self) -> torch.Tensor:
        """Return all tokens as attention reads them, in the dtype they came in."""
        assert self.recent is not None
        parts = [self.sink, None if self.codes is None else self._decode(), self.recent]
        return torch.cat([p for p in parts if p is not None], dim=2)

    def keep_last(self, tokens: int) -> None:
        """Forget the oldest tokens: all but `tokens`, rounded up to whole units; groups start where they did."""
        extra = self.tokens - tokens
        if extra > 0 and self.sink is not None and self.sink.shape[2]:
            dropped = min(extra, self.sink.shape[2])
            self.sink, extra = self.sink[:, :, dropped:], extra - dropped
        if extra > 0 and self.codes is not None:
            units = min(extra // self.unit, self.codes.shape[2])
            self._select_units(slice(units, None))
            extra -= units * self.unit
        if extra > 0 and self.codes is None and self.recent is not None:
            self.recent = self.recent[:, :, extra // self.unit * self.unit :]

    def drop_last(self, tokens: int) -> None:
        """Forget the newest tokens; those of a group that is cut are read back into 16 bit."""
        assert self.recent is not None
        if tokens > self.recent.shape[2] and self.codes is not None:
            needed = tokens - self.recent.shape[2]
            units = min(-(-needed // self.unit), self.codes.shape[2])
            left = self.codes.shape[2] - units
            tail = self._decode()[:, :, left * self.unit :]
            self._select_units(slice(0, left))
            self.recent = torch.cat([tail, self.recent], dim=2)
        beyond = tokens - self.recent.shape[2]
        self.recent = self.recent[:, :, : max(0, self.recent.shape[2] - tokens)]
        if beyond > 0 and self.sink is not None:
            self.sink = self.sink[:, :, : max(0, self.sink.shape[2] - beyond)]
            self._sunk = self.sink.shape[2]

    def select(self, batch: torch.Tensor) -> None:
        """Take these rows of the batch, in this order (beam search)."""
        zero = self._zero_points()
        for name in ("codes", "scales", "sink", "recent"):
            t = getattr(self, name)
            setattr(self, name, None if t is None else t.index_select(0, batch.to(t.device)))
        self._set_zero_points(None if zero is None else zero.index_select(0, batch.to(zero.device)))

    def _pack(self, x: torch.Tensor) -> None:
        """x [batch, KV heads, whole units of tokens, head_dim]."""
        batch, heads, tokens = x.shape[:3]
        units = tokens // self.unit
        rows = x.unflatten(2, (units, self.unit))
        rows = rows.transpose(3, 4) if self.fmt.axis == "channel" else rows
        packed = self.backend.encode(self.fmt.values, rows.reshape(-1, rows.shape[-1]), self._static)
        assert packed.scales is not None
        shape = (batch, heads, units, rows.shape[3], -1)
        zero = None if packed.scales.zero is None else packed.scales.zero.view(shape)
        old = self._zero_points()
        self._set_zero_points(zero if old is None or zero is None else torch.cat([old, zero], dim=2))
        codes, scales = packed.codes.view(shape), packed.scales.block.view(shape)
        self.codes = codes if self.codes is None else torch.cat([self.codes, codes], dim=2)
        self.scales = scales if self.scales is None else torch.cat([self.scales, scales], dim=2)
        self._scale = packed.scales.tensor

    def _decode(self) -> torch.Tensor:
        assert self.codes is not None
        assert self.scales is not None
        assert self.recent is not None
        batch, heads, units, rows, _ = self.codes.shape
        width = self.unit if self.fmt.axis == "channel" else self._head_dim
        count = batch * heads * units * rows
        zero = self._zero_points()
        scales = Scales(self.scales.reshape(count, -1), None if zero is None else zero.reshape(count, -1), self._scale)
        packed = Packed(self.fmt.values, (count, width), self.codes.reshape(count, -1), scales, self.zeros)
        values = self.backend.decode(packed).view(batch, heads, units, rows, width)
        values = values.transpose(3, 4) if self.fmt.axis == "channel" else values
        return values.reshape(batch, heads, units * self.unit, self._head_dim).to(self.recent.dtype)

    def _zero_points(self) -> torch.Tensor | None:
        if self.zeros is None or self.scales is None:
            return None
        element = self.fmt.values.element
        assert isinstance(element, IntElement)
        return unpack_bits(self.zeros, element.bits, self.scales.numel()).view(self.scales.shape)

    def _set_zero_points(self, zero: torch.Tensor | None) -> None:
        element = self.fmt.values.element
        self.zeros = None if zero is None or element is None else pack_bits(zero.flatten(), element.bits)

    def _select_units(self, units: slice) -> None:
        assert self.codes is not None
        assert self.scales is not None
        zero = self._zero_points()
        self.codes, self.scales = self.codes[:, :, units], self.scales[:, :, units]
        self._set_zero_points(None if zero is None else zero[:, :, units])
        if not self.codes.shape[2]:
            self.codes = self.scales = self.zeros = None


class PackedLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """One layer of the cache; grows with the text."""

    def __init__(self, key: PackedTokens, value: PackedTokens) -> None:
        super().__init__()
        self.key, self.value = key, value

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:  # noqa: ARG002
        """Note the device; the bytes are held in `key` and `value`."""
        self.device, self.is_initialized = key_states.device, True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens [batch, KV heads, tokens, head_dim]; return all of them as attention reads them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.key.append(key_states)
        self.value.append(value_states)
        return self.key.read(), self.value.read()

    def get_seq_length(self) -> int:
        """Return the number of tokens held."""
        return self.key.tokens

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + self.value.nbytes

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens; a positive number is the length to keep."""
        remove = -tokens_to_remove if tokens_to_remove < 0 else max(0, self.get_seq_length() - tokens_to_remove)
        if self.is_initialized and remove and tokens_to_remove:
            self.key.drop_last(remove)
            self.value.drop_last(remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Take the rows of the batch in this order."""
        if self.is_initialized:
            self.key.select(beam_idx)
            self.value.select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        if self.is_initialized:
            assert self.key.recent is not None
            self.reorder_cache(torch.arange(self.key.recent.shape[0]).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything."""
        self.key, self.value = (PackedTokens(side.fmt, side.absmax, side.backend) for side in (self.key, self.value))
        self.is_initialized = False


class PackedSlidingLayer(PackedLayer):
    """A layer that reads only the newest `sliding_window` tokens, and holds one less (rounded up to whole groups)."""

    is_sliding = True
    is_croppable = False

    def __init__(self, key: PackedTokens, value: PackedTokens, sliding_window: int) -> None:
        super().__init__(key, value)
        self.sliding_window = sliding_window
        self.cumulative_length = 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens; return those that the mask of `get_mask_sizes` is about."""
        visible = min(self.cumulative_length, self.sliding_window - 1) + key_states.shape[2]
        self.cumulative_length += key_states.shape[2]
        keys, values = super().update(key_states, value_states)
        for side in (self.key, self.value):
            side.keep_last(self.sliding_window - 1)
        return keys[:, :, -visible:], values[:, :, -visible:]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (tokens read, position of the first) for so many queries to come."""
        held = min(self.cumulative_length, self.sliding_window - 1)
        return held + query_length, max(0, self.cumulative_length - self.sliding_window + 1)

    def get_seq_length(self) -> int:
        """Return the number of tokens seen."""
        return self.cumulative_length

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: what left the window cannot come back."""
        if tokens_to_remove:
            raise RuntimeError("a sliding-window layer of a packed cache cannot be cropped: tokens that left the window are gone")

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.cumulative_length = 0


class QuantizedKVCache(Cache):  # type: ignore[misc]
    """A `past_key_values` whose layers hold packed bytes: `model.generate(..., past_key_values=cache)`.

    Batches, left padding, beam search and cropping work as with transformers' own DynamicCache; so do sliding-window layers, cropping
    apart.
    """

    @classmethod
    def from_formats(
        cls, key_value: dict[int, tuple[KVFormat, KVFormat]], absmax: dict[int, tuple[float, float]], config: PreTrainedConfig,
        backend: Backend | None = None,
    ) -> QuantizedKVCache:  # fmt: skip
        """Return an empty cache for a model of this config.

        Args:
            key_value: layer index -> formats of K and V; other layers stay in 16 bit. absmax: calibrated magnitudes of both.

        Raises UserError for a channel format whose sink is no whole number of groups.
        """
        backend = backend or Backend()
        layers: list[Any] = list(DynamicCache(config=config).layers)
        count = config.get_text_config(decoder=True).num_hidden_layers
        layers += [DynamicLayer() for _ in range(count - len(layers))]
        for index, layer in enumerate(layers):
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                continue  # the state of a linear-attention layer
            formats = key_value.get(index, (ORIGINAL, ORIGINAL))
            for fmt in formats:
                if fmt.axis == "channel" and fmt.sink % (fmt.values.block or 1):
                    raise UserError(
                        f"{fmt.name}: a cache packs whole groups of {fmt.values.block} tokens, give a sink that is a multiple"
                    )
            key, value = (PackedTokens(f, a, backend) for f, a in zip(formats, absmax.get(index, (0.0, 0.0)), strict=True))
            sliding = isinstance(layer, DynamicSlidingWindowLayer)
            layers[index] = PackedSlidingLayer(key, value, layer.sliding_window) if sliding else PackedLayer(key, value)
        return cls(layers=layers)

    @classmethod
    def from_recipe(cls, recipe: Recipe, config: PreTrainedConfig, backend: Backend | None = None) -> QuantizedKVCache:
        """Return an empty cache with the recipe's formats for a model of this config."""
        formats, absmax = recipe.cache_formats(), recipe.absmax()

        def both(found: dict[str, Any], module: str) -> Any:
            return found[f"{module}.key"], found[f"{module}.value"]

        return cls.from_formats(
            {e.layer: both(formats, e.module) for e in recipe.kv},
            {e.layer: both(absmax, e.module) for e in recipe.kv},
            config,
            backend,
        )

    def steps(self, tokens: int, largest: int) -> list[int]:
        """Return sizes of prefill steps, at most `largest` tokens, that give exactly what decoding token by token gives.

        Attention reads the cache as it is after a step's last token. Where a format packs a group, or lets a token out of its residual,
        a step may therefore end before the token that brings that about, but not go over it.
        """
        formats = {side.fmt for layer in self.packed_layers for side in (layer.key, layer.value)}
        changes = [(f.values.block or 1 if f.axis == "channel" else 1, f.residual) for f in formats if not f.is_original]
        moving = [(unit, residual) for unit, residual in changes if unit > 1 or residual]

        def starts_step(token: int) -> bool:
            return any(token + 1 > residual and (token + 1 - residual) % unit == 0 for unit, residual in moving)

        sizes: list[int] = []
        for token in range(tokens):
            if not sizes or sizes[-1] == largest or starts_step(token):
                sizes.append(0)
            sizes[-1] += 1
        return sizes

    @property
    def packed_layers(self) -> list[PackedLayer]:
        """The attention layers."""
        return [layer for layer in self.layers if isinstance(layer, PackedLayer)]

    @property
    def nbytes(self) -> int:
        """Bytes that all packed layers hold."""
        return sum(layer.nbytes for layer in self.packed_layers)
