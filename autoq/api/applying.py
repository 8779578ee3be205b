"""Apply a recipe to a loaded model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from autoq import recipe as recipes
from autoq.allocation.problem import Option
from autoq.errors import UserError, unknown
from autoq.formats.calibration import Calibration
from autoq.formats.catalog import kv_format, weight_format
from autoq.measure.profile import model_fingerprint
from autoq.model import load
from autoq.model.given import source_of
from autoq.model.quantized import Assignment, check_not_quantized
from autoq.model.quantized import quantized as apply_assignment
from autoq.model.unit import ModelUnits
from autoq.model.units import find_units

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def assignment_of(units: ModelUnits, choice: dict[str, Option], calibration: Mapping[str, Calibration]) -> Assignment:
    """Return the formats behind a solution."""
    return Assignment(
        {u.name: weight_format(choice[u.name].format) for u in units.weights},
        {u.name: kv_format(choice[u.name].format) for u in units.caches},
        calibration,
    )


def check_names(recipe: recipes.Recipe, units: ModelUnits) -> None:
    """Raise UserError for the first unit or tensor of the recipe that the model does not have, with the nearest name."""
    weights = {u.name: u for u in units.weights}
    for name, entry in recipe.weights.items():
        if name not in weights:
            raise unknown("unit in the recipe:", name, weights)
        tensors = [t.name for t in weights[name].tensors]
        for tensor in entry.tensors:
            if tensor not in tensors:
                raise unknown(f"tensor in the recipe's unit {name}:", tensor, tensors)
    modules = {u.module for u in units.caches}
    for layer in recipe.kv:
        if layer.module not in modules:
            raise unknown("attention module in the recipe:", layer.module, modules)


def recipe_assignment(recipe: recipes.Recipe, units: ModelUnits) -> Assignment:
    """Return the assignment a recipe stands for; raises UserError if it names what the model does not have."""
    check_names(recipe, units)
    return Assignment(recipe.weight_formats(), recipe.cache_formats(), recipe.calibration())


def load_for(recipe: recipes.Recipe, model: PreTrainedModel | str | None) -> tuple[PreTrainedModel, ModelUnits, load.ModelSource]:
    """Load the model that a recipe is for (by default the one it names) unless it is loaded; return it with its units and where it is from.

    Raises UserError if it has other weights.
    """
    if model is None or isinstance(model, str):
        source = load.model_source(model or recipe.model.id)
        loaded = load.load_model(source, load.pick_device("auto"), recipe.provenance.dtype)
    else:
        check_not_quantized(model)
        source, loaded = source_of(model), model
    check_model(recipe, loaded)
    return loaded, units_for(recipe, loaded), source


def check_model(recipe: recipes.Recipe, model: PreTrainedModel) -> None:
    """Raise UserError if the recipe was made for a model with other weights."""
    made_for, is_ = recipe.model.fingerprint, model_fingerprint(model)
    if made_for != is_:
        raise UserError(f"the recipe was made for a model with other weights ({recipe.model.id}, {made_for}; this one is {is_})")


def units_for(recipe: recipes.Recipe, model: PreTrainedModel) -> ModelUnits:
    """Return the model's units, its head among them if the recipe has it."""
    return find_units(model, ("lm_head",) if any(e.role == "head" for e in recipe.weights.values()) else ())


@contextmanager
def quantized(model: PreTrainedModel, recipe: recipes.Recipe | Path | str, caches: bool = True) -> Iterator[PreTrainedModel]:
    """Run the block with a recipe's weights, keys and values in place of the model's own; everything is back afterwards.

    Args:
        caches: round K and V where attention reads them; not wanted with a `QuantizedKVCache`, which holds them packed.

    Raises UserError if the recipe names what the model does not have, or was made for a model with other weights.
    """
    loaded = recipe if isinstance(recipe, recipes.Recipe) else recipes.read_recipe(Path(recipe))
    check_not_quantized(model)
    check_model(loaded, model)
    units = units_for(loaded, model)
    assignment = recipe_assignment(loaded, units)
    with apply_assignment(model, units, assignment if caches else Assignment(assignment.weights)) as changed:
        yield changed
