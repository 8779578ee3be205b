"""What a model takes in memory, as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoq.display.words import model_limit, size

if TYPE_CHECKING:
    from autoq.api.pricing import Memory


def memory_table(memory: Memory, what: str, available: int | None) -> RenderableType:
    """Return weights, cache and total by KV format, context and batch, and what fits; `what` says whose."""
    table = Table(title=what, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for name in ("KV format", "context", "batch", "KV cache", "weights", "total", *([] if available is None else ["fits"])):
        table.add_column(name, justify="left" if name == "KV format" else "right")
    previous = None
    for row in memory.rows:
        where = (row["context"], row["batch"])
        if previous is not None and where != previous:
            table.add_row()
        previous = where
        cells = [row["kv_format"], f"{row['context']:,}", str(row["batch"])]
        cells += [size(row[f"{k}_bytes"]) for k in ("kv", "weight", "total")]
        table.add_row(*cells, *([] if available is None else ["yes" if row["fits"] else "no"]))
    parts: list[RenderableType] = [table] if available is None else [table, Text(""), _largest_table(memory, available)]
    return Group(*parts, *(Text(reason, style="dim") for reason in memory.left_out))


def _largest_table(memory: Memory, available: int) -> RenderableType:
    """Return the largest context for each batch, and the largest batch for each context."""
    largest = memory.largest
    table = Table(
        title=f"the most that fits into {size(available)}{model_limit(memory.limit)}", title_justify="left", title_style="bold", box=None, pad_edge=False,
        header_style="dim",
    )  # fmt: skip
    table.add_column("KV format")
    for batch in largest[0]["context_by_batch"]:
        table.add_column(f"context at batch {batch}", justify="right")
    for context in largest[0]["batch_by_context"]:
        table.add_column(f"batch at {context:,}", justify="right")
    for row in largest:
        counts = [*row["context_by_batch"].values(), *row["batch_by_context"].values()]
        table.add_row(row["kv_format"], *(f"{c:,}" if c else "none" for c in counts))
    return table
