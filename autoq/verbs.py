"""What `import autoq` offers: the verbs with Python's arguments.

Each takes a loaded model or a name, makes the same `SearchConfig` that the command line makes, and calls `autoq.api`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict, TypeVar

from typing_extensions import Unpack

with suppress(ImportError):  # no triton on this platform
    pass  # without a GPU this turns Triton's interpreter on, before anything else imports triton

from autoq import api
from autoq import recipe as recipes
from autoq.budget import parse_bytes, parse_duration, parse_size
from autoq.config import SearchConfig
from autoq.cost.targets import target_of
from autoq.display.notebook import reporter_of
from autoq.display.progress import Reporter
from autoq.errors import UserError, unknown
from autoq.model import load
from autoq.model.given import Given, dtype_of, name_of, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
CALIB_IS_GIVEN = "text and calib are both given: text is the tokenizer, the batches or the file to profile"


class ProfileOptions(TypedDict, total=False):
    """Options of `profile`; what is left out has the default of `SearchConfig`."""

    space: str | Path
    calib: str | Path | None
    samples: int
    seq_len: int
    run: str | Path | None
    resume: bool
    include: str | Sequence[str]
    seed: int
    device: str
    dtype: str
    profile_batch: int


class SearchOptions(ProfileOptions, total=False):
    """Options of `search`; what is left out has the default of `SearchConfig`."""

    budget: str | float | None
    kv_budget: str | float | None
    memory: str | int | None
    target: str
    engine: str
    consumer: str
    eval_samples: int
    eval_len: int
    context: int | str | None
    batch: int
    correct: int
    validate: int
    weak: int
    trials: int
    sampler: str
    trial_samples: int
    storage: str | None
    study: str | None
    workers: int
    timeout: float | str | None
    max_kl: float | None
    sides: str


def _shown(options: type) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Show every option with its default in a function's signature, where notebooks and `help` look."""

    def change(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        hints, defaults = options.__annotations__, SearchConfig()
        for base in options.__mro__[1:]:
            hints = {**getattr(base, "__annotations__", {}), **hints}
        own = inspect.signature(function)
        listed = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        listed += [
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=getattr(defaults, n), annotation=a)
            for n, a in hints.items()
        ]

        @functools.wraps(function)
        def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            with _python_words():
                return function(*args, **kwargs)

        called.__signature__ = own.replace(parameters=listed)  # type: ignore[attr-defined]
        return called

    return change


@contextmanager
def _python_words() -> Iterator[None]:
    """Name options as Python does in the errors of what is shared with the command line; commands in backticks stay."""
    try:
        yield
    except api.ExportRefusedError:
        raise
    except UserError as error:
        parts = str(error).split("`")
        parts[::2] = [re.sub(r"--([a-z][a-z-]*)", lambda m: m[1].replace("-", "_"), part) for part in parts[::2]]
        error.args = ("`".join(parts), *error.args[1:])
        raise


def load_model(name: str = "demo", device: str = "auto", dtype: str = "auto") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer.

    Args:
        name: "demo" (bundled), a Hub name, a folder or a .gguf file.
        device: auto, cpu, cuda, cuda:1 ...
        dtype: float32, bfloat16, float16 or auto.

    Raises UserError for what cannot be loaded.
    """
    with _python_words():
        source, where = load.model_source(name), load.pick_device(device)
        load.load_config(source)
        return load.load_model(source, where, dtype), load.load_tokenizer(source)


@_shown(ProfileOptions)
def profile(
    model: PreTrainedModel | str = "demo", text: Any = None, *, progress: bool | Reporter = True, **options: Unpack[ProfileOptions]
) -> api.ProfileResult:
    """Score what every format would cost every unit, in nats of KL per token; any budget can be searched from it.

    Args:
        model: loaded, or a name as `load_model` takes it; a loaded one is as before afterwards, also after an interrupt.
        text: a tokenizer, or batches of token ids [sequences, tokens], full and without padding (tensors, lists, or mappings with
            "input_ids"), or a text file or dataset; by default Python's own documentation.
        progress: bars, or an object that takes them.
        options: as `autoq profile` has them.

    Raises UserError for a mistake in what was asked.
    """
    asked, given = _asked(model, text, None, dict(options))
    return api.profile(asked, reporter_of(progress), given)


@_shown(SearchOptions)
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
        options: as `autoq search` has them: budget="4.5bits", kv_budget="6bits", memory="24GiB", context="32k", trials=60 ...

    Raises UserError for a mistake in what was asked, such as a budget that cannot be met.
    """
    asked, given = _asked(model, text, eval, dict(options))
    return api.search(asked, reporter_of(progress), given)


