"""The two ways a run ends early: the user can mend it, or it is ours to mend."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class AutoqError(Exception):
    """A failure that is not the user's mistake; the command line exits with code 1."""

    exit_code = 1


class UserError(AutoqError):
    """A mistake in what was asked: the message says what was given, what is allowed and what to do. Exit code 2."""

    exit_code = 2


def unknown(what: str, given: str, allowed: Iterable[str]) -> UserError:
    """Build the error for a name that is not in a list, with the nearest name."""
    names = sorted(allowed)
    near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    shown = ", ".join(names[:20]) + (f", ... ({len(names)} in all)" if len(names) > 20 else "")
    return UserError(f"unknown {what} {given!r}.{hint} Known: {shown}")


@contextmanager
def python_words() -> Iterator[None]:
    """Name options as Python does in the errors of what is shared with the command line; commands in backticks stay."""
    try:
        yield
    except UserError as error:
        parts = str(error).split("`")
        parts[::2] = [_in_python(part) for part in parts[::2]]
        error.args = ("`".join(parts), *error.args[1:])
        raise


def _in_python(text: str) -> str:
    text = re.sub(r"--round (\w+)", r'rounding="\1"', text)
    text = re.sub(r"(with|search for it with) --(consumer|engine) ([\w.-]+)", r'\1 \2="\3"', text)
    return re.sub(r"--([a-z][a-z-]*)", lambda m: "rounding" if m[1] == "round" else m[1].replace("-", "_"), text)
