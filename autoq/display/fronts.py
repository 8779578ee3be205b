"""Fronts as text: damage against memory, with the knees marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoq.allocation.front import knees
from autoq.display.words import nats, size

if TYPE_CHECKING:
    from autoq.allocation.front import FrontPoint, TotalPoint
    from autoq.api import FrontResult, MeasuredPoint

WIDTH = 24
KNEE = " ◆ knee"


def table_of(title: str, *columns: str) -> Table:
    """Return an empty table in the style of all of them; the last column is text, the others are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, justify="right" if name else "left")
    return table


def bar(damage: float, worst: float) -> str:
    """Return a bar as long as the damage."""
    return "█" * max(1, round(WIDTH * damage / worst)) if damage else ""


def front_table(points: tuple[FrontPoint, ...], chosen: float | None, what: str, sizes: bool = False) -> RenderableType | None:
    """Return the front around the chosen budget, with bytes if asked, or None where that side has none."""
    if not points:
        return None
    table = table_of(f"front, {what}", "bits", *(["bytes"] if sizes else []), "predicted KL", "")
    worst = max(p.predicted_kl for p in points) or 1.0
    nearest = None if chosen is None else min(points, key=lambda p: abs(p.bits - chosen))
    bends = knees([p.bits for p in points], [p.predicted_kl for p in points])
    for i, point in enumerate(points):
        mark = " ◄ chosen" if point is nearest else KNEE if i in bends else ""
        style = "bold cyan" if point is nearest else ""
        stored = [size(point.bytes)] if sizes else []
        table.add_row(f"{point.bits:.3f}", *stored, nats(point.predicted_kl), bar(point.predicted_kl, worst) + mark, style=style)
    return table


def total_table(points: Sequence[TotalPoint], context: int) -> RenderableType | None:
    """Return the front of weights and cache together."""
    if not points:
        return None
    table = table_of(f"front, weights and cache of {context:,} tokens together", "bytes", "bits", "KV bits", "predicted KL", "")
    worst = max(p.predicted_kl for p in points) or 1.0
    bends = knees([p.total_bytes for p in points], [p.predicted_kl for p in points])
    for i, point in enumerate(points):
        mark = KNEE if i in bends else ""
        table.add_row(
            size(point.total_bytes),
            f"{point.bits:.3f}",
            f"{point.kv_bits:.3f}",
            nats(point.predicted_kl),
            bar(point.predicted_kl, worst) + mark,
        )
    return table


def measured_table(points: Sequence[MeasuredPoint]) -> RenderableType | None:
    """Return what was measured of a front."""
    if not points:
        return None
    table = table_of("measured on untouched text", "bits", "KV bits", "bytes", "predicted KL", "measured KL", "")
    bends = knees([p.total_bytes for p in points], [p.measured_kl for p in points])
    for i, point in enumerate(points):
        what = f"{point.label}{'' if point.recipe is None else f' in {point.recipe}'}{KNEE if i in bends else ''}"
        table.add_row(
            f"{point.bits:.3f}", f"{point.kv_bits:.4g}", size(point.total_bytes), nats(point.predicted_kl),
            f"{nats(point.measured_kl)} ± {nats(point.stderr)}", what,
        )  # fmt: skip
    return table


def fronts(result: FrontResult) -> RenderableType:
    """Return what `autoq front` and `autoq search --front` print."""
    parts = [
        front_table(result.weights, None, "bits per weight", sizes=True),
        front_table(result.kv, None, f"bits per cached value, and bytes at {result.context:,} tokens", sizes=True),
        total_table(result.total, result.context),
        measured_table(result.measured),
    ]
    if result.trials is not None:
        found = result.trials
        parts.append(Text(f"{found.measured} trials, study {found.study} in {found.storage}", style="dim"))
    return Group(*(p for p in parts if p is not None))
