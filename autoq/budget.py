"""What a user allows: bits per weight, bytes, or a share of the original; and bits per cached value."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from autoq.errors import UserError

BITS_TOLERANCE = 0.001  # 4.5bits admits uniform nvfp4, whose tensor scales make it 4.500002
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_FORM = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*(bits?|%|[kKmMgGtT]i?B|B)?\s*$")


@dataclass(frozen=True)
class Budget:
    """A limit as it was asked for. `value` is in bits per value, bytes, or percent, by `unit`."""

    text: str
    value: float
    unit: Literal["bits", "bytes", "percent"]

    def limit_bits(self, numel: int, other_bits: int = 0, original_bits: int | None = None) -> int:
        """Return the most bits that `numel` searched values may take together.

        Bits per value count the searched values alone. Bytes and percent limit the whole model: what the tensors left out of
        the search take (`other_bits`) comes off first, and percent is of `original_bits`, everything at 16 bit.
        """
        if self.unit == "bits":
            return int((self.value + BITS_TOLERANCE) * numel)
        if self.unit == "bytes":
            return int(self.value * 8) - other_bits
        total = original_bits if original_bits is not None else 16 * numel + other_bits
        return int(self.value / 100 * total) - other_bits


@dataclass(frozen=True)
class Budgets:
    """Limits on the weights, on the cache, and on both together; a side without any limit keeps 16 bit.

    Attributes:
        memory: for all weights, embeddings too, plus the cache. context, batch: the cache is that of so many tokens and sequences.
        page: tokens that the engine allots at a time; the last page of a sequence is counted whole.
    """

    weights: Budget | None = None
    kv: Budget | None = None
    memory: Budget | None = None
    context: int = 8192
    batch: int = 1
    page: int = 1

    @property
    def tokens(self) -> int:
        """Tokens that a sequence takes room for."""
        return -(-self.context // self.page) * self.page

    @property
    def in_bytes(self) -> bool:
        """True if the cache has to fit into bytes: then it must fit at every context up to the one asked for."""
        return self.memory is not None or (self.kv is not None and self.kv.unit != "bits")

    @property
    def search_weights(self) -> bool:
        return self.weights is not None or self.memory is not None

    @property
    def search_caches(self) -> bool:
        return self.kv is not None or self.memory is not None


def parse_budget(text: str, option: str = "--budget") -> Budget:
    """Read `4.5bits`, `4.5`, `60MiB` or `35%`; raises UserError."""
    found = _FORM.match(text)
    if not found or not 0 < float(found.group(1)) < 1e15:
        raise UserError(f"{option} {text!r} is not a budget: write bits per value (4.5bits), bytes (60MiB) or a share (35%)")
    value, unit = float(found.group(1)), found.group(2) or "bits"
    if unit == "%":
        return Budget(text.strip(), value, "percent")
    if unit.startswith("bit"):
        return Budget(f"{value:g}bits", value, "bits")
    scale = _UNITS[unit if unit in _UNITS else unit[0].upper() + unit[1:]]
    return Budget(text.strip(), value * scale, "bytes")


def parse_bytes(text: str, option: str) -> int:
    """Read `24GiB`; raises UserError."""
    try:
        found = parse_budget(text, option)
    except UserError:
        found = None
    if found is None or found.unit != "bytes":
        raise UserError(f"{option} {text!r}: give bytes, such as 24GiB or 500MB")
    return int(found.value)


def parse_size(text: str, option: str = "--context") -> int:
    """Read a count of tokens such as `4096`, `32k` or `1M` (k = 1,024); raises UserError."""
    found = re.match(r"^\s*([0-9]{1,15})\s*([kKmM]?)\s*$", text)
    if not found or int(found.group(1)) == 0:
        raise UserError(f"{option} {text!r} is not a number of tokens: write 4096, 32k or 1M")
    return int(found.group(1)) * {"": 1, "k": 2**10, "m": 2**20}[found.group(2).lower()]


def parse_count(text: str, option: str) -> int:
    """Read a whole number; raises UserError."""
    if not re.fullmatch(r"\s*-?[0-9]{1,12}\s*", text):
        raise UserError(f"{option} {text!r} is not a whole number, or several such as 1,8")
    return int(text)


def parse_duration(text: str, option: str = "--timeout") -> float:
    """Read a time such as `90`, `90s`, `15m` or `2h` in seconds; raises UserError."""
    found = re.match(r"^\s*([0-9]*\.?[0-9]+)\s*(s|m|h)?\s*$", text)
    if not found or float(found.group(1)) == 0:
        raise UserError(f"{option} {text!r} is not a time: write 90s, 15m or 2h")
    return float(found.group(1)) * {None: 1, "s": 1, "m": 60, "h": 3600}[found.group(2)]
