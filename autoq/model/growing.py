"""Memory of a cache that is taken ahead of the tokens it will hold: appending copies only what is new."""

from __future__ import annotations

import torch

from autoq.formats.rounding import pack_bits, unpack_bits

AHEAD = 64  # slots taken beyond what is needed, at least


class Growing:
    """Slots of a cache, [batch, KV heads, slots, ...], of which a stretch is in use.

    Forgetting at either end moves no data, unless what is left fills less than a quarter of the memory and of `reserve`. When the
    memory is full a quarter more than needed is taken, `reserve` slots at least.
    """

    def __init__(self, reserve: int = 0) -> None:
        self.reserve, self.start, self.length = reserve, 0, 0
        self.memory: torch.Tensor | None = None

    @property
    def used(self) -> torch.Tensor:
        """Return the slots in use; a view."""
        assert self.memory is not None
        return self.memory[:, :, self.start : self.start + self.length]

    def append(self, x: torch.Tensor) -> None:
        """Fill further slots with x [batch, KV heads, slots, ...]."""
        needed = self.length + x.shape[2]
        if self.memory is None or self.start + needed > self.memory.shape[2]:
            self._take(x, needed)
        assert self.memory is not None
        self.memory[:, :, self.start + self.length : self.start + needed] = x
        self.length = needed

    def drop_first(self, slots: int) -> None:
        """Forget the oldest slots."""
        self.start, self.length = self.start + slots, self.length - slots
        if self.memory is not None and self._capacity(self.length) < self.memory.shape[2] // 4:
            self._take(self.memory, self.length)

    def drop_last(self, slots: int) -> None:
        """Forget the newest slots."""
        self.length -= slots

    def select(self, batch: torch.Tensor) -> None:
        """Take these rows of the batch, in this order."""
        if self.memory is not None:
            self.memory = self.memory.index_select(0, batch.to(self.memory.device))

    def _capacity(self, needed: int) -> int:
        return max(self.reserve, needed + max(AHEAD, needed // 4))

    def _take(self, like: torch.Tensor, needed: int) -> None:
        """Move to new memory with room for `needed` slots [*like's batch and heads, slots, *the rest of like]."""
        taken = like.new_empty(*like.shape[:2], self._capacity(needed), *like.shape[3:])
        if self.memory is not None:
            taken[:, :, : self.length] = self.used
        self.memory, self.start = taken, 0


class GrowingCodes(Growing):
    """The same for codes of n bits, [batch, KV heads, slots, codes of a slot], held as one bit stream a head.

    `memory` is uint8 [batch, KV heads, bytes]; the first code of a byte is in its lowest bits. n divides 8.
    """

    def __init__(self, bits: int, reserve: int = 0) -> None:
        super().__init__(reserve)
        self.bits, self.codes = bits, 1

    def drop_first(self, slots: int) -> None:
        """Forget the oldest slots."""
        self.start, self.length = self.start + slots, self.length - slots

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in use, every head's last byte filled up."""
        if self.memory is None:
            return 0
        return self.memory.shape[0] * self.memory.shape[1] * -(-self.length * self.codes * self.bits // 8)

    @property
    def used(self) -> torch.Tensor:
        """Return the codes in use, one a uint8: [batch, KV heads, slots, codes of a slot]."""
        assert self.memory is not None
        first = self.start * self.codes * self.bits // 8
        before = self.start * self.codes - first * 8 // self.bits  # codes of the first byte that were forgotten
        count = self.length * self.codes
        held = self.memory[:, :, first : self._bytes(self.start + self.length)]
        codes = unpack_bits(held, self.bits, before + count)[:, :, before:]
        return codes.view(*codes.shape[:2], self.length, self.codes)

    def append(self, x: torch.Tensor) -> None:
        """Fill further slots with codes, one a uint8."""
        self.codes = x.shape[3]
        stop = self.start + self.length
        needed = self.length + x.shape[2]
        if self.memory is None or self._bytes(self.start + needed) > self.memory.shape[2]:
            taken = x.new_zeros(*x.shape[:2], self._bytes(self._capacity(needed)))
            if self.memory is not None and self.length:
                x = torch.cat([self.used, x], dim=2)
            self.memory, self.start, stop = taken, 0, 0
        first = stop * self.codes * self.bits // 8
        begun = stop * self.codes - first * 8 // self.bits  # codes of the first byte that are there already
        stream = x.flatten(2)
        if begun:
            stream = torch.cat([unpack_bits(self.memory[:, :, first : first + 1], self.bits, begun), stream], dim=2)
        packed = pack_bits(stream, self.bits)
        self.memory[:, :, first : first + packed.shape[2]] = packed
        self.length = needed

    def _bytes(self, slots: int) -> int:
        return -(-slots * self.codes * self.bits // 8)
