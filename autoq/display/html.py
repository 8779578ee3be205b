"""Results as HTML for notebooks: text in the page's own colour on tints of it, so that light and dark both read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from autoq.allocation.front import knees
from autoq.display.damage_map import DamageMap
from autoq.display.fronts import LOG, bars, nearest, total_caption
from autoq.display.sketch import front_sketch
from autoq.display.units import ranges
from autoq.display.words import answer, model_limit, nats, plus_minus, size

if TYPE_CHECKING:
    from autoq.api import FrontResult
    from autoq.display.findings import Findings

STEPS = 10  # of a colour scale
BLOCK = "█"  # of a bar
MOST_ROWS = 240  # of a heat map; more layers are averaged
STYLE = """<style>
.autoq { color: inherit; font: 13px/1.45 system-ui, sans-serif; overflow-x: auto; }
.autoq p { margin: .3em 0; } .autoq .dim { opacity: .65; }
.autoq table { font: inherit; border-collapse: collapse; margin: .4em 0 .8em; font-variant-numeric: tabular-nums; color: inherit; }
.autoq caption { text-align: left; font-weight: 600; padding: .2em 0; color: inherit; }
.autoq th, .autoq td { padding: 1px 8px; text-align: right; border: 0; background: transparent; white-space: nowrap; color: inherit; }
.autoq th { font-weight: 500; opacity: .65; } .autoq th:first-child, .autoq td:first-child { text-align: left; }
.autoq tr, .autoq tbody tr:nth-child(odd) { background: transparent; } .autoq tr.chosen td { font-weight: 700; }
.autoq .front td.bar, .autoq .front td:last-child, .autoq .front th:nth-last-child(-n + 2) { text-align: left; }
.autoq td.bar { font-size: 8px; line-height: 12px; opacity: .55; } .autoq .heat caption { white-space: nowrap; }
.autoq .map td { padding: 0 6px; text-align: center; border: 1px solid transparent; background-clip: padding-box; }
.autoq .map td:first-child { text-align: left; }
.autoq .heat th { writing-mode: vertical-rl; transform: rotate(180deg); padding: 4px 0; text-align: left; opacity: .8; font-size: 12px; }
.autoq .heat td { padding: 0; min-width: 18px; height: 14px; font-size: 11px; line-height: 14px; } .autoq .heat td:first-child { padding-right: 8px; }
SCALES</style>"""


def _scales() -> str:
    """Return the classes of the two colour scales: .d0 to .d9 for damage, .b0 to .b9 for bits."""
    rows = []
    for i in range(STEPS):
        share = i / (STEPS - 1)
        rows.append(f".autoq .d{i} {{ background-color: rgba(225, 87, 20, {0.04 + 0.81 * share:.2f}) !important; }}")
        rows.append(f".autoq .b{i} {{ background-color: hsla({10 + 210 * share:.0f}, 70%, 50%, .38) !important; }}")
    return "\n".join(rows)


def _page(*parts: str) -> str:
    return f'<div class="autoq">{STYLE.replace("SCALES", _scales())}{"".join(parts)}</div>'


def table(
    caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]], chosen: int | None = None, kind: str = "plain"
) -> str:
    """Return a table; every cell is escaped."""
    head = "".join(f"<th>{escape(c)}</th>" for c in columns)
    body = "".join(f"<tr{' class=chosen' if i == chosen else ''}>{''.join(map(_td, row))}</tr>" for i, row in enumerate(rows))
    return f"<table class={kind}><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _td(cell: str) -> str:
    return f"<td{' class=bar' if cell.startswith(BLOCK) else ''}>{escape(cell)}</td>"


def bits_class(bits: float) -> str:
    """Return the class that colours so many bits: 2 and below to 8 and above."""
    share = min(1.0, max(0.0, (bits - 2) / 6))
    return f"b{round(share * (STEPS - 1))}"


def recipe_html(view: dict[str, Any]) -> str:
    """Return a recipe as layers x roles, coloured by bits; layers with the same formats are one row."""
    head = (
        f"<p><b>{escape(str(view['model']))}</b>: {view['bits']:.4f} bits per weight ({size(view['weight_bytes'])} for all weights), "
        f"{view['kv_bits']:.4g} per cached value ({size(view['kv_bytes'])})"
    )
    for name, key in (("predicted", "predicted_kl"), ("measured", "measured_kl")):
        if view[key] is not None:
            head += f"; KL {name} {nats(view[key])}"
    return _page(head + "</p>", formats_table(view["units"]))


def formats_table(units: Sequence[dict[str, Any]]) -> str:
    """Return layers x roles with their formats, coloured by bits."""
    roles = list(dict.fromkeys(u["role"] for u in units))
    by_layer: dict[int | None, dict[str, list[dict[str, Any]]]] = {}
    for unit in units:
        by_layer.setdefault(unit["layer"], {}).setdefault(unit["role"], []).append(unit)
    groups: dict[Any, list[int]] = {}
    for layer in sorted(layer for layer in by_layer if layer is not None):
        groups.setdefault(tuple((r, u["format"]) for r in roles for u in by_layer[layer].get(r, [])), []).append(layer)
    rows = [(ranges(layers), by_layer[layers[0]]) for layers in groups.values()]
    if None in by_layer:
        rows.append(("whole model", by_layer[None]))
    body = "".join(f"<tr><td>{where}</td>{''.join(_cell(found.get(r, [])) for r in roles)}</tr>" for where, found in rows)
    head = "".join(f"<th>{escape(r)}</th>" for r in roles)
    return f"<table class=map><thead><tr><th>layers</th>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(units: list[dict[str, Any]]) -> str:
    if not units:
        return "<td></td>"
    bits = sum(u["bits"] * u["numel"] for u in units) / max(1, sum(u["numel"] for u in units))
    names = ", ".join(dict.fromkeys(u["format"] for u in units))
    return f'<td class="{bits_class(bits)}" title="{bits:.3f} bits">{escape(names)}</td>'


def profile_html(found: DamageMap, facts: dict[str, Any]) -> str:
    """Return a profile as heat maps of units x formats."""
    head = (
        f"<p><b>{escape(str(facts['model']))}</b>: {facts['units']} units x {len(facts['formats'])} formats on {facts['sequences']} sequences of "
        f"{facts['tokens']} tokens, in {escape(facts['run'])}</p><p class=dim>{escape(facts['coverage'])}</p>"
    )
    return _page(head, *(heat_map(found, is_cache) for is_cache in (False, True)))


def heat_map(found: DamageMap, is_cache: bool) -> str:
    """Return units x formats of the weights or the caches, coloured by the log of the damage; "" where there are none."""
    formats = found.formats(is_cache)
    values = [d for row in found.damage.values() for f, d in row.items() if f in formats and d > 0]
    if not formats or not values:
        return ""
    low, high = math.log(min(values)), math.log(max(values))
    rows, step = _heat_rows(found, is_cache)
    body = "".join(
        f"<tr><td>{escape(where)}</td>{''.join(_heat_cell(damage.get(f), low, high) for f in formats)}</tr>"
        for where, damage in rows
    )
    head = "".join(f"<th>{escape(f)}</th>" for f in formats)
    what = "KV cache" if is_cache else "weights"
    means = f", means of {step} layers" if step > 1 else ""
    caption = f"{what}: damage in nats per token{means}"
    legend = "".join(
        f"<span class=d{i}>&nbsp;{nats(math.exp(low + (high - low) * i / (STEPS - 1)))}&nbsp;</span>" for i in range(0, STEPS, 3)
    )
    return f"<table class='heat map'><caption>{caption} {legend}</caption><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>"


def _heat_cell(damage: float | None, low: float, high: float) -> str:
    if damage is None:
        return "<td></td>"
    share = (math.log(damage) - low) / (high - low) if damage > 0 and high > low else 0.0
    return f"<td class=d{round(share * (STEPS - 1))} title={nats(damage)}></td>"


def _heat_rows(found: DamageMap, is_cache: bool) -> tuple[list[tuple[str, dict[str, float]]], int]:
    """Return ((where, format -> damage) by role and layer, how many layers a row is the mean of)."""
    units = [u for u in found.units if (u[1] in ("K", "V")) == is_cache]
    step = -(-len(units) // MOST_ROWS)
    groups: dict[tuple[str, int | None], list[tuple[str, int | None]]] = {}
    for name, role, layer in units:
        groups.setdefault((role, None if layer is None else layer // step), []).append((name, layer))
    rows = []
    for (role, _), members in sorted(groups.items(), key=lambda g: (found.roles().index(g[0][0]), g[0][1] is None, g[0][1] or 0)):
        layers = [layer for _, layer in members if layer is not None]
        mean: dict[str, float] = {}
        for name, _ in members:
            for fmt, damage in found.damage.get(name, {}).items():
                mean[fmt] = mean.get(fmt, 0.0) + damage / len(members)
        rows.append((f"{role} {ranges(layers)}" if layers else role, mean))
    return rows, step


def search_html(found: Findings) -> str:
    """Return a search's result: the answer, what was measured beside it, the front, and the recipe."""
    facts = found.facts
    parts = [f"<p><b>{escape(answer(found.recipe, facts))}</b></p>", uniform_table(facts), front_sketch(found)]
    parts += [f"<p>warning: {escape(w)}</p>" for w in facts["warnings"]]
    view = [
        {"role": e.role, "layer": e.layer, "format": e.format, "bits": e.bits, "numel": e.numel}
        for e in found.recipe.weights.values()
    ]
    for layer in found.recipe.kv:
        for role, entry in (("K", layer.key), ("V", layer.value)):
            view.append(
                {"role": role, "layer": layer.layer, "format": entry.format, "bits": entry.bits, "numel": layer.values_per_token}
            )
    parts.append(formats_table(view))
    parts.append(f"<p class=dim>{escape(str(facts['recipe']))}</p>")
    return _page(*parts)


