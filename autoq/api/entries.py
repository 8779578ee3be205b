"""The parts of a recipe that follow from its formats, its calibration and its origin, however it came about."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoq import __version__
from autoq import recipe as recipes
from autoq.api.measuring import six_digits
from autoq.cost.bits import unit_bits, weight_cost
from autoq.cost.kv_memory import cache_bits, cache_values, kv_cost
from autoq.formats.calibration import Calibration
from autoq.formats.format import Format, KVFormat
from autoq.measure.profile import model_fingerprint
from autoq.model.unit import ModelUnits
from autoq.recipe_formats import FormatEntry, describe, encode_mean
from autoq.urls import without_password

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Damage = Callable[[str], float | None]


def unknown_damage(unit: str) -> None:
    """Say nothing of any unit's damage: the recipe was not profiled."""


def weight_entries(units: ModelUnits, formats: Mapping[str, Format], damage: Damage) -> dict[str, recipes.WeightEntry]:
    """Return the entries of the weight units, with their formats by unit name."""
    return {
        u.name: recipes.WeightEntry(
            format=formats[u.name].name, role=u.role, layer=u.layer, bits=six_digits(unit_bits(u, formats[u.name]) / u.numel),
            numel=u.numel, predicted_kl=damage(u.name), tensors=tuple(t.name for t in u.tensors),
        )
        for u in units.weights
    }  # fmt: skip


def cache_entries(
    units: ModelUnits,
    formats: Mapping[str, KVFormat],
    calibration: Mapping[str, Calibration],
    damage: Damage,
    tokens: int,
    batch: int,
) -> tuple[recipes.KVEntry, ...]:
    """Return the entries of the attention layers, priced at so many tokens and sequences."""
    layers: dict[str, dict[str, Any]] = {}
    for u in units.caches:
        entry = layers.setdefault(u.module, {"layer": u.layer, "module": u.module, "values_per_token": u.numel})
        bits = cache_bits(u, formats[u.name], tokens, batch) / cache_values(u, tokens, batch)
        entry[u.kind] = _cache_entry(formats[u.name], bits, damage(u.name), calibration.get(u.name, Calibration()))
    return tuple(recipes.KVEntry(**entry) for entry in layers.values())


def _cache_entry(fmt: KVFormat, bits: float, damage: float | None, known: Calibration) -> recipes.CacheEntry:
    is_centred, is_rotated = any(f.center for f in fmt.chain), any(f.rotate for f in fmt.chain)
    return recipes.CacheEntry(
        format=fmt.name, bits=six_digits(bits), predicted_kl=damage, absmax=six_digits(known.absmax),
        absmax_centered=six_digits(known.centered) if is_centred else None,
        absmax_rotated=six_digits(known.rotated) if is_rotated else None,
        mean=encode_mean(known.mean) if is_centred else None,
    )  # fmt: skip


def totals(
    units: ModelUnits, weights: Mapping[str, Format], caches: Mapping[str, KVFormat], tokens: int, batch: int
) -> recipes.TotalsEntry:
    """Return what the formats store, the cache at so many tokens and sequences."""
    cost = weight_cost(units, weights)
    kv_bits, kv_values = kv_cost(units, caches, tokens, batch)
    return recipes.TotalsEntry(
        bits=cost.effective, bits_whole_model=cost.whole_model, kv_bits=kv_bits / max(1, kv_values),
        weight_bytes=-(-cost.whole_bits // 8), kv_bytes=-(-kv_bits // 8),
    )  # fmt: skip


def written_out(formats: Mapping[str, Format] | Mapping[str, KVFormat]) -> dict[str, FormatEntry]:
    """Return every format that the units have, and those that caches go over to, written out in full."""
    used = {one.name: one for fmt in formats.values() for one in (fmt.chain if isinstance(fmt, KVFormat) else (fmt,))}
    return {name: describe(used[name]) for name in sorted(used)}


def provenance(seed: int, space: str, text: str, sequences: int, tokens: int, dtype: Any, device: str) -> recipes.ProvenanceEntry:
    """Return how the recipe was made: by this process, now."""
    versions = {"python": platform.python_version()}
    for name in ("autoq", "torch", "transformers", "scipy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = __version__ if name == "autoq" else "?"
    arguments = [without_password(a) for a in sys.argv[1:] if a]
    return recipes.ProvenanceEntry(
        command="autoq " + " ".join(arguments) if Path(sys.argv[0]).name in ("autoq", "__main__.py") else "python API",
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), seed=seed, space=space, profile_text=text,
        profile_sequences=sequences, profile_tokens=tokens, dtype=dtype, device=device, versions=versions,
    )  # fmt: skip


def recipe_of(
    name: str,
    model: PreTrainedModel,
    units: ModelUnits,
    weights: Mapping[str, Format],
    caches: Mapping[str, KVFormat],
    calibration: Mapping[str, Calibration],
    origin: recipes.ProvenanceEntry,
    tokens: int,
    batch: int = 1,
) -> recipes.Recipe:
    """Return the recipe of formats that nobody searched: with what they store, without any KL.

    Args:
        name: the model as `--model` has it. weights, caches, calibration: by unit name, of every unit.
        tokens, batch: for which the cache is priced.
    """
    return recipes.Recipe(
        schema_version=1,
        model=recipes.ModelEntry(
            id=name, fingerprint=model_fingerprint(model), architecture=type(model).__name__, parameters=units.parameters
        ),
        budget=recipes.BudgetEntry(weights=None, kv=None, context=tokens, batch=batch),
        totals=totals(units, weights, caches, tokens, batch),
        predicted=None,
        measured=None,
        formats=written_out(weights),
        kv_formats=written_out(caches),
        weights=weight_entries(units, weights, unknown_damage),
        kv=cache_entries(units, caches, calibration, unknown_damage, tokens, batch),
        left_out={entry.reason: entry.numel for entry in units.left_out},
        provenance=origin,
    )
