"""A run folder: where a search keeps its files, and what it needs to go on."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoq.errors import UserError

RUNS = Path("runs")
DESCRIPTION = "run.json"
RECIPE = "recipe.yaml"
RESULT = "result.json"


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run: run.json, profile.safetensors, profile.json, recipe.yaml, result.json."""

    path: Path

    def describe(self, description: dict[str, Any]) -> None:
        """Write run.json, which lets later commands find the model and the space again."""
        write_atomically(self.path / DESCRIPTION, json.dumps(description, indent=1) + "\n")

    def description(self) -> dict[str, Any]:
        """Read run.json; raises UserError if this is no run folder."""
        path = self.path / DESCRIPTION
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{str(self.path)!r} is no run folder: it has no {DESCRIPTION}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{str(path)!r} cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise UserError(f"{str(path)!r} is not a JSON object")
        return found


def open_run(asked: Path | None, resume: bool, model: str) -> RunFolder:
    """Return the run folder: the one asked for, the newest of this model with `resume`, or a new one.

    Raises UserError when there is nothing to resume, or when the path is a file.
    """
    if asked is not None:
        for place in (asked, *asked.parents):
            if (place.exists() or place.is_symlink()) and not place.is_dir():
                what = "a file" if place.exists() else "a link that leads nowhere"
                raise UserError(f"--run {str(asked)!r} cannot be a folder: {str(place)!r} is {what}")
        if resume and not (asked / DESCRIPTION).is_file():
            raise UserError(f"--resume: {str(asked)!r} is no run folder, there is nothing to go on from")
        return RunFolder(asked)
    if resume:
        found = sorted((p for p in RUNS.glob(f"{model}-[0-9]*") if (p / DESCRIPTION).is_file()), key=lambda p: p.stat().st_mtime)
        if not found:
            raise UserError(f"--resume: there is no run of {model} in {str(RUNS)!r}; name one with --run")
        return RunFolder(found[-1])
    base = RUNS / f"{model}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, n = base, 1
    while path.exists():
        n += 1
        path = base.with_name(f"{base.name}-{n}")
    return RunFolder(path)


def make_folder(path: Path, option: str = "--run") -> None:
    """Create the folder that an option names; raises UserError where that is not allowed."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option} {str(path)!r} cannot be made: {error.strerror}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file to write beside `path`, and put it in its place: a reader sees the old file or the new one, never half of one.

    Nothing is left behind when writing fails. Raises UserError where `path` cannot be replaced.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{str(path)!r} cannot be written: it is {'a folder' if path.is_dir() else 'no regular file'}")
    part = path.with_name(path.name + ".part")
    try:
        yield part
        os.replace(part, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EIO):  # not the user's mistake
            raise
        raise UserError(f"{str(path)!r} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file whole or not at all (see `replacing`)."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")
