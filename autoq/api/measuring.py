"""What a measurement says in a recipe, and the measurement of a recipe that has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from autoq import recipe as recipes
from autoq.api.applying import recipe_assignment
from autoq.display.progress import Clock
from autoq.measure.divergence import Divergence, Yardstick

Recipe = TypeVar("Recipe", bound=recipes.Recipe)


def six_digits(value: float) -> float:
    """Six significant digits: what a measurement can bear, and what a diff can show."""
    return float(f"{value:.6g}")


def measured_entry(
    divergence: Divergence,
    floor: float,
    text: str,
    uniform: Sequence[recipes.UniformEntry] = (),
    chosen: str = "exact solution",
    trials: recipes.TrialsEntry | None = None,
) -> recipes.MeasuredEntry:
    """Return the recipe's block of a measurement on `text`."""
    windows, tokens = divergence.kl.shape
    return recipes.MeasuredEntry(
        kl=six_digits(divergence.mean_kl), kl_stderr=six_digits(divergence.stderr),
        kl_percentiles={k: six_digits(v) for k, v in divergence.percentiles().items()},
        top1_agreement=six_digits(divergence.top1_agreement), perplexity=six_digits(divergence.perplexity),
        perplexity_original=six_digits(divergence.perplexity_original),
        perplexity_ratio_stderr=six_digits(divergence.perplexity_ratio_stderr), noise_floor=six_digits(floor),
        windows=windows, tokens_per_window=tokens, text=text, uniform=tuple(uniform), chosen=chosen, trials=trials,
    )  # fmt: skip


def measure_recipe(yardstick: Yardstick, recipe: Recipe, text: str, clock: Clock) -> Recipe:
    """Return the recipe with what it measures on the yardstick's windows of `text`."""
    with clock.stage("measure", "measuring the recipe") as progress:
        divergence = yardstick.measure(recipe_assignment(recipe, yardstick.units), progress)
        floor = yardstick.noise_floor()
    return recipe.model_copy(update={"measured": measured_entry(divergence, floor, text, chosen="imported")})
