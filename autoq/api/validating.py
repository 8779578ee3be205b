"""Validate a recipe: pack it with the real kernels, check every byte, and measure the model that runs on the bytes."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autoq import recipe as recipes
from autoq.api.applying import load_for, recipe_assignment
from autoq.api.measuring import measure_recipe, six_digits
from autoq.api.recipe import Recipe, read_recipe
from autoq.config import SearchConfig
from autoq.cost.bits import weight_cost
from autoq.display.progress import Clock, Reporter, Silent
from autoq.errors import UserError
from autoq.formats.format import Format
from autoq.kernels.launch import where
from autoq.measure.divergence import Divergence, Yardstick
from autoq.model import load
from autoq.model.checked_cache import CacheCheck
from autoq.model.given import Given, borrowed
from autoq.model.head import cache_argument, hidden_states
from autoq.model.packed import PackedTensor, packed_weights
from autoq.model.packed_attention import packed_attention
from autoq.model.packed_cache import QuantizedKVCache
from autoq.model.packed_tokens import kernels
from autoq.model.quantized import Assignment, quantize_input, quantized
from autoq.model.text import GIVEN, sequences, text_sources

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

CHUNK = 64  # tokens of a prefill step
DECODED = 8  # tokens at the end of a window that are decoded one by one
GENERATED = 16  # tokens generated greedily after a prompt
PROMPTS, PROMPT = 4, 32
# A difference in the last digit can turn the rounding of a key in a later layer; a wrong byte or scale makes it tens of percent.
ATTENTION_TOLERANCE = 0.03


@dataclass(frozen=True, repr=False)
class Validation:
    """What a validation found.

    Attributes:
        problems: what is wrong, in words; empty when the recipe passed.
        tensors: what every packed tensor showed.
    """

    recipe: Recipe
    recipe_path: Path
    entry: recipes.ValidationEntry
    divergence: Divergence
    tensors: tuple[PackedTensor, ...]
    problems: tuple[str, ...]
    seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return the object that `autoq validate --json` prints."""
        return {
            "recipe": str(self.recipe_path),
            **self.entry.model_dump(),
            "measured_kl": self.recipe.measured.kl if self.recipe.measured else None,
            "problems": list(self.problems),
            "seconds": self.seconds,
        }

    def __repr__(self) -> str:
        from autoq.display.checks import validation
        from autoq.display.text import as_text

        return "\n".join([as_text(validation(self)), *self.problems])


def validate(
    path: Path, model: str | None = None, sample: int | None = None, seed: int = 0, reporter: Reporter | None = None,
    given: Given | None = None,
) -> Validation:  # fmt: skip
    """Pack, check, run and measure a recipe, and write a `validation` block into its file.

    Args:
        model: the model the recipe is for; by default the one it names.
        sample: pack only so many units with the kernels, drawn by `seed`; the others are rounded by the reference.
        given: the model, its tokenizer or the measuring text, where they are in memory already.

    A recipe that was imported is measured first.

    Raises UserError for a recipe of another model.
    """
    given = given or Given()
    with borrowed(given.model):
        return _validate(path, given.model or model, sample, seed, Clock(reporter or Silent()), given)


def _validate(
    path: Path, model: PreTrainedModel | str | None, sample: int | None, seed: int, clock: Clock, given: Given
) -> Validation:
    recipe = read_recipe(path)
    if sample is not None and sample < 1:
        raise UserError(f"--sample is {sample}, but must be at least 1")
    with clock.stage("load", "loading the model"):
        loaded, units, source = load_for(recipe, model)
        ids, text = _windows(recipe, loaded, source, given)
        yardstick = Yardstick(loaded, units, ids)
    if recipe.measured is None:
        recipe = measure_recipe(yardstick, recipe, text, clock)
    return validate_on(yardstick, recipe, path, sample, seed, clock)


