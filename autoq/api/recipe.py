"""A recipe with what can be done with it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import PrivateAttr

from autoq import recipe as recipes
from autoq.api.checking import Checked, check
from autoq.api.exporting import ALL, ExportReport, export, export_all, folder_named
from autoq.api.showing import find_recipe, show
from autoq.display.html import recipe_html
from autoq.display.words import nats
from autoq.errors import UserError, python_words
from autoq.kinds import check_kind
from autoq.run_folder import make_folder

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from transformers import PreTrainedModel


class Recipe(recipes.Recipe):
    """A recipe (`autoq.recipe.Recipe`) with verbs; it is shown as layers x roles in a notebook."""

    _file: Path | None = PrivateAttr(default=None)

    @classmethod
    def of(cls, recipe: recipes.Recipe, file: Path | None = None) -> Recipe:
        """Return the same recipe with verbs.

        Args:
            file: where it was read from or written to.
        """
        found = cls(**{name: getattr(recipe, name) for name in recipes.Recipe.model_fields})
        found._file = file
        return found

    def export(
        self, to: str, out: Path | str | None = None, rounding: str = "none", model: PreTrainedModel | str | None = None
    ) -> ExportReport | list[ExportReport]:
        """Write the recipe for a consumer, or for "all" of them; see `autoq.export`.

        Args:
            out: the folder; by default export/<consumer> beside the recipe's file, or below the working folder where it has none. What loads
                the recipe itself (transformers) finds it in autoq-recipe.yaml there.
        """
        with python_words():
            for name, value in (("to", to), ("out", out), ("rounding", rounding), ("model", model)):
                check_kind(name, value, None if name in ("out", "model") else ...)
            base = Path("export") if self._file is None else self._file.parent / "export"
            folder = (base if to == ALL else base / to) if out is None else Path(folder_named(out))
            if to not in (ALL, "transformers"):
                return export(self, to, folder, rounding, model)
            file, made = folder / "autoq-recipe.yaml", not folder.exists()
            before = file.read_bytes() if file.is_file() else None
            make_folder(folder, "--out")
            self.write(file)
            try:
                return export_all(file, folder, rounding, model) if to == ALL else export(file, to, folder, rounding, model)
            except UserError:  # as if nothing had been asked
                file.unlink() if before is None else file.write_bytes(before)
                if made:
                    with suppress(OSError):  # not empty
                        folder.rmdir()
                raise

    def check(
        self,
        model: PreTrainedModel | str | None = None,
        engine: str | None = None,
        target: str | None = None,
        consumer: str | None = None,
    ) -> Checked:
        """Say what of the recipe a model, an engine, a device or a tool would stumble over; see `autoq.check`."""
        with python_words():
            return check(self, model, engine, target, consumer)

    def plot(self) -> Figure:
        """Return the bits of every unit, layer by layer."""
        from autoq.display import plots

        return plots.recipe(self)

    def __repr__(self) -> str:
        measured = "not measured" if self.measured is None else f"KL {nats(self.measured.kl)}"
        return f"<Recipe for {self.model.id}: {self.totals.bits:.4f} bits per weight, {self.totals.kv_bits:.4g} per cached value, {measured}>"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return recipe_html(show(self))


def read_recipe(path: Path | str | None = None) -> Recipe:
    """Read a recipe file, the recipe of a run folder, or that of the newest run; raises UserError that names what is wrong."""
    if path is not None:
        check_kind("path", path)
    file = find_recipe(None if path is None else Path(path))
    return Recipe.of(recipes.read_recipe(file), file)
