"""Check a recipe against a model, an engine, a device and a tool, without reading a weight: for CI."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoq import recipe as recipes
from autoq.api.entries import totals
from autoq.cost.bits import unit_bits
from autoq.cost.engines import Engine, engine_of, loads
from autoq.cost.targets import Target, target_of
from autoq.errors import UserError
from autoq.exporters.consumers import consumer_of
from autoq.exporters.fitting import fit
from autoq.exporters.limits import priced_tokens
from autoq.exporters.subject import KV_ORIGINAL, ORIGINAL, bare_subject
from autoq.formats.catalog import WEIGHT_FORMATS
from autoq.formats.format import Format, KVFormat
from autoq.model.cache_units import unsearchable
from autoq.model.given import shapes_of
from autoq.model.unit import ModelUnits
from autoq.model.units import find_units

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, repr=False)
class Checked:
    """What a check found.

    Attributes:
        problems: what is wrong with the recipe, in words; empty if it can be used.
        checks: what was looked at.
    """

    problems: tuple[str, ...]
    checks: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the object that `autoq check --json` prints."""
        return {"passed": not self.problems, "problems": list(self.problems), "checks": list(self.checks)}

    def __repr__(self) -> str:
        return "\n".join(self.problems) if self.problems else f"passed: {', '.join(self.checks)}"


def check(
    recipe: recipes.Recipe | Path | str, model: PreTrainedModel | str | None = None, engine: str | None = None, target: str | None = None,
    consumer: str | None = None,
) -> Checked:  # fmt: skip
    """Check names, tied tensors, widths, cache formats and sums; then what the engine, the device and the tool can have.

    Args:
        model: loaded, or a name, a folder or a GGUF file, by default the one that the recipe names; its config is enough.
        engine, target: by default those that the recipe was searched for. consumer: a name in CONSUMERS.

    Raises UserError for a recipe or a model that cannot be read.
    """
    recipe = recipe if isinstance(recipe, recipes.Recipe) else recipes.read_recipe(Path(recipe))
    served_by = engine_of(recipe.budget.engine if engine is None else engine)
    device = target_of(recipe.budget.target if target is None else target)
    tool = consumer_of(consumer) if consumer is not None else None
    source, _, empty = shapes_of(model or recipe.model.id)
    units = find_units(empty, ("lm_head",) if any(e.role == "head" or "lm_head" in n for n, e in recipe.weights.items()) else ())
    problems = []
    if type(empty).__name__ != recipe.model.architecture:
        problems.append(f"the recipe is for a {recipe.model.architecture}, and {source.name!r} is a {type(empty).__name__}")
    if recipe.model.parameters != units.parameters:
        problems.append(f"the recipe is for {recipe.model.parameters:,} parameters, and the model has {units.parameters:,}")
    by_tensor = {
        t: f for (n, e), f in zip(recipe.weights.items(), recipe.weight_formats().values(), strict=True) for t in e.tensors
    }
    caches = recipe.cache_formats()
    checks = ["names", "tied tensors", "widths against blocks", "cache formats", "sums"]
    problems += _names(recipe, units)
    problems += _weights(units, by_tensor)
    problems += _caches(units, caches, unsearchable(empty))
    if not problems:
        problems += _sums(recipe, units, caches)
    if served_by.name != "none":
        checks.append(f"engine {served_by.name}")
        problems += _engine(served_by, units, by_tensor, caches)
    if device.name != "any":
        checks.append(f"target {device.name}")
        problems += _target(device, [*recipe.weight_formats().values(), *caches.values()])
    if tool is not None and not problems:
        checks.append(f"consumer {tool.name}")
        subject = bare_subject(empty, units, source.name, recipe.provenance.dtype)
        pairs = {
            a.name: (caches.get(f"{a.name}.key", KV_ORIGINAL), caches.get(f"{a.name}.value", KV_ORIGINAL))
            for a in subject.attentions
        }
        _, losses = fit(subject.with_formats(by_tensor, pairs), tool)
        kinds: dict[tuple[str, str], list[str]] = {}
        for loss in losses:
            kinds.setdefault((loss.wanted, loss.why), []).append(loss.what)
        problems += [
            f"{what[0]}{f' and {len(what) - 1} more' if len(what) > 1 else ''} in {wanted}: {why}"
            for (wanted, why), what in kinds.items()
        ]
    return Checked(tuple(problems), tuple(checks))


