"""Fronts as text: damage against memory, with the knees marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoq.allocation.front import knees
from autoq.display.words import nats, plus_minus, size

if TYPE_CHECKING:
    from autoq.allocation.front import FrontPoint, TotalPoint
    from autoq.api import FrontResult, MeasuredPoint

WIDTH = 24
KNEE = " ◆ knee"
LOG = "log scale"
NEAR = 0.06  # bits within which a point of the front is that of the recipe


def table_of(title: str, *columns: str) -> Table:
    """Return an empty table in the style of all of them; the last column is text, the others are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i + 1 < len(columns) else "left")
    return table


def bars(damages: Sequence[float]) -> list[str]:
    """Return bars as long as the log of the damages: from one block for the least of a front to WIDTH for the most."""
    logs = [math.log(d) for d in damages if d > 0]
    low, span = min(logs, default=0.0), (max(logs, default=0.0) - min(logs, default=0.0)) or 1.0
    return ["█" * (1 + round((WIDTH - 1) * (math.log(d) - low) / span)) if d > 0 else "" for d in damages]


def nearest(points: Sequence[FrontPoint], bits: float | None) -> int | None:
    """Return which point of a front is that of a recipe, or None: a side that stays in 16 bit, a recipe between two points."""
    if bits is None or not points:
        return None
    i = min(range(len(points)), key=lambda i: abs(points[i].bits - bits))
    return i if abs(points[i].bits - bits) <= NEAR else None


def total_caption(context: int) -> str:
    """Return what the front of bytes is of."""
    return f"front, all weights and the cache of {context:,} tokens"


def front_table(points: tuple[FrontPoint, ...], chosen: float | None, what: str, sizes: bool = False) -> RenderableType | None:
    """Return the front around the chosen budget, with bytes if asked, or None where that side has none."""
    if not points:
        return None
    table = table_of(f"front, {what}", "bits", *(["bytes"] if sizes else []), "predicted KL", LOG)
    drawn = bars([p.predicted_kl for p in points])
    its = nearest(points, chosen)
    bends = (
        knees([p.bits for p in points], [p.predicted_kl for p in points]) if sizes else []
    )  # of the whole front, not around a budget
    for i, point in enumerate(points):
        mark = " ◄ chosen" if i == its else KNEE if i in bends else ""
        style = "bold cyan" if i == its else ""
        stored = [size(point.bytes)] if sizes else []
        table.add_row(f"{point.bits:.3f}", *stored, nats(point.predicted_kl), drawn[i] + mark, style=style)
    return table


def total_table(points: Sequence[TotalPoint], context: int) -> RenderableType | None:
    """Return the front of weights and cache together."""
    if not points:
        return None
    table = table_of(
        total_caption(context),
        "bytes",
        "bits",
        "KV bits",
        "predicted KL",
        LOG,
    )
    drawn = bars([p.predicted_kl for p in points])
    bends = knees([p.total_bytes for p in points], [p.predicted_kl for p in points])
    for i, point in enumerate(points):
        mark = KNEE if i in bends else ""
        table.add_row(
            size(point.total_bytes),
            f"{point.bits:.3f}",
            f"{point.kv_bits:.3f}",
            nats(point.predicted_kl),
            drawn[i] + mark,
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
            plus_minus(point.measured_kl, point.stderr), what,
        )  # fmt: skip
    return table


def fronts(result: FrontResult) -> RenderableType:
    """Return what `autoq front` and `autoq search --front` print."""
    bits, kv_bits = result.chosen or (None, None)
    parts: list[RenderableType | None] = [
        front_table(result.weights, bits, "bits per searched weight, and bytes of those; cache in 16 bit", sizes=True),
        front_table(
            result.kv, kv_bits, f"bits per cached value, and bytes of {result.context:,} tokens; weights in 16 bit", sizes=True
        ),
        total_table(result.total, result.context),
        measured_table(result.measured),
    ]
    parts += [Text(f"note: {note}", style="dim") for note in result.notes]
    if result.trials is not None:
        found = result.trials
        parts.append(Text(f"{found.measured} trials, study {found.study} in {found.storage}", style="dim"))
    return Group(*(p for p in parts if p is not None))
