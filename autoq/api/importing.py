"""Make a recipe of what another tool wrote, so that it can be shown, priced, checked and measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoq import recipe as recipes
from autoq.api.entries import provenance, recipe_of
from autoq.config import SearchConfig
from autoq.cost.kv_memory import context_of
from autoq.display.progress import Clock, Reporter, Silent
from autoq.errors import UserError
from autoq.exporters.consumer import Found
from autoq.exporters.importers import read
from autoq.exporters.subject import Subject, bare_subject
from autoq.formats.calibration import Calibration
from autoq.formats.format import Format, KVFormat
from autoq.measure.calibrate import calibrate
from autoq.model import load
from autoq.model.cache_units import unsearchable
from autoq.model.given import borrowed, dtype_of, shapes_of
from autoq.model.text import STDLIB, sequences, text_sources
from autoq.model.unit import ModelUnits
from autoq.model.units import find_units

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, repr=False)
class Imported:
    """A recipe made of another tool's file.

    Attributes:
        recipe: without any KL yet.
        kind: the file's format.
        path: where the recipe was written.
        notes: what the file asks for that a recipe does not say.
    """

    recipe: recipes.Recipe
    kind: str
    path: Path
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the object that `autoq import --json` prints."""
        return {
            "from": self.kind,
            "recipe": str(self.path),
            "model": self.recipe.model.id,
            **self.recipe.totals.model_dump(),
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        from autoq.display.exports import import_view
        from autoq.display.text import as_text

        return as_text(import_view(self))


def import_recipe(
    path: Path | str,
    model: PreTrainedModel | str,
    kind: str | None = None,
    out: Path | str = "recipe.yaml",
    calib: str | None = None,
    context: int | None = None,
    batch: int = 1,
    reporter: Reporter | None = None,
) -> Imported:
    """Read another tool's recipe on a model and write it as one of autoq's, with what it stores but no KL: `validate` measures it.

    Args:
        path: a file or a checkpoint folder. kind: its format; None finds out. model: the 16-bit model it is for.
        calib: text on which caches with a static scale are calibrated, and from which `validate` measures; None is the bundled one.
        context, batch: for which the cache is priced.

    Raises UserError for names that the model does not have, formats that autoq has no word for, and tied tensors that differ.
    """
    clock, config = Clock(reporter or Silent()), SearchConfig(calib=calib, batch=batch)
    target = Path(out)
    if target.is_dir():
        raise UserError(f"--out {str(target)!r} is a folder: give a file such as recipe.yaml")
    if target.exists() or target.is_symlink():
        raise UserError(f"--out {str(target)!r} is there already: give another file")
    profile_text, _ = text_sources(calib, None)
    source, model_config, empty = shapes_of(model)
    units = find_units(empty)
    kind, found = read(Path(path), kind, bare_subject(empty, units, source.name))
    if any(name.endswith("lm_head") for name in found.weights):
        units = find_units(empty, ("lm_head",))
    if unsearchable(empty):
        units = replace(units, units=units.weights)
    weights, caches = _by_unit(found, bare_subject(empty, units, source.name), units)
    tokens = context_of(model_config.get_text_config(decoder=True), context)
    device = load.pick_device(config.device)
    dtype = load.dtype_name(config.dtype, device)
    if isinstance(model, str):
        with clock.stage("load", "loading the model"):
            loaded = load.load_model(source, device, dtype)
    else:
        loaded, device, dtype = model, str(model.device), dtype_of(model)
    calibration: dict[str, Calibration] = {}
    if any(f.calibration == "absmax" or f.center for f in caches.values()):
        with clock.stage("calibrate", "calibrating the cache"):
            ids = sequences(load.load_tokenizer(load.model_source(source.name)), profile_text, config.samples, config.seq_len)
            with borrowed(None if isinstance(model, str) else model):
                calibration = calibrate(loaded, units, ids)
    origin = provenance(config.seed, f"imported from {kind}", calib or STDLIB, 0, 0, dtype, device)
    recipe = recipe_of(source.name, loaded, units, weights, caches, calibration, origin, tokens, batch)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {str(target)!r} cannot be made: {error.strerror}") from error
    recipe.write(target)
    return Imported(recipe, kind, target, found.notes)


def _by_unit(found: Found, subject: Subject, units: ModelUnits) -> tuple[dict[str, Format], dict[str, KVFormat]]:
    """Return the formats by weight unit and by cache unit; raises UserError for what the file gets wrong."""
    problems = list(found.problems)
    original = Format("bf16", None)
    weights, in_units = {}, set()
    for unit in units.weights:
        formats = {t.name: found.weights.get(t.name, original) for t in unit.tensors}
        in_units |= set(formats)
        if len(set(formats.values())) > 1:
            words = ", ".join(f"{name.rpartition('.')[2]} {fmt.name}" for name, fmt in formats.items())
            problems.append(f"engines fuse the tensors of {unit.name}, and they differ: {words}")
        weights[unit.name] = next(iter(formats.values()))
        for tensor in unit.tensors:
            if reason := formats[tensor.name].refusal(tensor.width):
                problems.append(f"{tensor.name}: {reason}")
    problems += [f"{name} is no weight that autoq quantizes" for name in found.weights if name not in in_units]
    if problems:
        more = f" ({len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise UserError(f"the file does not fit {subject.model!r}: {problems[0]}{more}")
    bf16 = KVFormat("bf16", original)
    caches = {u.name: found.caches.get(u.module, (bf16, bf16))[0 if u.kind == "key" else 1] for u in units.caches}
    return weights, caches
