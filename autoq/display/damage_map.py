"""What every format costs every unit, as tables and plots read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DamageMap:
    """Predicted damage by unit and format.

    Attributes:
        units: (name, role, layer or None), in the model's order; roles "K" and "V" are caches. damage: unit -> format -> nats of KL per token.
    """

    units: tuple[tuple[str, str, int | None], ...]
    damage: Mapping[str, Mapping[str, float]]

    def formats(self, is_cache: bool) -> list[str]:
        """Return the formats of the weights or of the caches, the least harmful first."""
        found: dict[str, float] = {}
        for name, role, _ in self.units:
            if (role in ("K", "V")) == is_cache:
                for fmt, damage in self.damage.get(name, {}).items():
                    found[fmt] = found.get(fmt, 0.0) + damage
        return sorted(found, key=lambda fmt: (found[fmt], fmt))

    def roles(self) -> list[str]:
        """Return the roles in the model's order."""
        return list(dict.fromkeys(role for _, role, _ in self.units))

    def layers(self) -> list[int]:
        """Return the layers in order."""
        return sorted({layer for _, _, layer in self.units if layer is not None})

    def of_role(self, role: str, fmt: str) -> dict[int | None, float]:
        """Return layer -> damage of one format in one role, summed where a layer has several such units."""
        found: dict[int | None, float] = {}
        for name, its, layer in self.units:
            if its == role and fmt in self.damage.get(name, {}):
                found[layer] = found.get(layer, 0.0) + self.damage[name][fmt]
        return found
