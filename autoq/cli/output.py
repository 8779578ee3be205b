"""Where the command line prints: results to stdout, words, progress and errors to stderr."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autoq.display.terminal import RichReporter


PLAIN = {"█": "#", "±": "+-", "◆": "*", "◄": "<", "×": "x", "…": "..."}


def write_any_encoding() -> None:
    """Write plain characters where stdout and stderr cannot hold others, rather than fail after the work."""

    def plain(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        return "".join(PLAIN.get(c, "?") for c in error.object[error.start : error.end]), error.end

    codecs.register_error("plain", plain)
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115  for the whole process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="plain")


def stdout() -> Console:
    """Return where results are printed."""
    console = Console()
    if console.width < 1:  # COLUMNS=0
        console = Console(width=80)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=max(console.width, 110))


def printed(found: RenderableType) -> None:
    """Print a result on stdout: tables as wide as the terminal, lines to copy whole; nothing but text where it is piped."""
    console = stdout()
    if console.is_terminal:
        console.print(found, crop=False)
        return
    from autoq.display.text import as_text

    sys.stdout.write(as_text(found, console.width) + "\n")


def reporter() -> RichReporter:
    """Return what shows progress, on stderr."""
    from autoq.display.terminal import RichReporter

    return RichReporter(Console(stderr=True))


def print_json(data: dict[str, Any]) -> None:
    """Print one JSON object on stdout."""
    sys.stdout.write(json.dumps(data, allow_nan=False, default=str) + "\n")


def newest(path: Path) -> Path:
    """Say on stderr which run or recipe a command took where none was named, and return it."""
    from rich.text import Text

    Console(stderr=True).print(Text(f"the newest: {path}", style="dim"), soft_wrap=True)
    return path


def found_recipe(path: Path | None) -> Path:
    """Return the recipe file behind a path; the newest run's is named on stderr."""
    from autoq import api

    return newest(api.find_recipe(None)) if path is None else api.find_recipe(path)


def complain(text: str) -> None:
    """Print an error on stderr."""
    from rich.text import Text

    Console(stderr=True).print(Text("autoq: ", style="bold red") + Text(text), soft_wrap=True)


def fail(problems: tuple[str, ...]) -> None:
    """Print what is wrong and end with exit code 1; go on if nothing is."""
    for problem in problems:
        complain(problem)
    if problems:
        raise typer.Exit(1)
