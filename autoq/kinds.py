"""What Python's arguments may be, by name: a wrong one is named in a sentence before anything happens."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from os import PathLike
from typing import Any, ParamSpec, TypeVar

from autoq.errors import UserError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Kind:
    """What an argument may be: in words, and as a test."""

    words: str
    accepts: Callable[[Any], bool]

    def __or__(self, other: Kind) -> Kind:
        return Kind(f"{self.words} or {other.words}", lambda value: self.accepts(value) or other.accepts(value))

    def check(self, name: str, value: Any) -> None:
        """Raise UserError for a value that is none of these."""
        if not self.accepts(value):
            raise UserError(f"{name} is {_shown(value)}, but must be {self.words}")


def _shown(value: Any) -> str:
    if isinstance(value, (str, int, float, bool, list, tuple)) or value is None:
        text = repr(value)
        return text if len(text) <= 80 else text[:77] + "..."
    return f"a {type(value).__name__}"


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, PathLike)) and "\0" not in str(value)


def several(kind: Kind, words: str) -> Kind:
    """Return the kind of a sequence (no text) of such values."""

    def accepts(value: Any) -> bool:
        if isinstance(value, (str, bytes, bytearray, Mapping)) or not hasattr(value, "__len__"):
            return False
        try:
            return all(kind.accepts(one) for one in value)
        except TypeError:  # an array without dimensions
            return False

    return Kind(words, accepts)


def _has(*names: str) -> Callable[[Any], bool]:
    return lambda value: all(hasattr(value, name) for name in names)


def _is_of_torch(value: Any) -> bool:
    return type(value).__module__ == "torch" and type(value).__name__ in ("device", "dtype")


TEXT = Kind("text", lambda v: isinstance(v, str))
PATH = Kind("a path", _is_path)
WHOLE = Kind("a whole number", lambda v: isinstance(v, Integral) and not isinstance(v, bool))
NUMBER = Kind("a number", lambda v: isinstance(v, Real) and not isinstance(v, bool) and _is_finite(v))
SWITCH = Kind("True or False", lambda v: isinstance(v, bool))
NAMES = TEXT | several(TEXT, "a list of texts")
NUMBERS = several(NUMBER, "a list of numbers")
COUNTS = several(WHOLE, "a list of whole numbers")
SIZES = WHOLE | TEXT | several(WHOLE | TEXT, "a list of those")
BATCHES = WHOLE | COUNTS
REPORTER = SWITCH | Kind("an object with say() and stage()", _has("say", "stage"))
MODEL = Kind("a name, a path", PATH.accepts) | Kind("a loaded transformers model", _has("named_parameters", "config"))
RECIPE = PATH | Kind("a recipe", _has("weight_formats")) | Kind("what a search returned", _has("recipe"))
RUN = PATH | Kind("what a search or a profile returned", lambda v: _has("run", "plan")(v) or _has("run", "facts")(v))
RESULT = PATH | Kind("what a search returned", _has("findings"))

_BY_NAME: dict[str, Kind] = {
    **dict.fromkeys(("to", "rounding", "kind", "engine", "target", "consumer", "sides", "sampler", "storage", "study"), TEXT),
    **dict.fromkeys(("device", "dtype"), Kind("text", lambda v: TEXT.accepts(v) or _is_of_torch(v))),
    **dict.fromkeys(("run", "out", "space", "calib", "path"), PATH),
    **dict.fromkeys(("budget", "kv_budget"), TEXT | NUMBER),
    **dict.fromkeys(("memory", "available", "context"), TEXT | WHOLE),
    **dict.fromkeys(
        ("samples", "seq_len", "eval_samples", "eval_len", "batch", "correct", "validate", "weak", "trials", "trial_samples", "workers", "seed",
         "profile_batch", "sample"), WHOLE,
    ),
    **dict.fromkeys(("budgets", "measure", "measure_kv", "depths"), NUMBERS),
    **dict.fromkeys(("resume", "caches"), SWITCH),
    "timeout": TEXT | NUMBER, "max_kl": NUMBER, "lengths": COUNTS, "include": NAMES, "progress": REPORTER, "model": MODEL, "recipe": RECIPE,
    "result": RESULT,
}  # fmt: skip


def check_kind(name: str, value: Any, default: Any = inspect.Parameter.empty, kind: Kind | None = None) -> None:
    """Raise UserError where an argument of that name is of another kind; None is allowed where it is the default.

    Args:
        kind: where it is not what the name says elsewhere.
    """
    kind = kind or _BY_NAME.get(name)
    if kind is not None and not (value is None and default is None):
        kind.check(name, value)


def kinds_checked(others: Mapping[str, Kind]) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Check what a function is given, by the names of its parameters.

    Args:
        others: kinds of parameters that are not what the name says elsewhere.
    """

    def change(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            for name, value in signature.bind(*args, **kwargs).arguments.items():
                check_kind(name, value, signature.parameters[name].default, others.get(name))
            return function(*args, **kwargs)

        return called

    return change
