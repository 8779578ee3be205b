"""What `import autoq` offers: the verbs with Python's arguments.

Each takes a loaded model or a name, makes the same `SearchConfig` that the command line makes, and calls `autoq.api`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

with suppress(ImportError):  # no triton on this platform
    import autoq.kernels.launch  # noqa: F401  without a GPU this turns Triton's interpreter on, before anything else imports triton

from autoq import api
from autoq import recipe as recipes
from autoq.arguments import ProfileOptions, SearchOptions, asked, is_tokenizer, verb
from autoq.budget import parse_bytes, parse_size
from autoq.config import SearchConfig
from autoq.cost.targets import target_of
from autoq.display.notebook import reporter_of
from autoq.display.progress import Reporter
from autoq.errors import UserError
from autoq.kinds import BATCHES, RUN, SIZES, TEXT
from autoq.model import load
from autoq.model.given import Given, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@verb(name=TEXT)
def load_model(name: str = "demo", device: str = "auto", dtype: str = "auto") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer.

    Args:
        name: "demo" (bundled), a Hub name, a folder or a .gguf file.
        device: auto, cpu, cuda, cuda:1 ...
        dtype: float32, bfloat16, float16 or auto.

    Raises UserError for what cannot be loaded.
    """
    source, where = load.model_source(name), load.pick_device(str(device))
    load.load_config(source)
    return load.load_model(source, where, str(dtype).removeprefix("torch.")), load.load_tokenizer(source)


@verb(ProfileOptions)
def profile(
    model: PreTrainedModel | str = "demo", text: Any = None, *, progress: bool | Reporter = True, **options: Unpack[ProfileOptions]
) -> api.ProfileResult:
    """Score what every format would cost every unit, in nats of KL per token; any budget can be searched from it.

    Args:
        model: loaded, or a name as `load_model` takes it; a loaded one is as before afterwards, also after an interrupt.
        text: a tokenizer, or batches of token ids [sequences, tokens], full and without padding (tensors, lists, or mappings with
            "input_ids"), or a text file or dataset; by default Python's own documentation.
        progress: bars, or an object that takes them.
        options: as `autoq profile` has them; its --help explains each.

    Raises UserError for a mistake in what was asked.
    """
    config, given = asked(model, text, None, dict(options))
    return api.profile(config, reporter_of(progress), given)


@verb(SearchOptions)
def search(
    model: PreTrainedModel | str = "demo", text: Any = None, *, eval: Any = None,  # noqa: A002
    progress: bool | Reporter = True, **options: Unpack[SearchOptions],
) -> api.SearchResult:  # fmt: skip
    """Find the recipe that costs the least quality within a budget, and measure it.

    Args:
        model: as in `profile`.
        text: as in `profile`.
        eval: text or batches to measure on, never what is profiled. With `text` in batches it is needed, in batches too; with trials or
            max_kl its first half is for those, and the result is measured on the other.
        progress: as in `profile`.
        options: as `autoq search` has them: budget="4.5bits", kv_budget="6bits", memory="24GiB", context="32k", trials=60 ...; its --help explains
            each.

    Raises UserError for a mistake in what was asked, such as a budget that cannot be met.
    """
    config, given = asked(model, text, eval, dict(options))
    return api.search(config, reporter_of(progress), given)


@verb(SearchOptions)
def search_front(
    model: PreTrainedModel | str = "demo", text: Any = None, *, eval: Any = None,  # noqa: A002
    progress: bool | Reporter = True, **options: Unpack[SearchOptions],
) -> api.FrontResult:  # fmt: skip
    """Return the trade-off between damage and memory, not one recipe: `autoq search --front`; with trials it is measured.

    Args and errors as in `search`.
    """
    config, given = asked(model, text, eval, dict(options), front=True)
    return api.search_front(config, reporter_of(progress), given)


@verb(run=RUN)
def front(
    run: Path | str | api.SearchResult | api.LoadedRun | api.ProfileResult | None = None, budgets: Sequence[float] | None = None
) -> api.FrontResult:
    """Return the least predicted damage at every budget, from the run folder of a finished profile.

    Args:
        run: the folder, or what a search or a profile returned; by default the newest in runs.
        budgets: bits per value; by default 2 to 9 in quarters.
    """
    if isinstance(run, (api.SearchResult, api.LoadedRun)):
        return run.front(budgets)
    if isinstance(run, api.ProfileResult):
        return api.front(run.run, budgets)
    return api.front(api.find_profile(None if run is None else Path(run)), budgets)


