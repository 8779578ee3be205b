"""What a search found, as its run folder keeps it: the recipe and every figure beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from autoq.display.damage_map import DamageMap
from autoq.display.words import answer
from autoq.recipe import Recipe


class HasFindings(Protocol):
    """A search's result: in memory, or read again from a run folder."""

    @property
    def findings(self) -> Findings:
        """The recipe and every figure."""


@dataclass(frozen=True, repr=False)
class Findings:
    """A recipe with its figures.

    Attributes:
        recipe: the recipe.
        facts: what result.json holds: what `autoq search --json` prints, and the damage of every cell.
        run: the folder.
        storage: of its trials, with a password if it has one; by default as `facts` names it.
    """

    recipe: Recipe
    facts: dict[str, Any]
    run: Path
    storage: str | None = None

    @property
    def findings(self) -> Findings:
        """Itself, so that a function takes this or a search's result."""
        return self

    @property
    def damage_map(self) -> DamageMap:
        """What every format costs every unit, corrected as the search solved it."""
        weights = [(name, e.role, e.layer) for name, e in self.recipe.weights.items()]
        caches = [
            (f"{layer.module}.{kind}", role, layer.layer)
            for layer in self.recipe.kv
            for kind, role in (("key", "K"), ("value", "V"))
        ]
        return DamageMap((*weights, *caches), self.facts.get("damage") or {})

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {answer(self.recipe, self.facts)} In {self.run}>"

    def _repr_html_(self) -> str:
        from autoq.display.html import search_html

        return search_html(self)

    def other_side(self, side: str) -> float:
        """Return what the result's other side is predicted to cost, in nats: a front of the weights is with the result's cache, and the other way round."""
        recipe = self.recipe
        if side == "cache":
            return sum(e.predicted_kl or 0.0 for e in recipe.weights.values())
        return sum(e.predicted_kl or 0.0 for layer in recipe.kv for e in (layer.key, layer.value))
