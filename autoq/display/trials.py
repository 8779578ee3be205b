"""What trials came to, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoq.display.words import nats

if TYPE_CHECKING:
    from autoq.api import SearchResult

SHOWN = 5  # parameters


def trials_view(result: SearchResult) -> RenderableType | None:
    """Return how the trials ended, the confirmed recipes, and what mattered; None for a search without trials."""
    if result.trials is None or result.confirmed is None:
        return None
    report, confirmed = result.trials, result.confirmed
    table = Table(
        title="confirmed on untouched text", title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim"
    )
    for name in ("recipe", "predicted KL", "measured KL", "more than the result"):
        table.add_column(name, justify="left" if name == "recipe" else "right")
    for row in confirmed.rows():
        if row["recipe"].startswith("uniform ") and not row["is_best"]:
            continue
        more = "" if row["is_best"] else f"{row['more_than_best']:+.2g} ± {row['stderr']:.2g}"
        style = "bold cyan" if row["is_best"] else ""
        table.add_row(row["recipe"], nats(row["predicted_kl"]), nats(row["measured_kl"]), more, style=style)
    counts = f"{report.measured} trials on {report.windows} windows, {report.stopped} stopped early, {report.repeated} with a recipe known already"
    parts: list[RenderableType] = [
        Text("trials", style="bold"),
        Text(counts),
        Text(f"study {report.study} in {report.storage}"),
        table,
        Text(verdict(result)),
    ]
    if report.importances:
        shown = ", ".join(f"{name} {100 * share:.0f} %" for name, share in list(report.importances.items())[:SHOWN])
        parts.append(Text(f"what mattered (PED-ANOVA): {shown}", style="dim"))
    return Group(*parts)


def verdict(result: SearchResult) -> str:
    """Say in one sentence what the result is and by how much it is better."""
    assert result.confirmed is not None
    best, solution = result.confirmed.best, result.confirmed.candidates[0]
    if best is solution:
        return "the exact solution is the result: no trial and no uniform format measured less"
    difference, error = solution.divergence.minus(best.divergence)
    surely = "" if difference > 2 * error else ", which is within what chance explains"
    return f"{best.label} is the result: {difference:.2g} ± {error:.2g} nats less than the exact solution{surely}"
