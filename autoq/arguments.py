"""Python's arguments: options by name with the defaults of `SearchConfig`, and what is in memory already."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict, TypeVar

from autoq.budget import parse_duration, parse_size
from autoq.config import SearchConfig
from autoq.errors import UserError, python_words, unknown
from autoq.kinds import Kind, check_kind, kinds_checked
from autoq.model.given import Given, dtype_of, name_of, source_of, token_ids

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

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


def verb(options: type | None = None, **kinds: Kind) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Make a function one of `import autoq`: arguments of the wrong kind are named, and errors speak of Python's options.

    Args:
        options: shown one by one, with their defaults, in the signature, where notebooks and `help` look.
        kinds: of parameters that are not what their name says elsewhere.
    """

    def change(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        checked = kinds_checked(kinds)(function)

        @functools.wraps(function)
        def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            with python_words():
                return checked(*args, **kwargs)

        if options is not None:
            called.__signature__ = _with_options(inspect.signature(function), options)  # type: ignore[attr-defined]
        return called

    return change


def _with_options(own: inspect.Signature, options: type) -> inspect.Signature:
    hints, defaults = options.__annotations__, SearchConfig()
    for base in options.__mro__[1:]:
        hints = {**getattr(base, "__annotations__", {}), **hints}
    shown = {name: getattr(hint, "__forward_arg__", hint) for name, hint in hints.items()}  # as they are written here
    listed = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    listed += [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=getattr(defaults, n), annotation=a) for n, a in shown.items()
    ]
    return own.replace(parameters=listed)


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
    elif isinstance(text, (str, PathLike)):
        if config.get("calib") is not None:
            raise UserError(CALIB_IS_GIVEN)
        config["calib"] = str(text)
    elif text is not None:
        if config.get("calib") is not None:
            raise UserError(CALIB_IS_GIVEN)
        ids = token_ids(text, "text")
        config |= {"samples": len(ids), "seq_len": ids.shape[1]}
    if isinstance(eval_, (str, PathLike)):
        config["eval"] = str(eval_)
    elif eval_ is not None:
        eval_ids = token_ids(eval_, "eval")
    loaded = None
    if isinstance(model, str):
        config["model"] = model
    elif isinstance(model, PathLike):
        config["model"] = str(model)
    else:
        loaded = model
        config |= _of_loaded(loaded, config)
    is_search = any(name in config for name in ("budget", "kv_budget", "memory", "max_kl", "front"))
    if ids is not None and eval_ids is None and is_search:
        raise UserError("text is given in batches: give eval in batches too, sequences that are not profiled to measure on")
    if loaded is not None and ids is None and tokenizer is None:
        tokenizer = Given(loaded).load_tokenizer(source_of(loaded))
    if ids is not None and len(ids) < 2:
        raise UserError("text has 1 sequence: give at least 2, and more for a prediction to trust")
    _check_apart(ids, eval_ids)
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


def _check_apart(ids: torch.Tensor | None, eval_ids: torch.Tensor | None) -> None:
    """Raise UserError for sequences that would be profiled and measured on."""
    if ids is None or eval_ids is None:
        return
    profiled = [row.numpy().tobytes() for row in ids]
    measured = [row.numpy().tobytes() for row in eval_ids]
    if both := sum(any(one in other or other in one for other in profiled) for one in measured):
        raise UserError(f"eval has {both} sequences that are profiled, whole or in part: measure on text that was not profiled")


def _plain(name: str, value: Any) -> Any:
    """Return an option's value as `SearchConfig` has it; raises UserError for one of the wrong kind."""
    check_kind(name, value, getattr(SearchConfig, name))
    if value is None:
        return None
    if name in ("budget", "kv_budget", "memory") and not isinstance(value, str):
        return f"{value:g}" if name != "memory" else f"{int(value)}B"
    if name == "context" and isinstance(value, str):
        return parse_size(value)
    if name == "timeout" and isinstance(value, str):
        return parse_duration(value)
    if name == "run":
        if not str(value):
            raise UserError("run is empty: give a folder, or leave the option out")
        return Path(value)
    if name == "include":
        return (value,) if isinstance(value, str) else tuple(value)
    if name in ("device", "dtype"):
        return str(value).removeprefix("torch.")
    if isinstance(value, Real) and not isinstance(value, bool):
        return int(value) if isinstance(value, Integral) else float(value)  # numpy's too
    return str(value) if isinstance(value, PathLike) else value


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


def is_tokenizer(text: Any) -> bool:
    """True for a tokenizer, as opposed to text or token ids."""
    from transformers import PreTrainedTokenizerBase

    return isinstance(text, PreTrainedTokenizerBase)