@verb()
@contextmanager
def quantized(
    model: PreTrainedModel, recipe: recipes.Recipe | api.SearchResult | api.LoadedRun | Path | str, caches: bool = True
) -> Iterator[PreTrainedModel]:
    """Run the block with a recipe's weights, keys and values in place of the model's own; everything is back afterwards.

    Args:
        model: a loaded model.
        recipe: a recipe, a search's result, a recipe file or a run folder.
        caches: round K and V where attention reads them; leave it out with a `QuantizedKVCache`, which holds them packed.

    Raises UserError if the recipe is for another model.
    """
    if isinstance(model, (str, PathLike)):
        raise UserError(f"the model is {str(model)!r}: load it first, as autoq.load_model({str(model)!r}) does")
    with api.quantized(model, _recipe(recipe), caches) as changed:
        yield changed


@verb(context=SIZES, batch=BATCHES)
def memory(
    model: PreTrainedModel | str | None = None, context: int | str | Sequence[int | str] = "1k", batch: int | Sequence[int] = 1, *,
    recipe: recipes.Recipe | api.SearchResult | api.LoadedRun | Path | str | None = None, engine: str = SearchConfig.engine, target: str = SearchConfig.target,
    available: int | str | None = None,
) -> api.Memory:  # fmt: skip
    """Price weights and KV cache for every KV format, context and batch; a config alone is enough.

    Args:
        model: loaded, a name or a folder; by default the recipe's, else demo.
        context: tokens (32768 or "32k"), one or several.
        batch: sequences, one or several.
        recipe: count weights and cache as it stores them.
        engine: count its pages.
        target: a device such as "h100".
        available: its memory, "24GiB" or bytes, by default the target's; then what fits is told too.

    Raises UserError for a context beyond the model's maximum, or a recipe that engine or target cannot serve.
    """
    its = None if recipe is None else _recipe(recipe)
    contexts = [
        parse_size(str(c)) for c in (context if isinstance(context, Iterable) and not isinstance(context, str) else [context])
    ]
    batches = [int(b) for b in (batch if isinstance(batch, Iterable) else [batch])]
    device = target_of(target)
    text = f"{available}B" if isinstance(available, Integral) else available
    room = device.memory if text is None else parse_bytes(str(text), "available")
    return api.memory(_named(model) or (its.model.id if its else load.DEMO), contexts, batches, its, engine, room, target)


@verb()
def validate(
    recipe: recipes.Recipe | api.SearchResult | api.LoadedRun | Path | str, model: PreTrainedModel | str | None = None, text: Any = None, *,
    sample: int | None = None, seed: int = SearchConfig.seed, progress: bool | Reporter = True,
) -> api.Validation:  # fmt: skip
    """Pack a recipe with the real kernels, check every byte, and measure the model that runs on them.

    Args:
        recipe: a recipe file, a run folder or a search's result; what was found is written into the file.
        model: loaded, or where it is; by default the one that the recipe names.
        text: its tokenizer, or the batches that the recipe was measured on.
        sample: pack only so many units.
        seed: by which they are drawn.
        progress: bars, or an object that takes them.

    Raises UserError for a recipe of another model, or a recipe in memory whose file is not known.
    """
    model = _named(model)
    if isinstance(recipe, api.SearchResult):
        given = recipe.plan.given
        model = model or given.model
        text = text if text is not None else given.eval_ids if given.eval_ids is not None else given.tokenizer
    elif isinstance(recipe, recipes.Recipe):
        raise UserError(
            "validate writes what it finds into the recipe's file: give the file, the run folder or the search's result"
        )
    path = _file_of(recipe)
    loaded = None if model is None or isinstance(model, str) else model
    has_tokenizer = is_tokenizer(text)
    ids = None if text is None or has_tokenizer else token_ids(text, "text")
    given = Given(loaded, text if has_tokenizer else None, None, ids)
    return api.validate(path, model if isinstance(model, str) else None, sample, seed, reporter_of(progress), given)


@verb()
def export(
    recipe: recipes.Recipe | api.SearchResult | api.LoadedRun | Path | str, to: str, out: Path | str | None = None, rounding: str = "none",
    model: PreTrainedModel | str | None = None,
) -> api.ExportReport | list[api.ExportReport]:  # fmt: skip
    """Write a recipe for a PTQ tool or a serving engine, or for "all" of them, and say what it cannot say.

    Args:
        to: modelopt, llm-compressor, compressed-tensors, auto-round, gptqmodel, torchao, transformers, vllm, sglang, tensorrt-llm, llama.cpp, mlx;
            or all.
        out: the folder; by default export/CONSUMER beside the recipe's file, else below the working folder.
        rounding: "none" refuses what the consumer lacks; "scales" lets it pick its own scales for the same bytes; "up" also takes its next
            better format.
        model: by default the one that the recipe names; its config is enough.

    Raises ExportRefusedError, with a `report` of every loss, where something would be lost that `rounding` does not allow.
    """
    model = _named(model)
    if isinstance(recipe, api.SearchResult):  # its own recipe, whatever the run folder holds by now
        folder = recipe.run / "export" if to == api.ALL else recipe.run / "export" / to
        return recipe.recipe.export(to, out or folder, rounding, model or recipe.plan.given.model)
    its = recipe if isinstance(recipe, recipes.Recipe) else _file_of(recipe)
    return api.export_all(its, out, rounding, model) if to == api.ALL else api.export(its, to, out, rounding, model)