def _windows(recipe: Recipe, model: PreTrainedModel, source: load.ModelSource, given: Given) -> tuple[torch.Tensor, str]:
    """Return the token ids that the recipe was measured on, and what that text is called; raises UserError for others."""
    was, defaults = recipe.measured, SearchConfig()
    windows, tokens = (was.windows, was.tokens_per_window) if was else (defaults.eval_samples, defaults.eval_len)
    if given.eval_ids is not None:
        if was is not None and given.eval_ids.shape != (windows, tokens):
            raise UserError(
                f"the recipe was measured on {windows} x {tokens} tokens: give those, not {' x '.join(map(str, given.eval_ids.shape))}"
            )
        return given.eval_ids, GIVEN
    _, text = text_sources(recipe.provenance.profile_text, was.text if was else None)
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or tokens
    return sequences(given.load_tokenizer(source), text, windows, min(tokens, limit)), text.name


def validate_on(yardstick: Yardstick, recipe: Recipe, path: Path, sample: int | None, seed: int, clock: Clock) -> Validation:
    """Do the same with a model that is loaded, and the text that the recipe was measured on."""
    model, units, measured = yardstick.model, yardstick.units, recipe.measured
    assert measured is not None
    assignment = recipe_assignment(recipe, units)
    prompts = yardstick.ids[:PROMPTS, :PROMPT].to(model.device)
    with clock.stage("generate", "generating with the original"):
        expected = _generate(model, prompts, None)
    packed, others = _drawn(assignment.weights, sample, seed)
    run = _PackedRun(recipe)
    with ExitStack() as stack:
        with clock.stage("pack", "packing weights") as progress:
            tensors = stack.enter_context(packed_weights(model, units, packed, progress))
            stack.enter_context(quantized(model, units, Assignment(others)))
            _round_inputs(stack, model, units, packed)
        with clock.stage("validate", "running on packed bytes") as progress:
            divergence = yardstick.measure_as_is(progress, run)
        with clock.stage("generate", "generating from packed bytes"), packed_attention(model):
            cache = QuantizedKVCache.from_recipe(recipe, model.config, kernels(), max_tokens=PROMPT + GENERATED)
            agreement = _agreement(_generate(model, prompts, cache), expected)
            from_bytes = _attention_difference(model, recipe, prompts)
    wrong = [t for t in tensors if not t.is_right]
    problems = [*(_describe(t) for t in wrong), *run.check.problems()]
    if from_bytes > ATTENTION_TOLERANCE:
        problems.append(
            f"attention over packed bytes and over decoded tokens differ by {from_bytes:.2g} of the largest hidden state, more than {ATTENTION_TOLERANCE:g}"
        )
    difference = divergence.mean_kl - measured.kl
    allowed = max(measured.kl_stderr, 3 * measured.noise_floor)
    if abs(difference) > allowed:
        problems.append(
            f"the measured KL is {divergence.mean_kl:.6g}, but the search measured {measured.kl:.6g} ± {measured.kl_stderr:.2g}"
        )
    entry = recipes.ValidationEntry(
        kernels=where(), passed=not problems, units=len({t.unit for t in tensors}), tensors=len(tensors), differing=len(wrong),
        weight_bytes=-(-weight_cost(units, assignment.weights).whole_bits // 8), weight_bytes_original=2 * units.parameters,
        cache_bytes=run.cache_bytes, cache_bytes_original=run.original_bytes,
        kl=six_digits(divergence.mean_kl), kl_stderr=six_digits(divergence.stderr), top1_agreement=six_digits(divergence.top1_agreement),
        perplexity=six_digits(divergence.perplexity), greedy_agreement=six_digits(agreement), attention_difference=six_digits(from_bytes),
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )  # fmt: skip
    recipe = recipe.model_copy(update={"validation": entry})
    recipe.write(path)
    return Validation(recipe, path, entry, divergence, tuple(tensors), tuple(problems), clock.seconds)


class _PackedRun:
    """A forward pass through a packed cache: prefill in chunks, the end token by token. Notes the bytes held, and checks the first pass."""

    def __init__(self, recipe: recipes.Recipe) -> None:
        self.recipe = recipe
        self.check = CacheCheck()
        self.cache_bytes = self.original_bytes = 0

    def __call__(self, model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
        cache = QuantizedKVCache.from_recipe(self.recipe, model.config, kernels())
        if not self.cache_bytes:
            self.check.listen(cache)
        prefill = max(0, ids.shape[1] - DECODED)
        steps = [*ids[:, :prefill].split(cache.steps(prefill, CHUNK), dim=1), *ids[:, prefill:].split(1, dim=1)]
        hidden = torch.cat([hidden_states(model, step, cache) for step in steps if step.shape[1]], dim=1)
        self.check.weigh(cache)
        self.cache_bytes = max(self.cache_bytes, cache.nbytes)
        values = sum(2 * side.values_held for layer in cache.packed_layers for side in (layer.key, layer.value))
        self.original_bytes = max(self.original_bytes, values)
        return hidden


def _drawn(formats: Mapping[str, Format], sample: int | None, seed: int) -> tuple[dict[str, Format], dict[str, Format]]:
    """Return (units that the kernels pack, the rest)."""
    names = sorted(name for name, fmt in formats.items() if not fmt.is_original)
    chosen = set(names if sample is None else random.Random(seed).sample(names, min(sample, len(names))))
    return {n: formats[n] for n in chosen}, {n: f for n, f in formats.items() if n not in chosen}


def _round_inputs(stack: ExitStack, model: PreTrainedModel, units: Any, packed: Mapping[str, Format]) -> None:
    """Round the inputs of the packed layers whose format quantizes them too."""
    for unit in units.weights:
        fmt = packed.get(unit.name)
        if fmt is not None and fmt.activation is not None:
            for tensor in unit.tensors:
                hook = quantize_input(fmt.activation)
                stack.callback(model.get_submodule(tensor.name).register_forward_pre_hook(hook).remove)


def _generate(model: PreTrainedModel, prompts: torch.Tensor, cache: Cache | None) -> torch.Tensor:
    given = {} if cache is None else {cache_argument(model): cache}
    with torch.no_grad():
        found: torch.Tensor = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=GENERATED, min_new_tokens=GENERATED,
            pad_token_id=0, **given,
        )  # fmt: skip
    return found[:, prompts.shape[1] :]


def _attention_difference(model: PreTrainedModel, recipe: recipes.Recipe, prompts: torch.Tensor) -> float:
    """Decode one token after the prompts, attending to packed bytes and to decoded tokens.

    Returns the largest difference of the last hidden states over the largest of them; 0 where the cache stays in 16 bit.
    """
    found = []
    for attends in (True, False):
        backend = replace(kernels(), attends=attends)
        cache = QuantizedKVCache.from_recipe(recipe, model.config, backend, max_tokens=prompts.shape[1])
        with torch.no_grad():
            hidden_states(model, prompts[:, :-1], cache)
            found.append(hidden_states(model, prompts[:, -1:], cache).double())
    from_bytes, decoded = found
    return float((from_bytes - decoded).abs().max() / decoded.abs().max())


def _agreement(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Share of the tokens before the first that differs, averaged over the prompts."""
    return float((found == expected).cumprod(dim=1).float().mean())


def _describe(tensor: PackedTensor) -> str:
    words = [f"kernel and reference differ in {', '.join(tensor.differs)}"] if tensor.differs else []
    if tensor.stored_bits != tensor.priced_bits:
        words.append(f"it takes {tensor.stored_bits / 8:g} bytes, the cost model counts {tensor.priced_bits / 8:g}")
    return f"{tensor.unit} ({tensor.tensor}, {tensor.format}): {'; '.join(words)}"
