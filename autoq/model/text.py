"""Text to profile and to measure on: packed into full sequences, never padded, never shared between the two parts.

The default needs no download: the Python standard library's own documentation. A document belongs to the measuring
part when the CRC of its name says so, hence the two parts never overlap and do not change with the Python version.
"""

from __future__ import annotations

import ast
import sysconfig
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autoq.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

Part = Literal["profile", "measure"]
STDLIB = "stdlib"
GIVEN = "token ids given in Python"
FILE_SUFFIXES = (".txt", ".md", ".json", ".jsonl", ".parquet")
MEASURE_SHARE = 6  # one document in six is kept for measuring
_SKIPPED_PACKAGES = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data"}


@dataclass(frozen=True)
class TextSource:
    """Where a part of the text comes from.

    `name` is "stdlib", a local file, or a dataset as `name[:config][@split]`. `shared` says that the other part reads
    the same source, so that this part must leave the other's documents alone.
    """

    name: str
    part: Part
    shared: bool


def text_sources(calib: str | None, eval_: str | None) -> tuple[TextSource, TextSource]:
    """Return the (profile, measure) sources for the two options of the command line; None means the default.

    With one file given for profiling and none for measuring, that file is divided between the two.
    """
    calib_name = calib or STDLIB
    eval_name = eval_ or calib_name
    shared = _same(calib_name, eval_name)
    for name in (calib_name, eval_name):
        _check_source(name)
    return TextSource(calib_name, "profile", shared), TextSource(eval_name, "measure", shared)


def sequences(tokenizer: PreTrainedTokenizerBase, source: TextSource, count: int, length: int, skip: int = 0) -> torch.Tensor:
    """Return int64 token ids [count, length]; every sequence is full, and starts with BOS where the tokenizer adds one.

    Args:
        skip: tokens of the text (without BOS) that are left to others.

    Raises UserError when the text is too short.
    """
    import torch

    bos = own_bos(tokenizer)
    body = length - (bos is not None)
    needed = skip + count * body
    tokens: list[int] = []
    for document in documents(source):
        tokens += tokenizer(document + "\n\n", add_special_tokens=False, verbose=False)["input_ids"]
        if len(tokens) >= needed:
            break
    if len(tokens) < needed:
        option = "--trial-samples" if skip else "--samples" if source.part == "profile" else "--eval-samples"
        taken = f" after the {skip:,} that are profiled" if skip else ""
        raise UserError(
            f"the {source.part} text {source.name!r} has {len(tokens) - skip:,} tokens in its part{taken}, but {count} sequences of {length} "
            f"need {needed - skip:,}: use fewer ({option}) or shorter sequences, or a longer text"
        )
    ids = torch.tensor(tokens[skip:needed], dtype=torch.int64).view(count, body)
    return ids if bos is None else torch.cat([torch.full((count, 1), bos, dtype=torch.int64), ids], dim=1)