@_shown(SearchOptions)
def search_front(
    model: PreTrainedModel | str = "demo", text: Any = None, *, eval: Any = None,  # noqa: A002
    progress: bool | Reporter = True, **options: Unpack[SearchOptions],
) -> api.FrontResult:  # fmt: skip
    """Return the trade-off between damage and memory, not one recipe: `autoq search --front`; with trials it is measured.

    Args and errors as in `search`.
    """
    asked, given = _asked(model, text, eval, {**options, "front": True})
    return api.search_front(asked, reporter_of(progress), given)


def front(run: Path | str, budgets: Sequence[float] | None = None) -> api.FrontResult:
    """Return the least predicted damage at every budget, from the run folder of a finished profile.

    Args:
        budgets: bits per value; by default 2 to 9 in quarters.
    """
    with _python_words():
        return api.front(Path(run), budgets)


@contextmanager
def quantized(
    model: PreTrainedModel, recipe: recipes.Recipe | api.SearchResult | Path | str, caches: bool = True
) -> Iterator[PreTrainedModel]:
    """Run the block with a recipe's weights, keys and values in place of the model's own; everything is back afterwards.

    Args:
        model: a loaded model.
        recipe: a recipe, a search's result, a recipe file or a run folder.
        caches: round K and V where attention reads them; leave it out with a `QuantizedKVCache`, which holds them packed.

    Raises UserError if the recipe is for another model.
    """
    with api.quantized(model, _recipe(recipe), caches) as changed:
        yield changed


