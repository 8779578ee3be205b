"""The front as a small inline SVG in the page's own colour, for notebooks without JavaScript."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoq.display.findings import Findings

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 560, 250, 62, 34, 14, 120
ACCENT = "#e15714"


def front_sketch(found: Findings) -> str:
    """Return damage against bits of the side that was searched: the front with its error band, uniform formats, and the result."""
    facts = found.facts
    name, bits_key, what = ("front", "bits", "bits per weight")
    if not facts["front"]:
        name, bits_key, what = ("kv_front", "kv_bits", "bits per cached value")
    beside = found.other_side("weights" if name == "front" else "cache")
    points = [{**p, "predicted_kl": p["predicted_kl"] + beside} for p in facts[name] if p["predicted_kl"] > 0]
    if len(points) < 2:
        return ""
    uniforms = [(u[bits_key], u["measured_kl"], u["format"]) for u in facts["uniform"] if u["measured_kl"] > 0]
    result = (facts[bits_key], facts["measured_kl"], "the result")
    xs = [p["bits"] for p in points] + [u[0] for u in uniforms]
    ys = [p["predicted_kl"] for p in points] + [u[1] for u in uniforms] + [max(result[1], 1e-12)]
    x_of = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y_of = _scale(math.log10(min(ys)), math.log10(max(ys)), HEIGHT - BOTTOM, TOP)

    def at(bits: float, kl: float) -> str:
        return f"{x_of(bits):.1f},{y_of(math.log10(max(kl, min(ys)))):.1f}"

    upper = [at(p["bits"], p["predicted_kl"] + _error(p)) for p in points]
    lower = [at(p["bits"], max(p["predicted_kl"] - _error(p), min(ys))) for p in reversed(points)]
    parts = [
        f'<polygon points="{" ".join(upper + lower)}" fill="currentColor" opacity=".15"/>',
        f'<polyline points="{" ".join(at(p["bits"], p["predicted_kl"]) for p in points)}" fill="none" stroke="currentColor" stroke-width="1.5"/>',
    ]
    for bits, kl, label in (*uniforms, result):
        is_result = label == "the result"
        x, y = at(bits, kl).split(",")
        colour = ACCENT if is_result else "currentColor"
        parts.append(
            f'<circle cx="{x}" cy="{y}" r="{4.5 if is_result else 3}" fill="{colour}"><title>{escape(label)}: {kl:.4g} nats at {bits:.3f} bits</title></circle>'
        )
    parts += _labels([*sorted(uniforms, key=lambda u: u[1])[:1], result], at)
    parts += _axes(min(xs), max(xs), min(ys), max(ys), x_of, y_of, what)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" style="max-width:100%;color:inherit" font-size="11" font-family="system-ui, sans-serif" '
        f'role="img" aria-label="predicted damage against {what}">{"".join(parts)}</svg>'
    )


def _error(point: dict[str, Any]) -> float:
    return float(point.get("predicted_kl_stderr") or 0.0)


def _scale(low: float, high: float, start: float, end: float) -> Any:
    span = high - low or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _labels(points: Sequence[tuple[float, float, str]], at: Any) -> list[str]:
    """Write names beside their points, downwards so that none covers another; the last point is the result."""
    placed, last = [], -math.inf
    for bits, kl, label in sorted(points, key=lambda p: -p[1]):
        x, y = (float(v) for v in at(bits, kl).split(","))
        last = max(y + 4, last + 13)
        colour = ACCENT if label == points[-1][2] else "currentColor"
        placed.append(f'<text x="{x + 9:.1f}" y="{last:.1f}" fill="{colour}">{escape(label)}</text>')
    return placed


def _axes(x0: float, x1: float, y0: float, y1: float, x_of: Any, y_of: Any, what: str) -> list[str]:
    parts = []
    for bits in range(math.ceil(x0), math.floor(x1) + 1):
        parts.append(
            f'<text x="{x_of(bits):.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle" fill="currentColor" opacity=".65">{bits}</text>'
        )
    for power in range(math.floor(math.log10(y0)), math.ceil(math.log10(y1)) + 1):
        for factor in (1, 3):
            kl = factor * 10.0**power
            if y0 <= kl <= y1:
                y = y_of(math.log10(kl))
                parts.append(
                    f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" opacity=".12"/>'
                    f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="currentColor" opacity=".65">{kl:g}</text>'
                )
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle" fill="currentColor" opacity=".65">{what}; KL in nats per token</text>'
    )
    return parts
