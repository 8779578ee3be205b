"""The report: one HTML file that opens without a network."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import plotly.graph_objects as go
import plotly.offline
from markupsafe import Markup, escape

from autoq import __version__
from autoq.display import plots
from autoq.display.findings import Findings
from autoq.display.html import bits_class
from autoq.display.words import answer, nats, plus_minus, size, tiny
from autoq.errors import UserError

TEMPLATE = Path(__file__).with_name("page.html")
MOST_CHARACTERS = 3_000  # of a file that a consumer would get


@dataclass(frozen=True)
class Serving:
    """How one consumer takes the recipe.

    Attributes:
        bits, kv_bits: of what it really gets. rounded: what was allowed for that, in words, or "". lost: what is not as in the recipe, in words; "" for nothing. refused: why it cannot have it, or
            None. command: that writes the files. files: name -> text of what it would write.
    """

    consumer: str
    what: str
    bits: float
    kv_bits: float
    rounded: str
    lost: str
    refused: str | None
    command: str
    files: dict[str, str]

    def beginnings(self) -> dict[str, str]:
        """Return the files for a reader: long ones to their first lines, so that the page stays small whatever the model."""
        return {
            name: text
            if len(text) <= MOST_CHARACTERS
            else f"{text[:MOST_CHARACTERS]}\n... {len(text) - MOST_CHARACTERS:,} more characters"
            for name, text in self.files.items()
        }


def page(found: Findings, serving: Sequence[Serving], serving_note: str = "") -> str:
    """Return the report of a search as HTML.

    Args:
        serving: how consumers take the recipe. serving_note: why there is none.
    """
    recipe, facts = found.recipe, found.facts
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "nats": nats,
        "size": size,
        "tiny": tiny,
        "code": _code,
        "percent": lambda share: f"{100 * share:.1f} %",
    }
    environment.globals["plus_minus"] = plus_minus
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        title=f"autoq: {recipe.model.id}", version=__version__, answer=answer(recipe, facts), recipe=recipe, facts=facts, asked=_asked(found),
        figures=_figures(found), units=_units(found), serving=serving, serving_note=serving_note,
        left_out=[(reason, count, count / max(1, recipe.model.parameters)) for reason, count in recipe.left_out.items()],
        plotly=Markup(plotly.offline.get_plotlyjs().replace("</script", "<\\/script")),
    )  # fmt: skip


def _code(text: str) -> Markup:
    """Return text with what stands in backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # escaped before


def _asked(found: Findings) -> list[tuple[str, str]]:
    """Return (option, value) of what was asked for, with the defaults that matter."""
    asked = found.recipe.budget
    rows = [
        ("model", found.recipe.model.id),
        ("budget for the weights", asked.weights),
        ("budget for the cache", asked.kv),
        ("memory for both", asked.memory),
        ("at most, in nats per token", None if asked.max_kl is None else f"{asked.max_kl:g}"),
        ("cache priced for", f"{asked.batch} x {asked.context:,} tokens"),
        ("engine", None if asked.engine == "none" else asked.engine),
        ("tool", None if asked.consumer == "none" else asked.consumer),
        ("device", None if asked.target == "any" else asked.target),
        ("search space", found.recipe.provenance.space),
        ("trials", None if not found.facts["trials"] else str(found.facts["trials"]["asked"])),
    ]
    return [(name, str(value)) for name, value in rows if value]


def _figures(found: Findings) -> list[tuple[str, Markup]]:
    """Return (id, div) of every figure that this result has."""
    makers: list[tuple[str, Callable[[Any], go.Figure]]] = [
        ("sensitivity", plots.sensitivity), ("recipe", plots.recipe), ("predicted", plots.predicted_measured), ("cache", plots.cache_formats),
        ("memory", plots.memory),
    ]  # fmt: skip
    sides = [side for side, name in (("weights", "front"), ("cache", "kv_front")) if found.facts[name]]
    makers[:0] = [(f"damage-{side}", partial(plots.damage, side=side)) for side in sides]
    if found.facts["trials"]:
        makers += [("history", plots.history), ("importances", plots.importances)]
    figures = []
    for name, maker in makers:
        try:
            figure = maker(found)
        except UserError:  # there is nothing of this kind to draw, such as importances of few trials
            continue
        figures.append((name, _div(name, figure)))
    return figures


def _div(name: str, figure: go.Figure) -> Markup:
    data = json.dumps(json.loads(figure.to_json())).replace("</", "<\\/")
    return Markup(
        f'<div class="figure"><div class="plot" id="{name}"></div></div><script>draw("{name}", {data});</script>'  # names are ours, data is JSON
    )


def _units(found: Findings) -> list[dict[str, Any]]:
    """Return a row for every unit."""
    recipe = found.recipe
    rows: list[dict[str, Any]] = [
        {
            "unit": name,
            "role": e.role,
            "layer": e.layer,
            "format": e.format,
            "bits": e.bits,
            "values": e.numel,
            "kl": e.predicted_kl,
        }
        for name, e in recipe.weights.items()
    ]
    for layer in recipe.kv:
        for kind, role, e in (("key", "K", layer.key), ("value", "V", layer.value)):
            rows.append(
                {"unit": f"{layer.module}.{kind}", "role": role, "layer": layer.layer, "format": e.format, "bits": e.bits,
                 "values": layer.values_per_token, "kl": e.predicted_kl}
            )  # fmt: skip
    total = sum(row["kl"] or 0.0 for row in rows)
    for row in rows:
        row["share"] = None if row["kl"] is None or not total else row["kl"] / total
        row["shade"] = bits_class(row["bits"])
    return rows
