"""Write the report of a search, and read what a run folder holds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from autoq.api.exporting import previews
from autoq.api.fronts import FrontResult, front
from autoq.api.recipe import Recipe, read_recipe
from autoq.display.exports import summary
from autoq.display.findings import Findings, HasFindings
from autoq.errors import UserError, python_words
from autoq.exporters.fitting import rounding_needed
from autoq.kinds import check_kind
from autoq.run_folder import RECIPE, RESULT, make_folder, write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autoq.display.page import Serving

REPORT = "report.html"
NEEDED = (
    "front", "kv_front", "confirmed", "trials", "warnings", "uniform", "measured_kl", "coverage", "notes", "seconds", "damage", "bits", "kv_bits",
)  # fmt: skip


class LoadedRun(Findings):
    """What a search left in its run folder; verbs and plots take it as they take a search's result.

    Attributes:
        recipe: the recipe.
        facts: every figure, as `autoq search --json` prints them, and the damage of every cell.
        run: the folder.
    """

    def front(self, budgets: Sequence[float] | None = None) -> FrontResult:
        """Return the least predicted damage at every budget in bits per value; see `autoq.front`."""
        with python_words():
            check_kind("budgets", budgets, None)
            return front(self.run, budgets)

    def report(self, out: Path | str | None = None) -> Path:
        """Write the report, one HTML file, and return where: by default report.html in the run folder."""
        return report(self, out)


def load_run(run: Path | str) -> LoadedRun:
    """Read what a search left in its run folder: the recipe, and every figure for plots and the report.

    Raises UserError for a folder without a finished search, one of an older version, or figures of another recipe.
    """
    check_kind("run", run)
    folder = Path(run)
    if not folder.is_dir():
        raise UserError(f"there is no run folder {str(folder)!r}")
    if not (folder / RECIPE).is_file():
        raise UserError(f"{str(folder)!r} holds no {RECIPE}: search there first, `autoq search --run {folder} --budget 4.5bits`")
    recipe = read_recipe(folder / RECIPE)
    if (folder / RESULT).exists() and not (folder / RESULT).is_file():
        raise UserError(f"{str(folder / RESULT)!r} is no regular file: search there again")
    try:
        facts = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{str(folder)!r} has a recipe but no {RESULT}: the search did not end there, run it again") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{str(folder / RESULT)!r} cannot be read: {error}") from error
    if not isinstance(facts, dict) or any(name not in facts for name in NEEDED) or recipe.measured is None:
        raise UserError(f"{str(folder / RESULT)!r} lacks what a report needs: it is of an older version, search there again")
    try:
        belong_together = _belong_together(recipe, facts)
    except (TypeError, ValueError) as error:
        raise UserError(f"{str(folder / RESULT)!r} is damaged ({error}): search there again") from error
    if not belong_together:
        raise UserError(
            f"{str(folder / RESULT)!r} holds the figures of another recipe than {RECIPE} there: the last search did not end, run it again"
        )
    return LoadedRun(recipe, facts, folder)


def _belong_together(recipe: Recipe, facts: dict[str, Any]) -> bool:
    assert recipe.measured is not None
    pairs = ((recipe.measured.kl, "measured_kl"), (recipe.totals.bits, "bits"), (recipe.totals.kv_bits, "kv_bits"))
    return all(math.isclose(written, float(facts[name]), rel_tol=1e-4, abs_tol=1e-12) for written, name in pairs)


def report(result: HasFindings | Path | str, out: Path | str | None = None, model: PreTrainedModel | str | None = None) -> Path:
    """Write the report of a search as one HTML file that opens without a network, and return where it is.

    Args:
        result: what a search returned, or its run folder. out: by default report.html in the run folder.
        model: a loaded model or where it is, by default the one that the recipe names: for the commands of other tools.
    """
    from autoq.display.page import page

    found = load_run(result) if isinstance(result, (str, PathLike)) else result.findings
    if out is None and not found.run.is_dir():
        raise UserError(f"the run folder {str(found.run)!r} is gone: say with --out where the report is to be")
    path = found.run / REPORT if out is None else Path(out)
    if path.is_dir():
        raise UserError(f"--out {str(path)!r} is a folder: give a file such as report.html")
    if path.exists() and path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out {str(path)!r} is there already and is no HTML file: give another name")
    serving, note = _serving(found, model)
    try:
        text = page(found, serving, note)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, jinja2.UndefinedError) as error:
        raise UserError(f"{str(found.run / RESULT)!r} is damaged ({type(error).__name__}: {error}): search there again") from error
    make_folder(path.parent, "--out")
    write_atomically(path, text)
    return path


def _serving(found: Findings, model: PreTrainedModel | str | None) -> tuple[list[Serving], str]:
    """Return how each consumer takes the recipe, or why that cannot be told."""
    from autoq.display.page import Serving

    try:
        file = found.run / RECIPE
        written = previews(file if file.is_file() else found.recipe, model)
    except UserError as error:
        if model is not None:  # asked for, so not to be passed over
            raise
        return [], f"What other tools take is not told here: {error}"
    rows = []
    for one, files in written:
        lost = "" if not one.losses else summary(one)
        rounding = rounding_needed(one.losses)
        rounded = {"none": "", "up": "rounded up", "scales": "with its own scales"}[rounding]
        command = f"autoq export {found.run} --to {one.consumer}{' --round ' + rounding if one.losses else ''}"
        rows.append(Serving(one.consumer, one.what, one.bits, one.kv_bits, rounded, lost, one.refused, command, files))
    return rows, ""
