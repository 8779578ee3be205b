"""What a consumer is: the formats it has, how it may mix cache formats, what it writes, and how it matches names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autoq.cost.engines import Mixing, stored
from autoq.exporters.subject import Layer, Subject
from autoq.formats.catalog import WEIGHT_FORMATS
from autoq.formats.format import Format, KVFormat

Round = str  # one of ROUNDS
ROUNDS = ("none", "scales", "up")


@dataclass(frozen=True)
class Found:
    """What a consumer's own rules make of a document, on the modules of a model.

    Attributes:
        weights: format by layer name; a layer that is not named stays in 16 bit. caches: (key, value) by attention module.
        problems: keys that match no module, modules that two keys match, numbers that autoq has no word for.
        notes: what the document also asks for, that a format does not say.
    """

    weights: Mapping[str, Format] = field(default_factory=dict)
    caches: Mapping[str, tuple[KVFormat, KVFormat]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


Writer = Callable[[Subject], dict[str, str]]
Reader = Callable[[Mapping[str, str], Subject], Found]


@dataclass(frozen=True)
class Consumer:
    """A tool or an engine that a recipe can be written for.

    Attributes:
        what: the document it takes, in words. weights: names of the formats it has, with the scales that it computes itself; None is
            every one. caches: the same for K and V. mixing: how cache formats may differ (see `autoq.cost.engines`).
        write: subject -> text by file name; every format in the subject is one of the consumer's. read: the way back, by the
            consumer's own matching rules; it also checks what `write` wrote. Its first argument is text by file name.
        layouts: of weights that it can quantize. overhead: bits that it stores of a layer beyond its format.
        refuses: says why it cannot take a layer in a format, or None.
        notes: what a user has to know of any document written for it.
        wider: why it stores more than its formats take, or "".
        engines: that load the checkpoints it makes, as far as they have the formats.
    """

    name: str
    what: str
    weights: tuple[str, ...] | None
    caches: tuple[str, ...] | None
    mixing: Mixing
    write: Writer
    read: Reader | None = None
    layouts: tuple[str, ...] = ("linear",)
    overhead: Callable[[Layer], int] = lambda layer: 0
    refuses: Callable[[Layer, Format], str | None] = lambda layer, fmt: None
    notes: tuple[str, ...] = ()
    wider: str = ""
    engines: tuple[str, ...] = ()

    def has(self, fmt: Format) -> bool:
        """True if it has this very format, scales included."""
        return fmt.is_original or self.weights is None or any(same_numbers(fmt, other) for other in self.formats())

    def formats(self) -> tuple[Format, ...]:
        """Return the formats it has."""
        return tuple(WEIGHT_FORMATS.values()) if self.weights is None else tuple(WEIGHT_FORMATS[name] for name in self.weights)


def same_numbers(one: Format, other: Format) -> bool:
    """True if two formats round every weight to the same value, whatever they are called."""

    def numbers(fmt: Format) -> tuple[object, ...]:
        return stored(fmt), fmt.rule, fmt.tensor_range if fmt.tensor_scale else None

    return numbers(one) == numbers(other)


def whole_groups(layer: Layer, fmt: Format) -> str | None:
    """Say why a consumer that packs whole groups only cannot take a layer, or None."""
    if fmt.block is not None and layer.width % fmt.block:
        return f"a width of {layer.width} is no multiple of the group size {fmt.block}"
    return None
