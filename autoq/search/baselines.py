"""Uniform formats to compare a recipe with: one format for all weights, one for the whole cache, at no more bits."""

from __future__ import annotations

from dataclasses import dataclass

from autoq.budget import BITS_TOLERANCE
from autoq.cost.bits import weight_cost
from autoq.cost.kv_memory import kv_cost
from autoq.measure.damage import Candidates
from autoq.measure.estimate import DamageTable
from autoq.model.quantized import Assignment
from autoq.model.units import ModelUnits


@dataclass(frozen=True)
class Uniform:
    """A uniform recipe: names ("bf16" where that side has no budget), bits, and its predicted damage."""

    weights: str
    kv: str
    assignment: Assignment
    bits: float
    kv_bits: float
    predicted_kl: float

    @property
    def name(self) -> str:
        if self.kv == "bf16":
            return self.weights
        return f"kv {self.kv}" if self.weights == "bf16" else f"{self.weights} + kv {self.kv}"


def uniform_weights(units: ModelUnits, candidates: Candidates, table: DamageTable, absmax: dict[str, float]) -> list[Uniform]:
    """Return one uniform recipe per weight format; units that cannot take it keep 16 bit."""
    found = []
    for fmt in candidates.weights:
        chosen = {u.name: fmt for u in units.weights if fmt in candidates.for_unit(u)}
        damage = sum(table[u].get(fmt.name, 0.0) for u in chosen)
        bits = weight_cost(units, chosen).effective
        found.append(Uniform(fmt.name, "bf16", Assignment(chosen, {}, absmax), bits, 16.0, damage))
    return found


def uniform_caches(
    units: ModelUnits, candidates: Candidates, table: DamageTable, absmax: dict[str, float], context: int
) -> list[Uniform]:
    """Return one uniform recipe per KV format that is a candidate for keys and for values."""
    found = []
    for fmt in candidates.keys:
        if fmt.name not in {v.name for v in candidates.values}:
            continue
        chosen = {u.name: fmt for u in units.caches}
        bits, values = kv_cost(units, chosen, context)
        damage = sum(table[u][fmt.name] for u in chosen)
        found.append(Uniform("bf16", fmt.name, Assignment({}, chosen, absmax), 16.0, bits / max(1, values), damage))
    return found


def fair_uniforms(
    weights: list[Uniform], caches: list[Uniform], bits: float | None, kv_bits: float | None, most: int
) -> list[Uniform]:
    """Return the `most` promising uniform recipes that store no more than the recipe does.

    With both budgets these are pairs. A uniform format that takes no more bits than asked counts as no more.
    """

    def best(found: list[Uniform], limit: float, attribute: str, count: int) -> list[Uniform]:
        allowed = [u for u in found if getattr(u, attribute) <= limit + BITS_TOLERANCE]
        return sorted(allowed, key=lambda u: (u.predicted_kl, u.name))[:count]

    if bits is not None and kv_bits is not None:
        pairs = [
            Uniform(
                w.weights,
                c.kv,
                Assignment(w.assignment.weights, c.assignment.caches, c.assignment.absmax),
                w.bits,
                c.kv_bits,
                w.predicted_kl + c.predicted_kl,
            )
            for w in best(weights, bits, "bits", most)
            for c in best(caches, kv_bits, "kv_bits", most)
        ]
        return sorted(pairs, key=lambda u: (u.predicted_kl, u.name))[:most]
    if bits is not None:
        return best(weights, bits, "bits", most)
    return best(caches, kv_bits, "kv_bits", most) if kv_bits is not None else []
