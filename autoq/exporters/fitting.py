"""Fit a recipe to what a consumer has: say what is lost, and round only as far as was asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch

from autoq.cost.engines import stored
from autoq.exporters.consumer import ROUNDS, Consumer, Round, same_numbers
from autoq.exporters.subject import KV_ORIGINAL, ORIGINAL, Attention, Layer, Subject
from autoq.formats import reference
from autoq.formats.catalog import kv_format
from autoq.formats.format import Format, KVFormat

ALIKE = 1.02  # errors of caches that differ by less are alike: fp8 with a calibrated scale and without


@dataclass(frozen=True)
class Loss:
    """What a consumer cannot say.

    Attributes:
        what: a unit, or "K and V of layers ...". wanted, got: format names; got is None where nothing was done.
        why: in words. needs: the least `--round` that mends it.
    """

    what: str
    wanted: str
    got: str | None
    why: str
    needs: str

    def to_json(self) -> dict[str, str | None]:
        return {"what": self.what, "wanted": self.wanted, "got": self.got, "why": self.why, "round": self.needs}


def rounding_needed(losses: Iterable[Loss]) -> Round:
    """Return the least `--round` that mends them all."""
    return max((loss.needs for loss in losses), key=ROUNDS.index, default=ROUNDS[0])


def fit(subject: Subject, consumer: Consumer) -> tuple[Subject, list[Loss]]:
    """Return the subject in formats that the consumer has, and every difference to what was asked."""
    weights, losses = _fit_weights(subject, consumer)
    caches, more = _fit_caches(subject, consumer)
    return subject.with_formats(weights, caches), losses + more


# Weights


def _fit_weights(subject: Subject, consumer: Consumer) -> tuple[dict[str, Format], list[Loss]]:
    chosen: dict[str, Format] = {}
    losses = []
    units: dict[str, list[Layer]] = {}
    for layer in subject.layers:
        if layer.unit is not None:
            units.setdefault(layer.unit, []).append(layer)
    for name, layers in units.items():
        wanted = layers[0].format
        got, why, needs = _fit_unit(layers, wanted, consumer)
        if why is not None:
            losses.append(Loss(name, wanted.name, got.name, why, needs))
        chosen |= {layer.name: got for layer in layers}
    return chosen, losses


def _fit_unit(layers: list[Layer], wanted: Format, consumer: Consumer) -> tuple[Format, str | None, str]:
    """Return (the format, why it is another one or None, the --round that allows it); all layers of a unit take the same."""
    if wanted.is_original:
        return wanted, None, ""
    if odd := [layer.layout for layer in layers if layer.layout not in consumer.layouts]:
        return ORIGINAL, f"{consumer.name} does not reach weights stored as {odd[0]}", "up"

    def takes(fmt: Format) -> str | None:
        reasons = (fmt.refusal(layer.width) or consumer.refuses(layer, fmt) for layer in layers)
        return next((reason for reason in reasons if reason), None)

    if consumer.weights is None:
        return wanted, None, ""
    why = f"{consumer.name} has no {wanted.name}"
    exact = next((f for f in consumer.formats() if same_numbers(f, wanted)), None)
    alike = [f for f in consumer.formats() if stored(f) == stored(wanted)]
    if exact is not None:
        if (refused := takes(exact)) is None:
            return exact, None, ""
        why = f"{consumer.name} cannot: {refused}"
    elif alike:
        if (refused := takes(alike[0])) is None:
            return alike[0], f"the same format, but {consumer.name} picks the scales by itself ({alike[0].name})", "scales"
        why = f"{consumer.name} cannot: {refused}"
    shapes = [layer.shape for layer in layers]
    better = next_better(wanted, [f for f in consumer.formats() if takes(f) is None], shapes)
    return better, why, "up"


def next_better(wanted: Format, formats: Iterable[Format], shapes: list[tuple[int, ...]]) -> Format:
    """Return the smallest format that is no worse: not fewer bits, not more error on Gaussian weights; 16 bit if there is none.

    A format that quantizes the input too is never taken for one that does not.
    """

    def bits(fmt: Format) -> int:
        return sum(fmt.storage_bits(shape) for shape in shapes)

    able = [
        f for f in formats
        if _nominal(f) >= _nominal(wanted) and gaussian_error(f) <= gaussian_error(wanted) and (f.activation is None or wanted.activation is not None)
    ]  # fmt: skip
    return min(able, key=lambda f: (bits(f), gaussian_error(f)), default=ORIGINAL)


def _nominal(fmt: Format) -> int:
    """Bits of a weight that every block divides: a ragged one is padded, which makes nothing better."""
    return fmt.storage_bits((4096, 4096))


@cache
def gaussian_error(fmt: Format, static: float | None = None) -> float:
    """Return the relative squared error of a format on Gaussian values, drawn with a fixed seed.

    Args:
        static: the magnitude that a static scale covers; by default the largest there is.
    """
    if fmt.is_original:
        return 0.0
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    absmax = x.abs().amax() if static is None else torch.tensor(static)
    error = (reference.fake_quantize(fmt, x, absmax=absmax) - x).square().sum() / x.square().sum()
    return float(error)


# Caches

Pair = tuple[KVFormat, KVFormat]


def _fit_caches(subject: Subject, consumer: Consumer) -> tuple[dict[str, Pair], list[Loss]]:
    """Return (key, value) formats of every attention module, and what is lost."""
    wanted = {a.name: (a.key, a.value) for a in subject.attentions}
    if consumer.caches is None or all(a.is_original for a in subject.attentions):
        return wanted, []
    fitted = min(_ways(subject, consumer), key=lambda way: (_changes(way, wanted), _stored(subject, way)))
    losses = []
    for a in subject.attentions:
        for side, want, got in zip(("key", "value"), wanted[a.name], fitted[a.name], strict=True):
            if want.name != got.name:
                why = f"{consumer.name} has no {want.name} cache" if want.name not in consumer.caches else _mixing_words(consumer)
                losses.append(Loss(f"{a.name}.{side}", want.name, got.name, why, "up"))
    return fitted, losses


def _mixing_words(consumer: Consumer) -> str:
    words = {
        "one": "one format for K and V of all layers",
        "one and skipped": "one format for K and V of all layers but those that stay in 16 bit",
        "two": "one format for all K, one for all V",
        "free": "any format anywhere",
    }
    return f"{consumer.name} takes {words[consumer.mixing]}"


def _ways(subject: Subject, consumer: Consumer) -> list[dict[str, Pair]]:
    """Return what the consumer's rules of mixing allow, every format no worse than the wanted one."""
    assert consumer.caches is not None
    formats = [*(kv_format(name) for name in consumer.caches), KV_ORIGINAL]
    attentions = subject.attentions
    if consumer.mixing == "free":
        return [{a.name: (_least(a, a.key, formats), _least(a, a.value, formats)) for a in attentions}]
    found = []
    for keys in formats:
        for values in formats if consumer.mixing == "two" else [keys]:
            fits = {a.name: _no_worse(keys, a.key, a) and _no_worse(values, a.value, a) for a in attentions}
            if consumer.mixing == "one and skipped":
                found.append({name: (keys, values) if able else (KV_ORIGINAL, KV_ORIGINAL) for name, able in fits.items()})
            elif all(fits.values()):
                found.append(dict.fromkeys(fits, (keys, values)))
    return found  # 16 bit everywhere is always among them


