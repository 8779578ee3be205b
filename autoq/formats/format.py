"""What a number format is: element, block, scale, and the bits it stores, counted in integers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from autoq.errors import UserError

ScaleType = Literal["fp32", "fp16", "e4m3", "e8m0", "none"]
ScaleRule = Literal["absmax", "full_range", "half_step", "4over6", "least_squares", "floor", "ceil", "even", "minmax"]
SCALE_BITS: dict[ScaleType, int] = {"fp32": 32, "fp16": 16, "e4m3": 8, "e8m0": 8, "none": 0}


@dataclass(frozen=True)
class FloatElement:
    """A small floating-point number: sign, exponent, mantissa; round to nearest even, saturating at `largest`.

    Source: OCP Microscaling Formats (MX) 1.0, section 5.3 (E2M1, E2M3, E3M2); OCP 8-bit Floating Point 1.0 (E4M3, E5M2).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest number (`emax` of the MX specification)."""
        return math.frexp(self.largest)[1] - 1


@dataclass(frozen=True)
class IntElement:
    """An integer of n bits: two's complement around zero, or unsigned around a zero point when `asymmetric`."""

    bits: int
    asymmetric: bool = False

    @property
    def name(self) -> str:
        return f"INT{self.bits}" + (" asym" if self.asymmetric else "")

    @property
    def low(self) -> int:
        return 0 if self.asymmetric else -(1 << (self.bits - 1))

    @property
    def high(self) -> int:
        return (1 << self.bits) - 1 if self.asymmetric else (1 << (self.bits - 1)) - 1


Element = FloatElement | IntElement

E2M1 = FloatElement("E2M1", 2, 1, 1, 6.0)
E2M3 = FloatElement("E2M3", 2, 3, 1, 7.5)
E3M2 = FloatElement("E3M2", 3, 2, 3, 28.0)
E4M3 = FloatElement("E4M3", 4, 3, 7, 448.0)
E5M2 = FloatElement("E5M2", 5, 2, 15, 57344.0)


