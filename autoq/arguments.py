"""Python's arguments: options by name with the defaults of `SearchConfig`, and what is in memory already."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict, TypeVar

from autoq.api.exporting import ExportRefusedError
from autoq.budget import parse_duration, parse_size
from autoq.config import SearchConfig
from autoq.errors import UserError, unknown
from autoq.model import load
from autoq.model.given import Given, dtype_of, name_of, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
NUMBERS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("budget", "kv_budget"), (str, float, int)), **dict.fromkeys(("memory", "context"), (str, int)), "timeout": (str, float, int),
    "max_kl": (float, int),
    **dict.fromkeys(
        ("samples", "seq_len", "eval_samples", "eval_len", "batch", "correct", "validate", "weak", "trials", "trial_samples", "workers", "seed",
         "profile_batch"), (int,),
    ),
}  # fmt: skip
KINDS = {str: "text", int: "a whole number", float: "a number"}
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


def with_options(options: type) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
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
            with python_words():
                return function(*args, **kwargs)

        called.__signature__ = own.replace(parameters=listed)  # type: ignore[attr-defined]
        return called

    return change


@contextmanager
def python_words() -> Iterator[None]:
    """Name options as Python does in the errors of what is shared with the command line; commands in backticks stay."""
    try:
        yield
    except ExportRefusedError:
        raise
    except UserError as error:
        parts = str(error).split("`")
        parts[::2] = [re.sub(r"--([a-z][a-z-]*)", lambda m: m[1].replace("-", "_"), part) for part in parts[::2]]
        error.args = ("`".join(parts), *error.args[1:])
        raise


def asked(model: Any, text: Any, eval_: Any, options: dict[str, Any], front: bool = False) -> tuple[SearchConfig, Given]:
    """Return the options as the command line would make them, and what is in memory already."""
    known = {f.name for f in fields(SearchConfig)} - {"model", "eval", "front"}
    for name in options:
        if name not in known:
            raise unknown("option", name, sorted(known))
    config = {name: _plain(name, value) for name, value in options.items()} | ({"front": True} if front else {})
    tokenizer = ids = eval_ids = trial_ids = None
    if is_tokenizer(text):
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
    is_search = any(name in config for name in ("budget", "kv_budget", "memory", "max_kl", "front"))
    if ids is not None and eval_ids is None and is_search:
        raise UserError("text is given in batches: give eval in batches too, sequences that are not profiled to measure on")
    if loaded is not None and ids is None and tokenizer is None:
        tokenizer = _tokenizer_of(loaded)
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
    if name in NUMBERS and value is not None and (isinstance(value, bool) or not isinstance(value, NUMBERS[name])):
        raise UserError(f"{name} is {value!r}, but must be {' or '.join(KINDS[kind] for kind in NUMBERS[name])}")
    if name in ("budget", "kv_budget", "memory") and value is not None and not isinstance(value, str):
        return f"{value:g}" if name != "memory" else f"{int(value)}B"
    if name == "context" and isinstance(value, str):
        return parse_size(value)
    if name == "timeout" and isinstance(value, str):
        return parse_duration(value)
    if name == "run" and value is not None:
        if not str(value):
            raise UserError("run is empty: give a folder, or leave the option out")
        return Path(value)
    if name == "include":
        if value is None:
            return ()
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


def _tokenizer_of(loaded: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a loaded model from where the model came from; raises UserError if there is none."""
    name = name_of(loaded)
    if name == type(loaded).__name__:  # nothing that a hub should be asked for
        raise UserError("the model does not say where it was loaded from: give its tokenizer, or batches of token ids")
    try:
        return load.load_tokenizer(load.model_source(name))
    except UserError as error:
        raise UserError(
            f"the model was loaded from {name!r}, and its tokenizer is not there: give it, or batches of token ids ({error})"
        ) from error


def is_tokenizer(text: Any) -> bool:
    """True for a tokenizer, as opposed to text or token ids."""
    from transformers import PreTrainedTokenizerBase

    return isinstance(text, PreTrainedTokenizerBase)
