"""How long work tells where it is. The command line draws bars, the tests stay silent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Reporter(Protocol):
    """Receives what a run has to say while it runs."""

    def say(self, text: str) -> None:
        """Take one line for the user."""

    def stage(self, name: str) -> Stage:
        """Begin a stage; the returned object takes its progress until it is closed."""


class Stage(Protocol):
    """One stage of a run."""

    def update(self, done: int, total: int) -> None: ...

    def close(self, finished: bool) -> None:
        """End the stage; `finished` is False when an error ended it."""


class Silent:
    """A reporter that says nothing."""

    def say(self, text: str) -> None:
        pass

    def stage(self, name: str) -> Stage:  # noqa: ARG002
        return self

    def update(self, done: int, total: int) -> None:
        pass

    def close(self, finished: bool) -> None:
        pass


class Clock:
    """Seconds by stage, and a stage's progress passed on to the reporter."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, key: str, name: str) -> Iterator[Callable[[int, int], None]]:
        """Time a stage under `key`, shown as `name`; yields the function that takes (done, total)."""
        start = time.perf_counter()
        shown, finished = self.reporter.stage(name), False
        try:
            yield shown.update
            finished = True
        finally:
            shown.close(finished)
            self.seconds[key] = round(self.seconds.get(key, 0.0) + time.perf_counter() - start, 3)