def _least(attention: Attention, wanted: KVFormat, formats: list[KVFormat]) -> KVFormat:
    exact = next((f for f in formats if f.name == wanted.name), None)
    able = [f for f in formats if _no_worse(f, wanted, attention)]
    return exact or min(able, key=lambda f: _side_bits(f, attention), default=KV_ORIGINAL)


def _no_worse(fmt: KVFormat, wanted: KVFormat, attention: Attention) -> bool:
    """True if a cache in `fmt` is as good as one in `wanted`.

    What a mean, a rotation or tokens kept in 16 bit are worth is not in the error of the elements: elements of more bits make up for it.
    """
    if fmt.name == wanted.name or fmt.is_original:
        return True
    if wanted.is_original or _side_bits(fmt, attention) < _side_bits(wanted, attention):
        return False
    if wanted.center or wanted.rotate or wanted.residual or wanted.sink or wanted.refresh or wanted.tier:
        mine, its = fmt.values.element, wanted.values.element
        return mine is not None and its is not None and mine.bits > its.bits
    return _kv_error(fmt) <= ALIKE * _kv_error(wanted)


def _side_bits(fmt: KVFormat, attention: Attention) -> int:
    return fmt.storage_bits(4096, attention.kv_heads, attention.head_dim)


@cache
def _kv_error(fmt: KVFormat) -> float:
    """Return the relative squared error on Gaussian values, under the static scale that fits them or the fixed one that it has."""
    return gaussian_error(fmt.values, None if isinstance(fmt.calibration, str) else fmt.calibration)


def _changes(way: dict[str, Pair], wanted: dict[str, Pair]) -> int:
    """0 if nothing is changed, else 1: the smallest of the ways that change something is taken."""
    return int(any(a.name != b.name for name in way for a, b in zip(way[name], wanted[name], strict=True)))


def _stored(subject: Subject, way: dict[str, Pair]) -> int:
    return subject.with_formats({}, way).kv_cost()[0]