def uniform_table(facts: dict[str, Any]) -> str:
    """Return what was measured beside the result, each with how much more it costs."""
    rows, chosen = [], None
    for i, row in enumerate(facts["confirmed"]):
        if row["is_best"]:
            chosen = i
        more = "" if row["is_best"] else f"{row['more_than_best']:+.4f} ± {row['stderr'] or 0.0:.4f}"
        kl = plus_minus(row["measured_kl"], row["measured_kl_stderr"])
        rows.append((row["recipe"] + (" (the result)" if row["is_best"] else ""), nats(row["predicted_kl"]), kl, more))
    return table(
        "measured on text that nothing was chosen on",
        ("recipe", "predicted KL", "measured KL", "more than the result"),
        rows,
        chosen,
    )


def front_html(front: FrontResult) -> str:
    """Return fronts as tables with bars, knees and the recipe's own bits."""
    parts = []
    sides = (
        ("bits per searched weight, and bytes of those; cache in 16 bit", front.weights, front.chosen[0] if front.chosen else None),
        (
            f"bits per cached value, and bytes of {front.context:,} tokens; weights in 16 bit",
            front.kv,
            front.chosen[1] if front.chosen else None,
        ),
    )
    for caption, points, chosen in sides:
        if points:
            its = nearest(points, chosen)
            marks = [
                "chosen" if i == its else "knee" if i in knees([p.bits for p in points], [p.predicted_kl for p in points]) else ""
                for i in range(len(points))
            ]
            rows = [
                (f"{p.bits:.3f}", size(p.bytes), plus_minus(p.predicted_kl, p.stderr), drawn, mark)
                for p, drawn, mark in zip(points, bars([p.predicted_kl for p in points]), marks, strict=True)
            ]
            parts.append(table(f"front, {caption}", ("bits", "bytes", "predicted KL", LOG, ""), rows, its, "front"))
    if front.total:
        rows = [
            (size(p.total_bytes), f"{p.bits:.3f}", f"{p.kv_bits:.3f}", nats(p.predicted_kl), drawn)
            for p, drawn in zip(front.total, bars([p.predicted_kl for p in front.total]), strict=True)
        ]
        parts.append(
            table(
                total_caption(front.context),
                ("bytes", "bits", "KV bits", "predicted KL", LOG, ""),
                [(*row, "") for row in rows],
                None,
                "front",
            )
        )
    if front.measured:
        measured = [
            (p.label, f"{p.bits:.3f}", f"{p.kv_bits:.4g}", nats(p.predicted_kl), plus_minus(p.measured_kl, p.stderr))
            for p in front.measured
        ]
        parts.append(table("measured", ("recipe", "bits", "KV bits", "predicted KL", "measured KL"), measured))
    return _page(*parts)


