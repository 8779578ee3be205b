"""Figures (plotly) of results: each function takes a result and returns a figure.

A result is what `autoq.search` returns, or `autoq.load_run` reads from a run folder. Text takes the page's colour, on no background, so that
figures sit on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import plotly.graph_objects as go

from autoq.display.damage_map import DamageMap
from autoq.display.findings import Findings, HasFindings
from autoq.display.plot_style import (
    ACCENT,
    BITS_SCALE,
    DAMAGE_SCALE,
    KL_AXIS,
    LINE,
    POINT,
    decades,
    power,
    short,
    styled,
    tint,
    unit_of,
)
from autoq.errors import UserError
from autoq.recipe import Recipe

if TYPE_CHECKING:
    from autoq.api import FrontResult, MeasuredPoint


class HasDamage(Protocol):
    """A profile, or a search's result."""

    @property
    def damage_map(self) -> DamageMap:
        """What every format costs every unit."""


def sensitivity(result: HasDamage | HasFindings, fmt: str | None = None) -> go.Figure:
    """Return the damage of one format in every layer and role as a heat map; a menu changes the format.

    Args:
        fmt: the format shown first; by default the middle one of the weights'.
    """
    found = result.damage_map if hasattr(result, "damage_map") else _findings(result).damage_map
    weights, caches = found.formats(False), found.formats(True)
    formats = [*weights, *(f for f in caches if f not in weights)]
    if not formats:
        raise UserError("this result says nothing of the damage of single formats: search again with this version")
    first = fmt or (weights or caches)[len(weights or caches) // 2]
    if first not in formats:
        raise UserError(f"the profile has no format {first!r}: choose {', '.join(formats)}")
    roles, layers = found.roles(), found.layers()
    figure = go.Figure()
    for name in formats:
        shown = [role for role in roles if found.of_role(role, name)]
        rows = [found.of_role(role, name) for role in shown]
        z = [[power(row.get(layer)) for layer in layers] for row in rows]
        text = [[short(row.get(layer)) for layer in layers] for row in rows]
        figure.add_heatmap(
            x=layers, y=shown, z=z, customdata=text, visible=name == first, colorscale=DAMAGE_SCALE, xgap=1, ygap=1,
            colorbar={"title": {"text": "nats"}, **decades(z)},
            hovertemplate="layer %{x}, %{y}: %{customdata} nats<extra>" + name + "</extra>",
        )  # fmt: skip
    buttons = [{"label": name, "method": "update", "args": [{"visible": [other == name for other in formats]}]} for name in formats]
    figure.update_layout(
        updatemenus=[
            {
                "buttons": buttons,
                "active": formats.index(first),
                "x": 1,
                "xanchor": "right",
                "y": 1.02,
                "yanchor": "bottom",
                "bgcolor": "#e8ebee",
                "font": {"color": "#1d2530"},
            }
        ]
    )
    figure.update_yaxes(autorange="reversed")
    return styled(figure, "Damage by layer and role, one format", "layer", "", menu=True)


def damage(result: HasFindings, side: str | None = None) -> go.Figure:
    """Return damage against bits: the front as a line with its error band, uniform formats as points, and the result.

    Where both sides were searched, the front is of one side, with the other as the result has it.

    Args:
        side: "weights" or "cache"; by default the one that was searched.
    """
    facts = _findings(result).facts
    asked = side or ("weights" if facts["front"] else "cache")
    if asked not in ("weights", "cache"):
        raise UserError(f"side {asked!r} is unknown: choose weights or cache")
    name, bits = ("front", "bits") if asked == "weights" else ("kv_front", "kv_bits")
    if not facts[name]:
        raise UserError(f"this search was not about the {asked}: it has no front of it")
    figure, beside = go.Figure(), _findings(result).other_side(asked)
    rows = [{**p, "predicted_kl": p["predicted_kl"] + beside} for p in facts[name]]
    other = "cache" if asked == "weights" else "weights"
    _front_line(figure, rows, "front, predicted" + (f", with the result's {other}" if beside else ""))
    uniforms = _best_by_bits(facts["uniform"], bits)
    figure.add_scatter(
        x=[u[bits] for u in uniforms], y=[u["measured_kl"] for u in uniforms], text=[u["format"] for u in uniforms], mode="markers",
        name="uniform formats" + (" of both sides" if beside else "") + ", measured", marker={"color": POINT, "size": 8}, hovertemplate="%{text}: %{y:.4g} nats at %{x:.3f} bits<extra></extra>",
    )  # fmt: skip
    figure.add_scatter(
        x=[facts[bits]], y=[facts["measured_kl"]], mode="markers", name="the result, measured",
        error_y={"type": "data", "array": [facts["measured_kl_stderr"] or 0.0], "color": ACCENT},
        marker={"color": ACCENT, "size": 11, "symbol": "diamond"}, hovertemplate="the result: %{y:.4g} nats at %{x:.3f} bits<extra></extra>",
    )  # fmt: skip
    what = "bits per weight" if asked == "weights" else "bits per cached value"
    return styled(figure, f"Damage by {what}", what, KL_AXIS, log_y=True)


def front(result: FrontResult | HasFindings) -> go.Figure:
    """Return the fronts of `autoq.front` or `result.front()`: predicted lines with their error bands, and what was measured.

    A search's result has those around its own bits.
    """
    figure = go.Figure()
    if hasattr(result, "findings"):
        facts = _findings(result).facts
        sides = {"weights": facts["front"], "cache": facts["kv_front"]}
        beside: Sequence[MeasuredPoint] = ()
    elif hasattr(result, "measured") and hasattr(result, "total"):
        sides = {
            side: [{"bits": p.bits, "predicted_kl": p.predicted_kl, "predicted_kl_stderr": p.stderr} for p in points]
            for side, points in (("weights", result.weights), ("cache", result.kv))
        }
        beside = result.measured
    else:
        raise UserError(f"this figure is of what autoq.front, result.front() or a search returns, not of a {type(result).__name__}")
    for (name, rows), colour in zip(sides.items(), (LINE, "#2a9d6f"), strict=True):
        _front_line(figure, rows, f"{name}, predicted", colour)
    measured = [(p.kv_bits if p.bits == 16 else p.bits, p) for p in beside]
    if measured:
        figure.add_scatter(
            x=[bits for bits, _ in measured], y=[p.measured_kl for _, p in measured], text=[p.label for _, p in measured], mode="markers",
            name="measured", marker={"color": ACCENT, "size": 9},
            error_y={"type": "data", "array": [p.stderr for _, p in measured], "color": ACCENT},
            hovertemplate="%{text}: %{y:.4g} nats at %{x:.3f} bits<extra></extra>",
        )  # fmt: skip
    return styled(figure, "The least damage at every budget", "bits per value", KL_AXIS, log_y=True)


def predicted_measured(result: HasFindings) -> go.Figure:
    """Return predicted against measured KL of everything that was measured; on the dashed line both are the same."""
    rows = [r for r in _findings(result).facts["confirmed"] if r["predicted_kl"] > 0 and r["measured_kl"] > 0]
    figure = go.Figure()
    if rows:
        values = [r[k] for r in rows for k in ("predicted_kl", "measured_kl")]
        ends = [min(values) / 1.3, max(values) * 1.3]
        figure.add_scatter(
            x=ends, y=ends, mode="lines", line={"color": POINT, "dash": "dash", "width": 1}, name="the same", hoverinfo="skip"
        )
    for name, is_best, colour in (("measured", False, POINT), ("the result", True, ACCENT)):
        chosen = [r for r in rows if bool(r["is_best"]) == is_best]
        figure.add_scatter(
            x=[r["predicted_kl"] for r in chosen], y=[r["measured_kl"] for r in chosen], text=[r["recipe"] for r in chosen], mode="markers",
            name=name, marker={"color": colour, "size": 9}, error_y={"type": "data", "array": [r["measured_kl_stderr"] or 0.0 for r in chosen]},
            hovertemplate="%{text}: %{x:.4g} predicted, %{y:.4g} measured<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(type="log", tickformat="~g", dtick="D2", tickangle=0)
    return styled(figure, "Predicted and measured damage", "predicted " + KL_AXIS, "measured " + KL_AXIS, log_y=True)


def recipe(result: Recipe | HasFindings) -> go.Figure:
    """Return the bits of every weight unit, key and value, layer by layer, with the format's name on hover."""
    its = result if isinstance(result, Recipe) else _findings(result).recipe
    cells = [(e.role, e.layer, e.format, e.bits) for e in its.weights.values()]
    for layer in its.kv:
        cells += [(role, layer.layer, e.format, e.bits) for role, e in (("K", layer.key), ("V", layer.value))]
    roles = list(dict.fromkeys(role for role, *_ in cells))
    layers = sorted({layer for _, layer, *_ in cells if layer is not None})
    by_place = {(role, layer): (name, bits) for role, layer, name, bits in cells}
    grid = [[by_place.get((role, layer)) for layer in layers] for role in roles]
    figure = go.Figure(
        go.Heatmap(
            x=layers,
            y=roles,
            z=[[min(c[1], 8.5) if c else None for c in row] for row in grid],
            zmin=2,
            zmax=8.5,
            customdata=[[f"{c[0]}, {c[1]:.3f} bits" if c else "" for c in row] for row in grid],
            colorscale=BITS_SCALE,
            xgap=1,
            ygap=1,
            hovertemplate="layer %{x}, %{y}: %{customdata}<extra></extra>",
            colorbar={
                "title": {"text": "bits"},
                "tickvals": [2, 3, 4, 5, 6, 7, 8],
                "ticktext": ["2", "3", "4", "5", "6", "7", "8 and more"],
            },
        )
    )
    figure.update_yaxes(autorange="reversed")
    return styled(figure, "Bits of every unit", "layer", "")


def cache_formats(result: Recipe | HasFindings) -> go.Figure:
    """Return the K and V format of every layer, as bars of bits per cached value coloured by format."""
    its = result if isinstance(result, Recipe) else _findings(result).recipe
    if not its.kv:
        raise UserError("this recipe has no caches")
    figure = go.Figure()
    palette = ["#3b7dd8", "#e15714", "#2a9d6f", "#b35bc4", "#c9a227", "#5c6bc0", "#d1495b", "#00838f", "#8d6e63", "#7b8794"]
    names = list(dict.fromkeys(e.format for layer in its.kv for e in (layer.key, layer.value)))
    for i, name in enumerate(names):
        bars = [
            (layer.layer, kind, e.bits)
            for layer in its.kv
            for kind, e in (("K", layer.key), ("V", layer.value))
            if e.format == name
        ]
        figure.add_bar(
            x=[[str(layer) for layer, *_ in bars], [kind for _, kind, _ in bars]], y=[bits for *_, bits in bars], name=name,
            marker={"color": palette[i % len(palette)]}, hovertemplate="layer %{x}: %{y:.3f} bits<extra>" + name + "</extra>",
        )  # fmt: skip
    figure.update_layout(barmode="stack", bargap=0.1)
    order = [[str(layer.layer) for layer in its.kv for _ in "KV"], [kind for _ in its.kv for kind in "KV"]]
    figure.add_bar(x=order, y=[0] * len(order[0]), showlegend=False, hoverinfo="skip")  # keeps layers in order
    figure.data = (figure.data[-1], *figure.data[:-1])
    return styled(figure, "K and V formats by layer", "layer", "bits per cached value")


def memory(result: HasFindings) -> go.Figure:
    """Return weight and KV cache bytes over the context length, as the recipe stores them and in 16 bit."""
    found = _findings(result)
    rows, parameters = found.facts.get("context") or [], found.recipe.model.parameters
    if not rows:
        raise UserError("this recipe has no caches, or was searched with an older version")
    contexts, totals = [r["context"] for r in rows], found.recipe.totals
    unit, name = unit_of(max(2 * parameters, *(r["kv_bytes_16bit"] for r in rows)))
    figure = go.Figure()
    for label, weights, key, dash in (
        ("recipe", totals.weight_bytes, "kv_bytes", "solid"), ("16 bit", 2 * parameters, "kv_bytes_16bit", "dot"),
    ):  # fmt: skip
        for what, values, colour in (
            ("weights", [weights] * len(rows), LINE), ("KV cache", [r[key] for r in rows], "#2a9d6f"),
            ("both", [weights + r[key] for r in rows], ACCENT),
        ):  # fmt: skip
            figure.add_scatter(
                x=contexts, y=[v / unit for v in values], mode="lines", name=f"{what}, {label}", line={"color": colour, "dash": dash},
                hovertemplate="%{x:,} tokens: %{y:.4g} " + name + f"<extra>{what}, {label}</extra>",
            )  # fmt: skip
    figure.update_xaxes(type="log", tickvals=contexts[:: max(1, len(contexts) // 7)], tickformat=",")
    batch = found.recipe.budget.batch
    many = "" if batch == 1 else f" of {batch} sequences"
    return styled(figure, f"Memory by context{many}", "tokens of context", name)


def history(result: HasFindings) -> go.Figure:
    """Return Optuna's optimization history of the search's trials, in nats of KL per token."""
    from autoq.trials import plots

    return styled(plots.history(*_study(_findings(result))), "Trials", "trial", KL_AXIS)


def importances(result: HasFindings) -> go.Figure:
    """Return Optuna's importances of the multipliers by role and third of the depth."""
    from autoq.trials import plots

    return styled(plots.importances(*_study(_findings(result))), "What mattered in the trials", "importance (PED-ANOVA)", "")


def _findings(result: HasFindings) -> Findings:
    """Return a result's figures; raises UserError for what is no result of a search."""
    found = getattr(result, "findings", None)
    if not isinstance(found, Findings):
        raise UserError(f"this figure is of what autoq.search returns or autoq.load_run reads, not of a {type(result).__name__}")
    return found


def _study(found: Findings) -> tuple[str, str, Any]:
    trials = found.facts.get("trials")
    if not trials:
        raise UserError("this search made no trials: search with trials=60")
    return trials["study"], found.storage or trials["storage"], found.run


def _front_line(figure: go.Figure, points: Sequence[Mapping[str, Any]], name: str = "front, predicted", colour: str = LINE) -> None:
    points = [p for p in points if p["predicted_kl"] > 0]
    if not points:
        return
    x, y = [p["bits"] for p in points], [p["predicted_kl"] for p in points]
    errors = [p.get("predicted_kl_stderr") or 0.0 for p in points]
    band = [kl + e for kl, e in zip(y, errors, strict=True)] + [max(kl - e, kl / 100) for kl, e in zip(y, errors, strict=True)][
        ::-1
    ]
    figure.add_scatter(
        x=x + x[::-1],
        y=band,
        fill="toself",
        mode="none",
        fillcolor=tint(colour),
        name="standard error of the prediction",
        hoverinfo="skip",
        showlegend=False,
    )
    figure.add_scatter(
        x=x, y=y, mode="lines+markers", name=name, line={"color": colour}, marker={"size": 4}, customdata=errors,
        hovertemplate="%{y:.4g} ± %{customdata:.2g} nats at %{x:.3f} bits<extra>" + name + "</extra>",
    )  # fmt: skip


def _best_by_bits(uniforms: Sequence[Mapping[str, Any]], bits: str) -> list[Mapping[str, Any]]:
    """Return the best uniform recipe of each size: where both sides are searched, many differ in the other side alone."""
    best: dict[float, Mapping[str, Any]] = {}
    for row in sorted(uniforms, key=lambda u: -float(u["measured_kl"])):
        best[round(row[bits], 3)] = row
    return list(best.values())
