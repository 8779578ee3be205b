"""Read planted facts at long context with a recipe and without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autoq.api.applying import load_for, recipe_assignment
from autoq.cost.kv_memory import context_of
from autoq.display.progress import Clock, Reporter, Silent
from autoq.errors import UserError
from autoq.measure.retrieval import RetrievalRow, make_prompts, retrieve
from autoq.model.given import Given, borrowed
from autoq.recipe import read_recipe


@dataclass(frozen=True, repr=False)
class Retrieval:
    """What was found; rows by kind, length and depth."""

    recipe_path: Path
    rows: tuple[RetrievalRow, ...]
    seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return the object that `autoq retrieval --json` prints."""
        return {"recipe": str(self.recipe_path), "rows": [asdict(r) for r in self.rows], "seconds": self.seconds}

    def __repr__(self) -> str:
        from autoq.display.checks import retrieval_table
        from autoq.display.text import as_text

        return as_text(retrieval_table(self))


def retrieval(
    path: Path, model: str | None = None, lengths: Sequence[int] = (256,), depths: Sequence[float] = (0.0, 0.5, 1.0),
    samples: int = 4, seed: int = 0, reporter: Reporter | None = None, given: Given | None = None,
) -> Retrieval:  # fmt: skip
    """Read generated prompts of these lengths (tokens), with a fact at these depths (0 to 1), with the original and the recipe.

    Raises UserError for a recipe of another model, and for a length that the model does not reach.
    """
    if not lengths or not depths:
        raise UserError("retrieval needs at least one length and one depth")
    if samples < 1:
        raise UserError(f"--samples is {samples}, but must be at least 1")
    clock, given = Clock(reporter or Silent()), given or Given()
    recipe = read_recipe(path)
    with clock.stage("load", "loading the model"):
        loaded, units, source = load_for(recipe, given.model or model)
        tokenizer = given.load_tokenizer(source)
        for length in lengths:
            context_of(loaded.config.get_text_config(decoder=True), length)
        prompts = make_prompts(tokenizer, lengths, depths, samples, seed)
    with borrowed(given.model), clock.stage("read", "reading prompts") as progress:
        rows = retrieve(loaded, units, recipe_assignment(recipe, units), prompts, progress)
    return Retrieval(path, tuple(rows), clock.seconds)
