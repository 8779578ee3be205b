"""Progress for Python callers: widgets in a notebook, bars in a terminal, a line a stage elsewhere."""

from __future__ import annotations

import sys
from typing import Any

from tqdm.std import tqdm as Bar

from autoq.display.progress import Reporter, Silent


def reporter_of(progress: bool | Reporter) -> Reporter:
    """Return who receives progress: the given object, or what suits where this runs."""
    if not isinstance(progress, bool):
        return progress
    if progress and in_notebook():
        return NotebookReporter()
    if progress:
        from rich.console import Console

        from autoq.display.terminal import RichReporter

        return RichReporter(Console(stderr=True))
    return Silent()


def in_notebook() -> bool:
    """True in a Jupyter kernel, not in a terminal's IPython."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


class NotebookReporter:
    """One bar a stage, gone when it is done; warnings stay. Widgets where ipywidgets is there, else text."""

    def __init__(self) -> None:
        try:
            import ipywidgets  # noqa: F401
            from tqdm.notebook import tqdm

            self.bar: Any = tqdm
        except ImportError:
            self.bar = Bar

    def say(self, text: str) -> None:
        """Keep warnings and what was left out; the rest is for a log."""
        if text.startswith(("warning", "left out", "the recipe for")):
            sys.stdout.write(text + "\n")

    def stage(self, name: str) -> BarStage:
        return BarStage(self.bar, name)


class BarStage:
    """One stage's bar."""

    def __init__(self, bar: Any, name: str) -> None:
        self.bar = bar(desc=name, leave=False, total=None, bar_format="{desc} {bar} {n_fmt}/{total_fmt} {elapsed}")

    def update(self, done: int, total: int) -> None:
        self.bar.total = total
        self.bar.n = done
        self.bar.refresh()

    def close(self, finished: bool) -> None:  # noqa: ARG002
        self.bar.close()