@verb()
def import_recipe(
    path: Path | str, model: PreTrainedModel | str = "demo", kind: str | None = None, out: Path | str = "imported.yaml", *, calib: str | None = None,
    context: int | str | None = None, batch: int = 1, progress: bool | Reporter = True,
) -> api.Imported:  # fmt: skip
    """Make a recipe of what another tool wrote, to show, price, check and measure it; see `autoq import`.

    Args:
        path: a recipe, a config.json, a GGUF file, or a checkpoint folder.
        model: the 16-bit model it is for, loaded or a name.
        kind: the file's format; by default by its looks.
        out: the recipe to write; nothing may be there yet.
        calib: text on which caches with static scales are calibrated.
        context: tokens at which the cache is priced.
        batch: sequences for which the cache is priced.
        progress: bars, or an object that takes them.
    """
    tokens = None if context is None else parse_size(str(context))
    return api.import_recipe(path, _named(model), kind, out, calib, tokens, batch, reporter_of(progress))


@verb()
def check(
    recipe: recipes.Recipe | api.SearchResult | api.LoadedRun | Path | str, model: PreTrainedModel | str | None = None, *, engine: str | None = None,
    target: str | None = None, consumer: str | None = None,
) -> api.Checked:  # fmt: skip
    """Check a recipe against its model, an engine, a device and a tool; `problems` says what is wrong."""
    if isinstance(recipe, api.SearchResult):
        model = model or recipe.plan.given.model
    return api.check(_recipe(recipe), _named(model), engine, target, consumer)


@verb()
def retrieval(
    recipe: Path | str | api.SearchResult | api.LoadedRun, model: PreTrainedModel | str | None = None, text: PreTrainedTokenizerBase | None = None, *, lengths: Sequence[int] = (256,), depths: Sequence[float] = (0.0, 0.5, 1.0),
    samples: int = 4, seed: int = SearchConfig.seed, progress: bool | Reporter = True,
) -> api.Retrieval:  # fmt: skip
    """Plant facts in generated text, and see whether the quantized model finds them as the original does.

    Args:
        recipe: a recipe file, a run folder or a search's result.
        model: loaded, or where it is; by default the one that the recipe names.
        text: its tokenizer, where the model does not say where it was loaded from.
        lengths: tokens of a prompt.
        depths: where the fact stands, 0 to 1.
        samples: prompts for every kind, length and depth.
        seed: of the generated text.
        progress: bars, or an object that takes them.
    """
    model = _named(model)
    if text is not None and not is_tokenizer(text):
        raise UserError(f"text is a {type(text).__name__}: give the model's tokenizer")
    if isinstance(recipe, recipes.Recipe):
        raise UserError("retrieval reads a recipe's file: give the file, the run folder or the search's result")
    path = _file_of(recipe)
    if isinstance(recipe, api.SearchResult):
        model, text = model or recipe.plan.given.model, text or recipe.plan.given.tokenizer
    given = Given(None if model is None or isinstance(model, str) else model, text)
    name = model if isinstance(model, str) else None
    return api.retrieval(path, name, lengths, depths, samples, seed, reporter_of(progress), given)


@verb()
def report(result: api.HasFindings | Path | str, out: Path | str | None = None, model: PreTrainedModel | str | None = None) -> Path:
    """Write the report of a search, one HTML file that opens without a network, and return where it is.

    Args:
        result: what a search returned, or its run folder.
        out: by default report.html in the run folder.
        model: loaded, or where it is, for what other tools take.
    """
    if isinstance(result, api.SearchResult):
        model = model or result.plan.given.model
    return api.report(result, out, _named(model))


def _named(model: Any) -> Any:
    """Return a model's name as text where a path was given."""
    return str(model) if isinstance(model, PathLike) else model


def _file_of(recipe: api.SearchResult | api.LoadedRun | Path | str) -> Path:
    """Return a recipe's file; raises UserError if another search than the one at hand has put its own there."""
    if not isinstance(recipe, api.SearchResult):
        return api.find_recipe(recipe.run if isinstance(recipe, api.LoadedRun) else Path(recipe))
    if api.read_recipe(recipe.recipe_path).weights != recipe.recipe.weights:
        raise UserError(f"{str(recipe.recipe_path)!r} holds the recipe of a later search: name the file that this one was kept in")
    return recipe.recipe_path


def _recipe(recipe: recipes.Recipe | api.SearchResult | api.LoadedRun | Path | str) -> recipes.Recipe:
    if isinstance(recipe, (api.SearchResult, api.LoadedRun)):
        return recipe.recipe
    return recipe if isinstance(recipe, recipes.Recipe) else api.read_recipe(recipe)