def memory(
    model: PreTrainedModel | str | None = None, context: int | str | Sequence[int | str] = "1k", batch: int | Sequence[int] = 1, *,
    recipe: recipes.Recipe | api.SearchResult | Path | str | None = None, engine: str = SearchConfig.engine, target: str = SearchConfig.target,
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
    with _python_words():
        its = None if recipe is None else _recipe(recipe)
        contexts = [parse_size(str(c)) for c in ([context] if isinstance(context, (int, str)) else context)]
        batches = [batch] if isinstance(batch, int) else list(batch)
        device = target_of(target)
        room = device.memory if available is None else parse_bytes(str(available), "available")
        return api.memory(model or (its.model.id if its else load.DEMO), contexts, batches, its, engine, room, target)


def validate(
    recipe: recipes.Recipe | api.SearchResult | Path | str, model: PreTrainedModel | str | None = None, text: Any = None, *,
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
    if isinstance(recipe, api.SearchResult):
        given = recipe.plan.given
        model, path = model or given.model, recipe.recipe_path
        text = text if text is not None else given.eval_ids if given.eval_ids is not None else given.tokenizer
    elif isinstance(recipe, recipes.Recipe):
        raise UserError(
            "validate writes what it finds into the recipe's file: give the file, the run folder or the search's result"
        )
    else:
        path = api.find_recipe(Path(recipe))
    with _python_words():
        loaded = None if model is None or isinstance(model, str) else model
        is_tokenizer = _is_tokenizer(text)
        ids = None if text is None or is_tokenizer else token_ids(text, "text")
        given = Given(loaded, text if is_tokenizer else None, None, ids)
        return api.validate(path, model if isinstance(model, str) else None, sample, seed, reporter_of(progress), given)


def export(
    recipe: recipes.Recipe | api.SearchResult | Path | str, to: str, out: Path | str | None = None, rounding: str = "none",
    model: PreTrainedModel | str | None = None,
) -> api.ExportReport | list[api.ExportReport]:  # fmt: skip
    """Write a recipe for a PTQ tool or a serving engine, or for "all" of them, and say what it cannot say.

    Args:
        to: modelopt, llm-compressor, compressed-tensors, auto-round, gptqmodel, torchao, transformers, vllm, sglang, tensorrt-llm, llama.cpp, mlx;
            or all.
        out: the folder; by default export/<consumer> beside the recipe's file, else below the working folder.
        rounding: "none" refuses what the consumer lacks; "scales" lets it pick its own scales for the same bytes; "up" also takes its next
            better format.
        model: by default the one that the recipe names; its config is enough.

    Raises ExportRefusedError, with a `report` of every loss, where something would be lost that `rounding` does not allow.
    """
    with _python_words():
        its = recipe.recipe_path if isinstance(recipe, api.SearchResult) else recipe
        if isinstance(recipe, api.SearchResult):
            model = model or recipe.plan.given.model
        if not isinstance(its, recipes.Recipe):
            its = api.find_recipe(Path(its))
        return api.export_all(its, out, rounding, model) if to == api.ALL else api.export(its, to, out, rounding, model)


def import_recipe(
    path: Path | str, model: str = "demo", kind: str | None = None, out: Path | str = "imported.yaml", *, calib: str | None = None,
    context: int | str | None = None, batch: int = 1, progress: bool | Reporter = True,
) -> api.Imported:  # fmt: skip
    """Make a recipe of what another tool wrote, to show, price, check and measure it; see `autoq import`.

    Args:
        path: a recipe, a config.json, a GGUF file, or a checkpoint folder.
        model: the 16-bit model it is for.
        kind: the file's format; by default by its looks.
        out: the recipe to write; nothing may be there yet.
        calib: text on which caches with static scales are calibrated.
        context: tokens at which the cache is priced.
        batch: sequences for which the cache is priced.
        progress: bars, or an object that takes them.
    """
    with _python_words():
        tokens = None if context is None else parse_size(str(context))
        return api.import_recipe(path, model, kind, out, calib, tokens, batch, reporter_of(progress))


def check(
    recipe: recipes.Recipe | api.SearchResult | Path | str, model: PreTrainedModel | str | None = None, *, engine: str | None = None,
    target: str | None = None, consumer: str | None = None,
) -> api.Checked:  # fmt: skip
    """Check a recipe against its model, an engine, a device and a tool; `problems` says what is wrong."""
    with _python_words():
        return api.check(_recipe(recipe), model, engine, target, consumer)


def retrieval(
    recipe: Path | str | api.SearchResult, model: str | None = None, *, lengths: Sequence[int] = (256,), depths: Sequence[float] = (0.0, 0.5, 1.0),
    samples: int = 4, seed: int = SearchConfig.seed, progress: bool | Reporter = True,
) -> api.Retrieval:  # fmt: skip
    """Plant facts in generated text, and see whether the quantized model finds them as the original does.

    Args:
        recipe: a recipe file, a run folder or a search's result.
        model: where the model is; by default the one that the recipe names.
        lengths: tokens of a prompt.
        depths: where the fact stands, 0 to 1.
        samples: prompts for every kind, length and depth.
        seed: of the generated text.
        progress: bars, or an object that takes them.
    """
    path = recipe.recipe_path if isinstance(recipe, api.SearchResult) else api.find_recipe(Path(recipe))
    with _python_words():
        return api.retrieval(path, model, lengths, depths, samples, seed, reporter_of(progress))


def report(result: api.HasFindings | Path | str, out: Path | str | None = None, model: PreTrainedModel | str | None = None) -> Path:
    """Write the report of a search, one HTML file that opens without a network, and return where it is.

    Args:
        result: what a search returned, or its run folder.
        out: by default report.html in the run folder.
        model: loaded, or where it is, for what other tools take.
    """
    with _python_words():
        if isinstance(result, api.SearchResult):
            model = model or result.plan.given.model
        return api.report(result, out, model)


def _recipe(recipe: recipes.Recipe | api.SearchResult | Path | str) -> recipes.Recipe:
    if isinstance(recipe, api.SearchResult):
        return recipe.recipe
    return recipe if isinstance(recipe, recipes.Recipe) else api.read_recipe(recipe)


def _asked(model: Any, text: Any, eval_: Any, options: dict[str, Any]) -> tuple[SearchConfig, Given]:
    """Return the options as the command line would make them, and what is in memory already."""
    known = {f.name for f in fields(SearchConfig)} - {"model", "eval", "front"}
    for name in options:
        if name not in known and name != "front":
            raise unknown("option", name, sorted(known))
    config = {name: _plain(name, value) for name, value in options.items()}
    tokenizer = ids = eval_ids = trial_ids = None
    if _is_tokenizer(text):
        tokenizer = text
    elif isinstance(text, (str, Path)):
        if config.get("calib") is not None:
            raise UserError(CALIB_IS_GIVEN)
        config["calib"] = str(text)
    elif text is not None:
        if config.get("calib") is not None:
            raise UserError(CALIB_IS_GIVEN)
        ids = token_ids(text, "text")
        config |= {"samples": len(ids), "seq_len": ids.shape[1]}
    if isinstance(eval_, (str, Path)):
        config["eval"] = str(eval_)
    elif eval_ is not None:
        eval_ids = token_ids(eval_, "eval")
    loaded = None
    if isinstance(model, str):
        config["model"] = model
    elif isinstance(model, Path):
        config["model"] = str(model)
    elif hasattr(model, "named_parameters") and hasattr(model, "config"):
        loaded = model
        config |= _of_loaded(loaded, config)
    else:
        raise UserError(f"the model is a {type(model).__name__}: give a loaded transformers model, or a name as a string")
    _check_texts(config, loaded, tokenizer, ids, eval_ids)
    needs_trials = bool(config.get("trials")) or config.get("max_kl") is not None
    if eval_ids is not None and needs_trials and ids is not None:
        half = len(eval_ids) // 2
        if half < 2:
            raise UserError(f"eval has {len(eval_ids)} sequences: with trials or max_kl give at least 4, half of them for those")
        trial_ids, eval_ids = eval_ids[:half], eval_ids[half:]
        config["trial_samples"] = half
    if eval_ids is not None:
        config |= {"eval_samples": len(eval_ids), "eval_len": eval_ids.shape[1]}
    return SearchConfig(**config), Given(loaded, tokenizer, ids, eval_ids, trial_ids)


def _plain(name: str, value: Any) -> Any:
    """Return an option's value as `SearchConfig` has it."""
    if name in ("budget", "kv_budget", "memory") and value is not None and not isinstance(value, str):
        return f"{value:g}" if name != "memory" else f"{int(value)}B"
    if name == "context" and isinstance(value, str):
        return parse_size(value)
    if name == "timeout" and isinstance(value, str):
        return parse_duration(value)
    if name == "run" and value is not None:
        return Path(value)
    if name == "include":
        return (value,) if isinstance(value, str) else tuple(value)
    return str(value) if isinstance(value, Path) else value


def _of_loaded(model: PreTrainedModel, config: dict[str, Any]) -> dict[str, Any]:
    """Return what a loaded model says of itself; raises UserError where options say otherwise."""
    is_, asked = {"device": str(model.device), "dtype": dtype_of(model)}, {}
    for name, value in is_.items():
        if config.get(name, "auto") not in ("auto", value):
            raise UserError(f"{name} is {config[name]!r}, but the model is loaded in {value} already: leave it out")
        asked[name] = value
    if config.get("workers", 1) > 1:
        raise UserError("workers are processes that load the model themselves: give its name instead of a loaded model")
    return {**asked, "model": name_of(model)}


def _check_texts(config: dict[str, Any], loaded: Any, tokenizer: Any, ids: Any, eval_ids: Any) -> None:
    is_search = any(name in config for name in ("budget", "kv_budget", "memory", "max_kl", "front"))
    if ids is not None and eval_ids is None and is_search:
        raise UserError("text is given in batches: give eval in batches too, sequences that are not profiled to measure on")
    if eval_ids is not None and ids is None and tokenizer is None and loaded is not None:
        tokenizer = _tokenizer_of(loaded)
    if loaded is not None and ids is None and tokenizer is None:
        _tokenizer_of(loaded)


def _tokenizer_of(loaded: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a loaded model from where the model came from; raises UserError if there is none."""
    try:
        return load.load_tokenizer(load.model_source(name_of(loaded)))
    except UserError:
        raise UserError("the model does not say where it was loaded from: give its tokenizer, or batches of token ids") from None


def _is_tokenizer(text: Any) -> bool:
    from transformers import PreTrainedTokenizerBase

    return isinstance(text, PreTrainedTokenizerBase)
