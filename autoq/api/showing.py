"""Find a recipe and show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autoq import recipe as recipes
from autoq.errors import UserError
from autoq.measure.profile import FILE
from autoq.run_folder import RECIPE, RUNS


def find_recipe(path: Path | None) -> Path:
    """Return the recipe file behind a path: the file itself, the one in a run folder, or that of the newest run."""
    if path is None:
        return _newest(RECIPE, "there is no recipe in 'runs': name a recipe file or a run folder")
    if path.is_dir():
        if not (path / RECIPE).is_file():
            raise UserError(f"the folder {str(path)!r} holds no {RECIPE}")
        return path / RECIPE
    return path


def find_profile(run: Path | None) -> Path:
    """Return a run folder, by default the one whose profile is the newest."""
    return _newest(FILE, "there is no profile in 'runs': name a run folder").parent if run is None else run


def _newest(name: str, otherwise: str) -> Path:
    found = sorted(RUNS.glob(f"*/{name}"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise UserError(otherwise)
    return found[-1]


def show(recipe: recipes.Recipe) -> dict[str, Any]:
    """Return a recipe as `autoq show --json` prints it: units and totals."""
    units: list[dict[str, Any]] = [
        {"unit": name, "kind": "weight", "role": e.role, "layer": e.layer, "format": e.format, "bits": e.bits,
         "numel": e.numel, "predicted_kl": e.predicted_kl, "tensors": list(e.tensors)}
        for name, e in recipe.weights.items()
    ]  # fmt: skip
    for layer in recipe.kv:
        for kind, role, entry in (("key", "K", layer.key), ("value", "V", layer.value)):
            units.append(
                {"unit": f"{layer.module}.{kind}", "kind": kind, "role": role, "layer": layer.layer, "format": entry.format,
                 "bits": entry.bits, "numel": layer.values_per_token, "predicted_kl": entry.predicted_kl, "tensors": [layer.module]}
            )  # fmt: skip
    measured = recipe.measured
    return {
        "model": recipe.model.id,
        **recipe.totals.model_dump(),
        "predicted_kl": recipe.predicted.kl if recipe.predicted else None,
        "measured_kl": measured.kl if measured else None,
        "units": units,
    }