def _names(recipe: recipes.Recipe, units: ModelUnits) -> Iterator[str]:
    known = {t.name for u in units.weights for t in u.tensors}
    named = [t for entry in recipe.weights.values() for t in entry.tensors]
    yield from (f"{name} is no weight of the model that can be quantized" for name in dict.fromkeys(named) if name not in known)
    yield from (f"{name} is in two units" for name in dict.fromkeys(named) if named.count(name) > 1)
    yield from (f"{name} is missing: list it, in bf16 if it stays as it is" for name in sorted(known - set(named)))
    modules = {u.module for u in units.caches}
    yield from (f"{layer.module} is no attention module of the model" for layer in recipe.kv if layer.module not in modules)
    missing = modules - {layer.module for layer in recipe.kv}
    yield from (f"the cache of {module} is missing" for module in sorted(missing) if recipe.kv)


def _weights(units: ModelUnits, by_tensor: dict[str, Format]) -> Iterator[str]:
    for unit in units.weights:
        formats = {t.name: by_tensor.get(t.name, ORIGINAL) for t in unit.tensors}
        if len(set(formats.values())) > 1:
            words = ", ".join(f"{name.rpartition('.')[2]} {fmt.name}" for name, fmt in formats.items())
            yield f"engines fuse the tensors of {unit.name}, and they differ: {words}"
        for tensor in unit.tensors:
            if reason := formats[tensor.name].refusal(tensor.width):
                yield f"{tensor.name} in {formats[tensor.name].name}: {reason}"


def _caches(units: ModelUnits, caches: dict[str, KVFormat], unreachable: str | None) -> Iterator[str]:
    if unreachable and any(not f.is_original for f in caches.values()):
        yield unreachable
    for unit in units.caches:
        try:
            caches.get(unit.name, KV_ORIGINAL).for_head_dim(unit.head_dim)
        except UserError as error:
            yield f"{unit.name}: {error}"


def _sums(recipe: recipes.Recipe, units: ModelUnits, caches: dict[str, KVFormat]) -> Iterator[str]:
    if not recipe.kv:
        units = ModelUnits(units.weights, units.left_out, units.parameters)
    formats = recipe.weight_formats()
    if set(formats) != {u.name for u in units.weights}:
        yield "the units have other names than the model's: `autoq search` writes the names that the sums are made by"
        return
    for unit in units.weights:
        entry, stored = recipe.weights[unit.name], unit_bits(unit, formats[unit.name]) / unit.numel
        if entry.numel != unit.numel or abs(entry.bits - stored) > 1e-4 * stored:
            yield f"{unit.name} says {entry.numel:,} values of {entry.bits:g} bits, and has {unit.numel:,} of {stored:.6g}"
    found = totals(units, formats, caches, priced_tokens(recipe.budget), recipe.budget.batch)
    for name in ("bits", "bits_whole_model", "kv_bits", "weight_bytes", "kv_bytes"):
        says, is_ = getattr(recipe.totals, name), getattr(found, name)
        if abs(says - is_) > 1e-6 * max(1.0, is_):
            yield f"totals.{name} says {says:.6g}, and the formats come to {is_:.6g}"


def _engine(engine: Engine, units: ModelUnits, by_tensor: dict[str, Format], caches: dict[str, KVFormat]) -> Iterator[str]:
    for name in sorted({f.name for f in by_tensor.values() if not f.is_original and not loads(engine, f, WEIGHT_FORMATS)}):
        yield f"{engine.name} loads no weights in {name}"
    for unit in units.caches:
        if unit.head_dim % engine.head_dim_multiple:
            yield f"{engine.name} needs a head_dim that is a multiple of {engine.head_dim_multiple}, and {unit.name} has {unit.head_dim}"
    quantized = {n: f.name for n, f in caches.items() if not f.is_original}
    if engine.kv_formats is not None:
        yield from (f"{engine.name} serves no cache in {name}" for name in sorted(set(quantized.values()) - engine.kv_formats))
    keys, values = ({n.rpartition(".")[0]: f.name for n, f in caches.items() if n.endswith(side)} for side in (".key", ".value"))
    if engine.mixing in ("one", "one and skipped"):
        yield from (
            f"{engine.name} keeps K and V in one format: {m} has {keys[m]} and {values[m]}"
            for m in keys
            if keys[m] != values.get(m)
        )
    if engine.mixing == "one and skipped" and len(set(quantized.values())) > 1:
        yield f"{engine.name} serves one cache format beside 16 bit, and the recipe has {', '.join(sorted(set(quantized.values())))}"
    if engine.mixing in ("one", "two"):
        for side, formats in (("K", keys), ("V", values)):
            if len(set(formats.values())) > 1:
                yield f"{engine.name} keeps all {side} in one format, and the recipe has {', '.join(sorted(set(formats.values())))}"


def _target(target: Target, formats: list[Format | KVFormat]) -> Iterator[str]:
    for fmt in dict.fromkeys(formats):
        if reason := target.refusal(fmt):
            yield f"{fmt.name}: {reason}"
