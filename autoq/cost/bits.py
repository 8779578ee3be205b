"""Stored bits of weights, counted in integers from shapes and formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoq.formats.format import Format
from autoq.model.unit import ModelUnits, Unit


@dataclass(frozen=True)
class WeightCost:
    """Bits of the searched weights and of the whole model (what is left out of the search stays at 16 bit)."""

    searched_bits: int
    searched: int
    whole_bits: int
    parameters: int

    @property
    def effective(self) -> float:
        """Effective bits: stored bits of the searched weights over their number."""
        return self.searched_bits / max(1, self.searched)

    @property
    def whole_model(self) -> float:
        """Stored bits of all parameters over their number."""
        return self.whole_bits / max(1, self.parameters)


def unit_bits(unit: Unit, fmt: Format) -> int:
    """Return the bits that a weight unit takes in a format."""
    return sum(fmt.storage_bits(t.matrix_shape) for t in unit.tensors)


def weight_cost(units: ModelUnits, assignment: Mapping[str, Format]) -> WeightCost:
    """Return the cost of an assignment of formats to weight units; a unit that is not in it stays at 16 bit."""
    original = Format("bf16", None)
    searched = sum(unit_bits(u, assignment.get(u.name, original)) for u in units.weights)
    rest = 16 * (units.parameters - units.searched)
    return WeightCost(searched, units.searched, searched + rest, units.parameters)