def cut_again(ids: torch.Tensor, length: int, bos: int | None) -> torch.Tensor:
    """Cut packed sequences [sequences, tokens] into windows of another length, as long as the text allows; the rest is dropped.

    Args:
        bos: the token that each of them starts with, or None.
    """
    import torch

    body = (ids if bos is None else ids[:, 1:]).flatten()
    step = min(length - (bos is not None), len(body))
    windows = body[: len(body) // step * step].view(-1, step)
    return windows if bos is None else torch.cat([torch.full((len(windows), 1), bos, dtype=ids.dtype), windows], dim=1)


def own_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the BOS id if the tokenizer itself puts one before a text, else None.

    A tokenizer may define a BOS that its model never saw at the start of a text (SmolLM2, GPT-2, Qwen); it is not added.
    """
    bos = tokenizer.bos_token_id
    return bos if bos is not None and bos in tokenizer("a")["input_ids"][:2] else None


def documents(source: TextSource) -> Iterator[str]:
    """Yield the documents of this part of the source, in a fixed order."""
    if source.name == STDLIB:
        yield from (text for name, text in _stdlib_documents() if not source.shared or _part(name) == source.part)
        return
    path = Path(source.name)
    texts = _file_documents(path) if path.suffix in FILE_SUFFIXES else _hub_documents(source.name)
    if not source.shared:
        yield from texts
        return
    every = list(texts)
    cut = len(every) - max(1, len(every) // MEASURE_SHARE)
    yield from every[:cut] if source.part == "profile" else every[cut:]


def _same(first: str, second: str) -> bool:
    if first == second:
        return True
    a, b = Path(first), Path(second)
    if a.exists() or b.exists():
        return a.exists() and b.exists() and a.resolve() == b.resolve()
    return first.removesuffix("@train") == second.removesuffix("@train")


def _check_source(name: str) -> None:
    path = Path(name)
    if name == GIVEN:
        raise UserError(f"the text was {GIVEN}, which no file holds: give it again there, as autoq.validate(recipe, text=ids)")
    if name == STDLIB or (path.is_file() and path.suffix in FILE_SUFFIXES):
        return
    if path.is_file() or path.is_dir():
        raise UserError(f"the text {name!r} is not one of {', '.join(FILE_SUFFIXES)}: convert it, or name a dataset")
    if path.suffix in FILE_SUFFIXES:
        raise UserError(f"there is no text file {name!r}")


def _part(name: str) -> Part:
    return "measure" if zlib.crc32(name.encode()) % MEASURE_SHARE == 0 else "profile"


def _stdlib_documents() -> Iterator[tuple[str, str]]:
    """Yield (name, text): the language reference's topics and the docstrings of each module, shuffled the same way each time.

    Sources are parsed one by one as they are asked for: parsing all of them takes ten seconds.
    """
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_paths()["stdlib"])
    modules = {
        path.relative_to(root).as_posix(): path
        for path in root.rglob("*.py")
        if not _SKIPPED_PACKAGES & set(path.relative_to(root).parts)
    }
    names = [f"topic:{name}" for name in topics] + list(modules)
    for name in sorted(names, key=lambda n: (zlib.crc32(n.encode()[::-1]), n)):
        text = topics[name[6:]] if name.startswith("topic:") else _docstrings(modules[name])
        if text.strip():
            yield name, text


def _docstrings(path: Path) -> str:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):  # a few sources are deliberately broken, or not UTF-8
        return ""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
    return "\n\n".join(text for text in found if text)


def _file_documents(path: Path) -> Iterator[str]:
    if path.suffix in (".txt", ".md"):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"the text {str(path)!r} is not UTF-8 ({error.reason} at byte {error.start})") from error
        except OSError as error:
            raise UserError(f"the text {str(path)!r} cannot be read: {error.strerror}") from error
        size = 4_000
        yield from (text[i : i + size] for i in range(0, len(text), size))
        return
    import datasets

    kind = "parquet" if path.suffix == ".parquet" else "json"
    try:
        with _quiet_datasets():
            rows = datasets.load_dataset(kind, data_files=str(path), split="train")
    except Exception as error:
        raise UserError(f"cannot read the text {str(path)!r} as {kind}: {_first_line(error)}") from error
    yield from _text_column(rows, str(path))


def _hub_documents(name: str) -> Iterator[str]:
    import datasets

    body, _, split = name.partition("@")
    dataset, _, config = body.partition(":")
    try:
        with _quiet_datasets():
            rows = datasets.load_dataset(dataset, config or None, split=split or "train")
    except Exception as error:
        raise UserError(
            f"cannot load the dataset {name!r} ({_first_line(error)}): give a local {'/'.join(FILE_SUFFIXES)} file, "
            "or a dataset as name[:config][@split]"
        ) from error
    yield from _text_column(rows, name)


def _text_column(rows: Any, name: str) -> Iterator[str]:
    columns = list(rows.features)
    column = next((c for c in ("text", "content", "document") if c in columns), None)
    if column is None:
        raise UserError(f"the text {name!r} has no column 'text', 'content' or 'document', but {columns}")
    for row in rows[column]:
        if row is not None and not isinstance(row, str):
            raise UserError(f"the column {column!r} of {name!r} holds {type(row).__name__}, not text")
        if row and row.strip():
            yield row


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error  # `datasets` wraps what really happened
    words = " ".join(str(cause).split())
    return words[:200] if words else "it holds nothing" if isinstance(cause, StopIteration) else type(cause).__name__


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    """Keep the bars and the log of `datasets` out of ours."""
    import datasets

    bars, level = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    try:
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if not bars:
            datasets.enable_progress_bars()
