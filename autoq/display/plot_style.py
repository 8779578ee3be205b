"""How every figure looks: colours that read on light and dark pages, ticks, margins."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10
from typing import Any

import plotly.graph_objects as go

from autoq.display.words import GIB, KIB, MIB

ACCENT, LINE, POINT, GREY = "#e15714", "#3b7dd8", "#7b8794", "rgba(127, 127, 127, .25)"
DAMAGE_SCALE = [[0.0, "rgba(225, 87, 20, .06)"], [0.5, "rgba(225, 87, 20, .5)"], [1.0, "rgb(173, 40, 8)"]]
BITS_SCALE = [[i / 10, f"hsl({10 + 21 * i}, 65%, 52%)"] for i in range(11)]
KL_AXIS = "KL, nats per token"


def decades(z: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    """Return the ticks of a colour bar over powers of ten: 1 and 3 times each, as far as there are values."""
    found = [v for row in z for v in row if v is not None]
    if not found:
        return {"tickvals": []}
    ticks = [(e + log10(m), m * 10.0**e) for e in range(floor(min(found)), ceil(max(found)) + 1) for m in (1, 3)]
    inside = [(at, value) for at, value in ticks if min(found) <= at <= max(found)]
    if len(inside) > 6:
        inside = [(at, value) for at, value in inside if at == int(at)]
    if not inside:
        inside = [(v, 10**v) for v in (min(found), max(found))]
    return {"tickvals": [at for at, _ in inside], "ticktext": [f"{value:.3g}" for _, value in inside]}


def tint(colour: str) -> str:
    """Return a colour for a band."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, .22)"


def power(value: float | None) -> float | None:
    """Return the power of ten of a damage, or None where there is none."""
    return log10(value) if value is not None and value > 0 else None


def short(value: float | None) -> str:
    """Write a damage on hover."""
    return "" if value is None else f"{value:.3g}"


def unit_of(largest: float) -> tuple[int, str]:
    """Return the bytes and the name of the unit that suits a size."""
    return (GIB, "GiB") if largest >= GIB else (MIB, "MiB") if largest >= MIB else (KIB, "KiB")


def styled(figure: go.Figure, title: str, x: str, y: str, log_y: bool = False, menu: bool = False) -> go.Figure:
    """Give a figure its title, axes and margins."""
    figure.update_layout(
        template="none", title={"text": title, "x": 0.02, "xref": "container", "font": {"size": 14}}, paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)", font={"color": POINT, "family": "system-ui, sans-serif", "size": 12}, height=380,
        margin={"l": 70, "r": 20, "t": 92 if menu else 48, "b": 90}, legend={"orientation": "h", "y": -0.32}, hoverlabel={"font": {"size": 12}},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": GREY, "activecolor": ACCENT},
    )  # fmt: skip
    figure.update_xaxes(title={"text": x}, gridcolor=GREY, zeroline=False, automargin=True)
    figure.update_yaxes(title={"text": y}, gridcolor=GREY, zeroline=False, automargin=True)
    if log_y:
        figure.update_yaxes(type="log", tickformat="~g")
    return figure