def memory_html(rows: Sequence[dict[str, Any]], largest: Sequence[dict[str, Any]], limit: int | None = None) -> str:
    """Return what weights and caches take."""
    fits = bool(rows) and "fits" in rows[0]
    columns = ("KV format", "context", "batch", "KV cache", "weights", "total", *(("fits",) if fits else ()))
    cells = [
        (
            r["kv_format"], f"{r['context']:,}", str(r["batch"]), size(r["kv_bytes"]), size(r["weight_bytes"]), size(r["total_bytes"]),
            *((("yes" if r["fits"] else "no"),) if fits else ()),
        )
        for r in rows
    ]  # fmt: skip
    parts = [table("memory", columns, cells)]
    if largest:
        names = [f"context at batch {b}" for b in largest[0]["context_by_batch"]]
        names += [f"batch at {c:,}" for c in largest[0]["batch_by_context"]]
        most = [
            (r["kv_format"], *(f"{c:,}" for c in (*r["context_by_batch"].values(), *r["batch_by_context"].values())))
            for r in largest
        ]
        parts.append(table("the most that fits" + model_limit(limit), ("KV format", *names), most))
    return _page(*parts)


def doctor_html(found: dict[str, Any]) -> str:
    """Return what is installed here and what it can do."""
    rows = [
        ("autoq", f"{found['autoq']}, Python {found['python']}, {found['machine']}"),
        ("device", f"{found['device']}, {size(found['memory'])} free; computes in {found['dtype']}"),
        ("packages", ", ".join(f"{p['name']} {p['version']}" for p in found["packages"])),
        ("native formats", ", ".join(found["native"]) or "none"),
        (f"kernels ({found['kernels_on']})", ", ".join(f"{k['name']} {k['state']}" for k in found["kernels"])),
        ("tools found", ", ".join(f"{name} ({version})" for name, version in found["tools"].items()) or "none"),
    ]
    body = "".join(
        f"<tr><td>{escape(name)}</td><td style='text-align:left;white-space:normal'>{escape(text)}</td></tr>" for name, text in rows
    )
    problems = "".join(f"<p>problem: {escape(p)}</p>" for p in found["problems"])
    return _page(f"<table><tbody>{body}</tbody></table>{problems}")
