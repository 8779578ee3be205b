"""The K or the V cache of one layer in packed bytes: append tokens, read them back, crop, reorder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from autoq.codec import static_absmax
from autoq.formats import reference
from autoq.formats.format import Format, IntElement, KVFormat
from autoq.formats.reference import Packed, Scales
from autoq.formats.rounding import pack_bits, unpack_bits

if TYPE_CHECKING:
    from autoq.kernels.attention import CachedTokens

Encode = Callable[[Format, torch.Tensor, "torch.Tensor | None"], Packed]
Decode = Callable[[Packed], torch.Tensor]


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

    def cached(self) -> CachedTokens:
        """Return what `autoq.kernels.attention` reads; nothing is copied."""
        from autoq.kernels.attention import CachedTokens

        assert self.recent is not None
        return CachedTokens(self.fmt, self.codes, self.scales, self.zeros, self._scale, self.sink, self.recent)

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
