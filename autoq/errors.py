"""The two ways a run ends early: the user can mend it, or it is ours to mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AutoqError(Exception):
    """A failure that is not the user's mistake; the command line exits with code 1."""

    exit_code = 1


class UserError(AutoqError):
    """A mistake in what was asked: the message says what was given, what is allowed and what to do. Exit code 2."""

    exit_code = 2


def unknown(what: str, given: str, allowed: Iterable[str]) -> UserError:
    """Build the error for a name that is not in a list, with the nearest name."""
    names = sorted(allowed)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    shown = ", ".join(names[:20]) + (f", ... ({len(names)} in all)" if len(names) > 20 else "")
    return UserError(f"unknown {what} {given!r}.{hint} Known: {shown}")
