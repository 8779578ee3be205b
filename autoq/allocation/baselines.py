"""Uniform formats to compare a recipe with: one format for all weights, one for the whole cache, at no more bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoq.budget import Budgets
from autoq.cost.bits import weight_cost
from autoq.cost.engines import Engine
from autoq.cost.kv_memory import kv_cost
from autoq.formats.calibration import Calibration
from autoq.formats.format import Format, KVFormat
from autoq.measure.damage import Candidates
from autoq.measure.estimate import DamageTable
from autoq.model.quantized import Assignment
from autoq.model.unit import ModelUnits

ORIGINAL = "bf16"


@dataclass(frozen=True)
class Uniform:
    """A uniform recipe: names ("bf16" where that side is not searched), bits, and its predicted damage.

    Attributes:
        bits, kv_bits: per searched weight and per cached value.
    """

    weights: str
    kv: str
    assignment: Assignment
    bits: float
    kv_bits: float
    predicted_kl: float

    @property
    def formats(self) -> dict[str, str]:
        """Unit -> format name; a unit that is not named keeps 16 bit."""
        return {unit: fmt.name for side in (self.assignment.weights, self.assignment.caches) for unit, fmt in side.items()}

    @property
    def name(self) -> str:
        if self.kv == ORIGINAL:
            return self.weights
        return f"kv {self.kv}" if self.weights == ORIGINAL else f"{self.weights} + kv {self.kv}"


def fair_uniforms(
    units: ModelUnits, candidates: Candidates, table: DamageTable, calibration: Mapping[str, Calibration], budgets: Budgets,
    engine: Engine, most: int | None,
) -> list[Uniform]:  # fmt: skip
    """Return the `most` promising uniform recipes (None: all) that meet the budgets, by predicted damage; cache formats are the engine's."""
    weights = _weight_formats(units, candidates) if budgets.search_weights else {ORIGINAL: {}}
    caches = _cache_formats(units, candidates, engine) if budgets.search_caches else {ORIGINAL: {}}
    if budgets.memory is not None:
        weights, caches = {ORIGINAL: {}, **weights}, {ORIGINAL: {}, **caches}
    other = 16 * (units.parameters - units.searched)
    found = []
    for weight_name, of_weights in weights.items():
        cost = weight_cost(units, of_weights)
        damage = sum(table[u].get(weight_name, 0.0) for u in of_weights)
        for cache_name, of_caches in caches.items():
            kv_bits, values = kv_cost(units, of_caches, budgets.tokens, budgets.batch, budgets.in_bytes)
            fits = (
                budgets.weights is None or cost.searched_bits <= budgets.weights.limit_bits(units.searched, other, 16 * units.parameters),
                budgets.kv is None or kv_bits <= budgets.kv.limit_bits(values),
                budgets.memory is None or cost.whole_bits + kv_bits <= 8 * budgets.memory.value,
            )  # fmt: skip
            if all(fits) and (weight_name, cache_name) != (ORIGINAL, ORIGINAL):
                kv_damage = sum(table[u][cache_name] for u in of_caches)
                assignment = Assignment(of_weights, of_caches, calibration)
                found.append(
                    Uniform(weight_name, cache_name, assignment, cost.effective, kv_bits / max(1, values), damage + kv_damage)
                )
    return sorted(found, key=lambda u: (u.predicted_kl, u.name))[:most]


def _weight_formats(units: ModelUnits, candidates: Candidates) -> dict[str, dict[str, Format]]:
    """One format for all weights; units that cannot take it keep 16 bit."""
    return {f.name: {u.name: f for u in units.weights if f in candidates.for_unit(u)} for f in candidates.weights}


def _cache_formats(units: ModelUnits, candidates: Candidates, engine: Engine) -> dict[str, dict[str, KVFormat]]:
    """One format for K and V of all layers, of those that are candidates for both."""
    both = [f for f in candidates.keys if f in candidates.values and (engine.kv_formats is None or f.name in engine.kv_formats)]
    return {f.name: {u.name: f for u in units.caches if f in candidates.for_unit(u)} for f in both}
