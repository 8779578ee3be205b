"""What checking a recipe showed, as tables: on packed bytes, and at long context."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoq.display.words import nats, plus_minus, size

if TYPE_CHECKING:
    from autoq.api import Retrieval, Validation


def validation(result: Validation) -> RenderableType:
    """Return what `autoq validate` prints."""
    entry, measured = result.entry, result.recipe.measured
    lines = Table.grid(padding=(0, 2))
    lines.add_row("kernels", "Triton's interpreter, on the CPU" if entry.kernels == "interpreter" else entry.kernels)
    lines.add_row(
        "packed",
        f"{entry.tensors} tensors of {entry.units} units by the kernels; {entry.differing} differ from the reference or the cost model",
    )
    for name, held, before in (
        ("weights", entry.weight_bytes, entry.weight_bytes_original), ("KV cache", entry.cache_bytes, entry.cache_bytes_original),
    ):  # fmt: skip
        lines.add_row(name, f"{size(held)}, in 16 bit {size(before)} ({held / max(1, before):.3f} x)")
    who = "unpacked, it measured" if measured and measured.chosen == "imported" else "the search measured"
    searched = f"{who} {plus_minus(measured.kl, measured.kl_stderr)}" if measured else ""
    lines.add_row("KL", f"{plus_minus(entry.kl, entry.kl_stderr)} nats per token; {searched}")
    lines.add_row("top-1 agreement", f"{100 * entry.top1_agreement:.1f} %")
    lines.add_row("perplexity", f"{result.divergence.perplexity_original:.3f} before, {entry.perplexity:.3f} after")
    if entry.attention_difference:
        lines.add_row(
            "attention on bytes", f"{nats(entry.attention_difference)} of the largest hidden state off attention on decoded tokens"
        )
    lines.add_row("greedy generation", f"as the original's for {100 * entry.greedy_agreement:.0f} % of the way, then its own")
    lines.add_row("written into", str(result.recipe_path))
    when = "it measured unpacked" if measured and measured.chosen == "imported" else "the search measured"
    all_units = sum(e.format != "bf16" for e in result.recipe.weights.values())
    what = "every packed byte" if entry.units >= all_units else f"every byte of {entry.units} drawn units (of {all_units})"
    why = f"{what} is right, and the KL is the one that {when}" if entry.passed else "see below"
    verdict = Text(f"passed: {why}", style="bold green") if entry.passed else Text(f"failed: {why}", style="bold red")
    return Group(Text("validation", style="bold"), lines, verdict)


def retrieval_table(result: Retrieval) -> RenderableType:
    """Return what `autoq retrieval` prints."""
    table = Table(
        title="facts found in generated text",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    for name in ("task", "tokens", "depth", "prompts", "found by the original", "by the recipe", "KL of the answer"):
        table.add_column(name, justify="left" if name == "task" else "right")
    for row in result.rows:
        table.add_row(
            row.kind, f"{row.length:,}", f"{100 * row.depth:.0f} %", str(row.prompts), f"{100 * row.found_original:.0f} %",
            f"{100 * row.found:.0f} %", nats(row.kl),
        )  # fmt: skip
    if any(row.found_original for row in result.rows):
        return table
    return Group(table, Text("The original finds none of them either: read the KL of the answer.", style="dim"))
