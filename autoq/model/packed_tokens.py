"""The K or the V cache of one layer in packed bytes: append tokens, read them back, crop, reorder."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from autoq.formats import reference
from autoq.formats.calibration import Calibration
from autoq.formats.format import Format, IntElement, KVFormat
from autoq.formats.reference import Packed, Scales, tensor_scale
from autoq.formats.rotation import rotate
from autoq.formats.rounding import pack_bits
from autoq.model.growing import Growing, GrowingCodes
from autoq.model.segments import Segments

if TYPE_CHECKING:
    from autoq.kernels.attention import CachedTokens

Encode = Callable[[Format, torch.Tensor, "torch.Tensor | None"], Packed]
Decode = Callable[[Packed], torch.Tensor]


def _reference_encode(fmt: Format, x: torch.Tensor, absmax: torch.Tensor | None) -> Packed:
    return reference.encode(fmt, x, absmax=absmax)


@dataclass(frozen=True)
class Backend:
    """What encodes and decodes: the torch reference, or the kernels, whose attention can read the bytes as they are."""

    encode: Encode = _reference_encode
    decode: Decode = reference.decode
    attends: bool = False


def backend_for(device: torch.device) -> Backend:
    """Return the kernels on a GPU, the reference elsewhere."""
    return kernels() if device.type == "cuda" else Backend()


def kernels() -> Backend:
    """Return the Triton kernels (native on a GPU, interpreted on a CPU if Triton's interpreter is on)."""
    from autoq.kernels.decode import decode
    from autoq.kernels.encode import encode

    return Backend(encode, decode, attends=True)


class PackedTokens:
    """The K or the V cache of one layer: [batch, KV heads, tokens, head_dim], most of it packed.

    A rotated format's tokens are rotated when they come in, those kept in 16 bit too, and rotated back when they are read.

    Attributes:
        codes: uint8 [batch, KV heads, units, rows of a unit, bytes]; a unit is a token (one row of head_dim values) or, for a
            channel format, a group of tokens (head_dim rows of group values).
        scales: [batch, KV heads, units, rows, blocks] as stored. zeros: the zero points in that order, one bit stream a head.
        sink, recent: [batch, KV heads, tokens, head_dim] in 16 bit, before and after the packed tokens; `recent` holds them all
            where the format is the 16-bit original.

    Args:
        calibration: for static scales and means. reserve: tokens to take memory for at once.

    Raises UserError at the first token for a head_dim that the format does not fit.
    """

    def __init__(self, fmt: KVFormat, calibration: Calibration, backend: Backend | None = None, reserve: int = 0) -> None:
        self.fmt, self.calibration, self.backend, self.reserve = fmt, calibration, backend, reserve
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        units = -(-self.reserve // self.fmt.unit)
        element = self.fmt.values.element
        has_zeros = isinstance(element, IntElement) and element.asymmetric
        self.codes, self.scales = Growing(units), Growing(units)
        self.zeros = GrowingCodes(element.bits, units) if has_zeros and element is not None else None
        self.recent = Growing(self.reserve if self.fmt.is_original else self.fmt.residual + 2 * self.fmt.unit)
        self.sink: torch.Tensor | None = None
        older = self.fmt.older
        self.older = None if older is None else PackedTokens(older, self.calibration, self.backend, self.reserve)
        self._tensor_scale: torch.Tensor | None = None
        self._mean: torch.Tensor | None = None  # float32 [KV heads, 1, head_dim]
        self._segments: Segments | None = None
        self._sunk = 0  # tokens that went into the sink; a window may have left them behind

    @property
    def attends(self) -> bool:
        """True if attention may read the bytes as they are."""
        return self.backend is not None and self.backend.attends and self.older is None and not self.fmt.refresh

    @property
    def packed(self) -> int:
        """Number of packed tokens that have not gone over to an older format."""
        return self.codes.length * self.fmt.unit

    @property
    def tokens(self) -> int:
        aged = 0 if self.older is None else self.older.tokens
        return aged + self.packed + self.recent.length + (0 if self.sink is None else self.sink.shape[2])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return (batch, KV heads, tokens, head_dim)."""
        assert self.recent.memory is not None
        batch, heads, _, head_dim = self.recent.memory.shape
        return batch, heads, self.tokens, head_dim

    @property
    def values_held(self) -> int:
        """Number of cached values."""
        return 0 if self.recent.memory is None else math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens held; what is in 16 bit is counted as 2 bytes a value whatever the model computes in."""
        if self.recent.memory is None:
            return 0
        total = 2 * self.recent.used.numel() + (0 if self.sink is None else 2 * self.sink.numel())
        total += 0 if self.older is None else self.older.nbytes
        if not self.codes.length:
            return total
        stored = [self.codes.used] + ([] if self.fmt.values.scale == "none" else [self.scales.used])
        means = 0 if self._mean is None else 2 * self._mean.numel()  # float16, once for all sequences
        total += 0 if self._segments is None else self._segments.nbytes
        return total + means + sum(t.numel() * t.element_size() for t in stored) + (self.zeros.nbytes if self.zeros else 0)

    def append(self, x: torch.Tensor) -> None:
        """Add new tokens [batch, KV heads, tokens, head_dim], and pack what is no longer among the newest."""
        if self.recent.memory is None:
            self.fmt = self.fmt.for_head_dim(x.shape[-1])
            self.backend = self.backend or backend_for(x.device)
            self._static = self.calibration.static(self.fmt, x)
            self._mean = self.calibration.mean_like(x) if self.fmt.center else None
            if self.fmt.refresh and self._static is not None:
                self._segments = Segments(self.fmt.refresh, self._static, x.shape[0])
        if self.fmt.rotate:
            x = rotate(x)
        if self.fmt.sink and not self.fmt.is_original:
            room = max(0, self.fmt.sink - self._sunk)
            first, x = x[:, :, :room], x[:, :, room:]
            self.sink = first if self.sink is None else torch.cat([self.sink, first], dim=2)
            self._sunk += first.shape[2]
        held = self.recent.length
        ready = 0 if self.fmt.is_original else max(0, held + x.shape[2] - self.fmt.residual) // self.fmt.unit * self.fmt.unit
        if ready:
            waiting = min(held, ready)
            parts = [self.recent.used[:, :, :waiting]] if waiting else []
            self._pack(torch.cat([*parts, x[:, :, : ready - waiting]], dim=2))
            self.recent.drop_first(waiting)
            x = x[:, :, ready - waiting :]
        self.recent.append(x)
        if self.older is not None and self.fmt.older is not None:
            unit = math.lcm(self.fmt.unit, self.fmt.older.unit)
            aged = max(0, self.packed - self.fmt.tier) // unit * unit
            if aged:
                self.older.append(self._restored(self._decode()[:, :, :aged]))
                for part in self._stored:
                    part.drop_first(aged // self.fmt.unit)

    def read(self) -> torch.Tensor:
        """Return all tokens as attention reads them, in the dtype they came in."""
        sink = None if self.sink is None else self._restored(self.sink)
        aged = None if self.older is None or not self.older.values_held else self.older.read()
        packed = self._restored(self._decode()) if self.codes.length else None
        recent = self._restored(self.recent.used)
        found = [p for p in (sink, aged, packed, recent) if p is not None and p.shape[2]]
        return torch.cat(found, dim=2) if len(found) > 1 else (found or [recent])[0]

    def _restored(self, values: torch.Tensor) -> torch.Tensor:
        return rotate(values) if self.fmt.rotate else values

    def cached(self) -> CachedTokens:
        """Return what `autoq.kernels.attention` reads; nothing is copied."""
        from autoq.kernels.attention import CachedTokens

        if not self.codes.length:
            return CachedTokens(self.fmt, None, None, None, 0, None, self.sink, self.recent.used)
        zeros, first = (None, 0) if self.zeros is None else (self.zeros.memory, self.zeros.start * self.zeros.codes)
        return CachedTokens(
            self.fmt, self.codes.used, self.scales.used, zeros, first, self._tensor_scale, self.sink, self.recent.used, self._mean
        )  # fmt: skip

    def keep_last(self, tokens: int) -> None:
        """Forget the oldest tokens: all but `tokens`, rounded up to whole units; groups start where they did."""
        extra = self.tokens - tokens
        if extra > 0 and self.sink is not None and self.sink.shape[2]:
            dropped = min(extra, self.sink.shape[2])
            self.sink, extra = self.sink[:, :, dropped:], extra - dropped
        if extra > 0 and self.older is not None and self.older.values_held:
            before = self.older.tokens
            self.older.keep_last(max(0, before - extra))
            extra -= before - self.older.tokens
            if self.older.tokens:
                return
        if extra > 0 and self.codes.length:
            units = min(extra // self.fmt.unit, self.codes.length)
            for part in self._stored:
                part.drop_first(units)
            extra -= units * self.fmt.unit
        if extra > 0 and not self.codes.length:
            self.recent.drop_first(min(extra, self.recent.length) // self.fmt.unit * self.fmt.unit)

    def drop_last(self, tokens: int) -> None:
        """Forget the newest tokens; those of a group that is cut are read back into 16 bit."""
        if tokens > self.recent.length and self.codes.length:
            units = min(-(-(tokens - self.recent.length) // self.fmt.unit), self.codes.length)
            left = self.codes.length - units
            decoded = self._decode()
            tail = torch.cat([decoded[:, :, left * self.fmt.unit :], self.recent.used], dim=2)
            for part in self._stored:
                part.drop_last(units)
            if self._segments is not None:
                encoded = decoded[:, :, :left]
                self._segments.drop_last(units, encoded if self._mean is None else encoded - self._mean)
            self.recent.drop_last(self.recent.length)
            self.recent.append(tail)
        beyond = tokens - self.recent.length
        self.recent.drop_last(min(tokens, self.recent.length))
        if beyond > 0 and self.older is not None and self.older.values_held:
            aged = min(beyond, self.older.tokens)
            self.older.drop_last(aged)
            beyond -= aged
        if beyond > 0 and self.sink is not None:
            self.sink = self.sink[:, :, : max(0, self.sink.shape[2] - beyond)]
            self._sunk = self.sink.shape[2]

    def select(self, batch: torch.Tensor) -> None:
        """Take these rows of the batch, in this order (beam search)."""
        for part in (*self._stored, self.recent):
            part.select(batch)
        if self.older is not None:
            self.older.select(batch)
        if self._segments is not None:
            self._segments.select(batch)
        self.sink = None if self.sink is None else self.sink.index_select(0, batch.to(self.sink.device))

    @property
    def _stored(self) -> list[Growing]:
        """What grows with the packed tokens."""
        return [self.codes, self.scales] + ([] if self.zeros is None else [self.zeros])

    def _pack(self, x: torch.Tensor) -> None:
        """x [batch, KV heads, whole units of tokens, head_dim]."""
        if self._mean is not None:
            x = (x - self._mean).to(x.dtype)
        if self._segments is None:
            self._store(self._encode(x, self._static))
            return
        for part, covered in self._segments.split(x):
            found = [self._encode(row.unsqueeze(0), absmax) for row, absmax in zip(part, covered, strict=True)]
            self._store((torch.cat([f[0] for f in found]), torch.cat([f[1] for f in found]), None))

    def _encode(self, x: torch.Tensor, absmax: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return codes, scales and zero points, [batch, KV heads, units, rows, ...] each."""
        assert self.backend is not None
        batch, heads, tokens = x.shape[:3]
        units = tokens // self.fmt.unit
        rows = x.unflatten(2, (units, self.fmt.unit))
        rows = rows.transpose(3, 4) if self.fmt.axis == "channel" else rows
        packed = self.backend.encode(self.fmt.values, rows.reshape(-1, rows.shape[-1]), absmax)
        assert packed.scales is not None
        self._tensor_scale = packed.scales.tensor
        shape = (batch, heads, units, rows.shape[3], -1)
        zero = None if packed.scales.zero is None else packed.scales.zero.view(batch, heads, units, -1)
        return packed.codes.view(shape), packed.scales.block.view(shape), zero

    def _store(self, parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]) -> None:
        codes, scales, zero = parts
        self.codes.append(codes)
        self.scales.append(scales)
        if self.zeros is not None and zero is not None:
            self.zeros.append(zero)

    def _decode(self) -> torch.Tensor:
        """Return the packed tokens as they were encoded, the mean added: [batch, KV heads, tokens, head_dim]."""
        codes, scales = self.codes.used, self.scales.used
        zero = None if self.zeros is None else self.zeros.used
        if self._segments is None:
            values = self._decode_part(codes, scales, zero, self._tensor_scale)
        else:
            parts = [
                torch.cat([
                    self._decode_part(codes[b : b + 1, :, at], scales[b : b + 1, :, at], None, tensor_scale(self.fmt.values, absmax))
                    for b, absmax in enumerate(covered)
                ])
                for at, covered in self._segments.of(self.codes.length)
            ]  # fmt: skip
            values = torch.cat(parts, dim=2)
        return values if self._mean is None else (values + self._mean).to(values.dtype)

    def _decode_part(
        self, codes: torch.Tensor, scales: torch.Tensor, zero: torch.Tensor | None, tensor: torch.Tensor | None
    ) -> torch.Tensor:
        assert self.backend is not None
        batch, heads, units, rows, _ = codes.shape
        head_dim = self.shape[3]
        width = self.fmt.unit if self.fmt.axis == "channel" else head_dim
        count = batch * heads * units * rows
        flat = None if zero is None else zero.reshape(count, -1)
        stream = None if flat is None or self.zeros is None else pack_bits(flat.flatten(), self.zeros.bits)
        packed = Packed(
            self.fmt.values, (count, width), codes.reshape(count, -1), Scales(scales.reshape(count, -1), flat, tensor), stream
        )
        values = self.backend.decode(packed).view(batch, heads, units, rows, width)
        values = values.transpose(3, 4) if self.fmt.axis == "channel" else values
        return values.reshape(batch, heads, units * self.fmt.unit, head_dim).to(self.recent.used.dtype)