@dataclass(frozen=True)
class Format:
    """How a matrix [rows, width] is stored: an element code per value, one scale per block of a row.

    Attributes:
        element: the number stored for each value; None keeps 16 bit.
        block: values of a row that share a scale; None is the whole row. A ragged last block is padded, and priced.
        scale: the type the block scales are stored in; they are used as stored.
        rule: how the encoder picks the scale. Formats that differ in nothing else are rounding variants of one price.
        tensor_scale: one more fp32 scale for the matrix (NVFP4); `tensor_range` is the block scale it maps the largest to.
        activation: the format of the layer's input when it is quantized too (W4A4, W8A8), with dynamic scales.
    """

    name: str
    element: Element | None
    block: int | None = None
    scale: ScaleType = "none"
    rule: ScaleRule = "absmax"
    tensor_scale: bool = False
    tensor_range: float = 448.0
    activation: Format | None = None

    @property
    def is_original(self) -> bool:
        """True for the 16-bit original, which stores the values as they are."""
        return self.element is None

    def blocks(self, width: int) -> int:
        """Number of blocks, and of scales, in a row of `width` values."""
        return 1 if self.block is None else -(-width // self.block)

    def row_code_bytes(self, width: int) -> int:
        """Bytes of the element codes of one row, the padding of a ragged last block included."""
        if self.element is None:
            return 2 * width
        stored = width if self.block is None else self.blocks(width) * self.block
        return -(-stored * self.element.bits // 8)

    def storage_bits(self, shape: tuple[int, ...]) -> int:
        """Return the bits stored for a tensor of shape [..., rows, width]: codes, padding, scales, zero points.

        Leading dimensions count separate matrices (the experts of a layer), each with its own tensor scale.
        """
        width, rows = shape[-1], math.prod(shape[:-1])
        matrices = math.prod(shape[:-2])
        total = 8 * rows * self.row_code_bytes(width)
        if self.element is None:
            return total
        scales = rows * self.blocks(width)
        total += scales * SCALE_BITS[self.scale]
        if isinstance(self.element, IntElement) and self.element.asymmetric:
            total += 8 * matrices * -(-(scales // max(1, matrices)) * self.element.bits // 8)
        return total + (32 * matrices if self.tensor_scale else 0)

    def refusal(self, width: int) -> str | None:
        """Say why a row of `width` values cannot take this format, or None if it can."""
        if self.block is not None and width < self.block:
            return f"a width of {width} is less than one block of {self.block}"
        return None


@dataclass(frozen=True)
class KVFormat:
    """How the K (or V) cache of a layer is stored; values are [batch, KV heads, tokens, head_dim].

    Attributes:
        values: the block format. Its blocks run along `axis`: "token" keeps every token apart (blocks along head_dim),
            "channel" groups the same channel of neighbouring tokens; the newest incomplete group stays in 16 bit.
        calibration: where the static scale comes from: "none" (no static scale), "absmax" (the profile's largest value
            in the layer) or a number that stands for that largest value (the *_cast formats need no calibration).
        residual: the newest tokens, kept in 16 bit.
        sink: the first tokens, kept in 16 bit.
        refresh: the static scale is recomputed every so many tokens after the sink, for every sequence, to cover the largest magnitude of
            as many tokens before; the first of them are under the calibrated one. 0: never.
        tier, older: the newest `tier` of the packed tokens are in this format, those before them in the format `older`, which encodes
            what this one had made of them. Tokens go over in units that both formats pack whole.
        center: a static mean per head and channel is taken off before encoding and added after decoding; stored in float16.
        rotate: values are rotated along head_dim (`autoq.formats.rotation`) before encoding; a key's query is rotated with it.
    """

    name: str
    values: Format
    axis: Literal["token", "channel"] = "token"
    calibration: Literal["none", "absmax"] | float = "none"
    residual: int = 0
    sink: int = 0
    center: bool = False
    rotate: bool = False
    tier: int = 0
    older: KVFormat | None = None
    refresh: int = 0

    def __post_init__(self) -> None:
        if self.refresh and (self.axis == "channel" or self.calibration == "none"):
            raise UserError(f"{self.name}: only static scales can be refreshed, and this format has none")
        if self.older is not None and (self.older.is_original or self.older.sink or self.older.residual or self.is_original):
            raise UserError(f"{self.name}: the first and the newest tokens are 16 bit by sink and residual of the first format")
        if self.refresh and self.older is not None:
            raise UserError(f"{self.name}: tiers and refreshed scales do not go together")
        for fmt in self.chain:
            if self.sink % fmt.unit:
                raise UserError(f"{self.name}: whole groups of {fmt.unit} tokens are packed, give a sink that is a multiple")

    @property
    def unit(self) -> int:
        """Tokens that are packed together."""
        return (self.values.block or 1) if self.axis == "channel" else 1

    @property
    def chain(self) -> tuple[KVFormat, ...]:
        """This format, and those that its tokens go over to as they age."""
        return (self,) if self.older is None else (self, *self.older.chain)

    @property
    def is_original(self) -> bool:
        return self.values.is_original

    @property
    def is_causal(self) -> bool:
        """True if what a query reads of an older token does not depend on the query's own position."""
        return self.axis == "token" and self.residual == 0 and self.sink == 0 and self.older is None

    def packed_tokens(self, tokens: int) -> tuple[int, ...]:
        """Return how many of `tokens` cached tokens, those after the sink, each format of the chain holds packed."""
        count = max(0, tokens - self.sink - self.residual) // self.unit * self.unit
        counts = []
        for fmt in self.chain:
            aged = 0
            if fmt.older is not None:
                unit = math.lcm(fmt.unit, fmt.older.unit)
                aged = max(0, count - fmt.tier) // unit * unit
            counts.append(count - aged)
            count = aged
        return tuple(counts)

    def for_head_dim(self, head_dim: int) -> KVFormat:
        """Return the format with a group that fits: the largest divisor of head_dim not above the nominal group.

        Raises UserError when only groups of one value would fit, or nothing can be rotated.
        """
        block = self.values.block
        if self.older is not None:
            fitted = replace(self, older=None).for_head_dim(head_dim)
            return replace(fitted, older=self.older.for_head_dim(head_dim))
        if self.rotate and head_dim % 2:
            raise UserError(f"{self.name} rotates pairs of channels at least, and a head_dim of {head_dim} is odd: use nvfp4")
        if self.axis == "channel" or block is None or head_dim % block == 0:
            return self
        if self.values.scale in ("e4m3", "e8m0"):  # the block size is part of the format; a ragged block is padded
            return self
        fitting = max(d for d in range(1, block + 1) if head_dim % d == 0)
        if fitting == 1:
            raise UserError(f"no group of {self.name} fits a head_dim of {head_dim}: use a format without groups, such as fp8")
        return replace(self, values=replace(self.values, block=fitting))

    def storage_bits(self, tokens: int, kv_heads: int, head_dim: int, batch: int = 1) -> int:
        """Return the bits that `batch` sequences of `tokens` tokens take in one layer, for K or for V alone."""
        held = self.packed_tokens(tokens)
        bits = 16 * batch * (tokens - sum(held)) * kv_heads * head_dim
        for fmt, count in zip(self.for_head_dim(head_dim).chain, held, strict=True):
            if count:
                shape = (kv_heads, count, head_dim) if fmt.axis == "token" else (kv_heads, head_dim, count)
                refreshed = -(-count // fmt.refresh) - 1 if fmt.refresh else 0
                bits += 32 * batch * refreshed
                bits += batch * fmt.values.storage_bits(shape) + (16 * kv_heads * head_dim if fmt.center else 0)
        return bits
