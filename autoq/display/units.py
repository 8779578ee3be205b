"""Units in few rows and few words: neighbouring layers of one part and format together."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoq.display.words import nats, size


def unit_table(units: list[dict[str, Any]], total: float | None) -> RenderableType:
    """Return units as a table, neighbouring layers of one role and format in one row."""
    table = Table(title="recipe", title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for name, justify in (
        ("unit", "left"),
        ("role", "left"),
        ("format", "left"),
        ("bits", "right"),
        ("predicted KL", "right"),
        ("share", "right"),
    ):
        table.add_column(name, justify=justify, no_wrap=name != "unit", overflow="fold")  # type: ignore[arg-type]
    for row in grouped(units):
        damage = row["predicted_kl"]
        share = "" if damage is None or total is None else f"{100 * damage / total if total > 0 else 0.0:.1f} %"
        known = "" if damage is None else nats(damage)
        table.add_row(row["name"], row["role"], row["format"], f"{row['bits']:.3f}", known, share)
    return table


def grouped(units: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join units of consecutive layers that have the same part name and format: "layers 3-17 mlp.down_proj"."""
    order: dict[str, list[dict[str, Any]]] = {}
    for unit in units:
        order.setdefault(_part_name(unit), []).append(unit)
    rows: list[dict[str, Any]] = []
    for part, members in order.items():
        run: list[dict[str, Any]] = []
        for unit in members:
            if run and (
                unit["format"] != run[-1]["format"]
                or None in (unit["layer"], run[-1]["layer"])
                or unit["layer"] != run[-1]["layer"] + 1
            ):
                rows.append(_row(part, run))
                run = []
            run.append(unit)
        rows.append(_row(part, run))
    return rows


def _part_name(unit: dict[str, Any]) -> str:
    if unit["layer"] is None:
        return str(unit["unit"])
    return str(unit["unit"]).split(f".{unit['layer']}.", 1)[-1]


def _row(part: str, run: list[dict[str, Any]]) -> dict[str, Any]:
    first, last = run[0]["layer"], run[-1]["layer"]
    where = "" if first is None else f"layer {first} " if first == last else f"layers {first}-{last} "
    values = sum(u["numel"] for u in run)
    return {
        "name": where + part,
        "role": run[0]["role"],
        "format": run[0]["format"],
        "bits": sum(u["bits"] * u["numel"] for u in run) / max(1, values),
        "predicted_kl": None if any(u["predicted_kl"] is None for u in run) else sum(u["predicted_kl"] for u in run),
    }


def recipe_view(view: dict[str, Any]) -> RenderableType:
    """Return what `autoq show` prints."""
    head = (
        f"{view['model']}: {view['bits']:.4f} bits per weight ({view['bits_whole_model']:.4f} over the whole model, "
        f"{size(view['weight_bytes'])}), {view['kv_bits']:.4g} per cached value"
    )
    damage = "no KL predicted (the recipe was imported)"
    if view["predicted_kl"] is not None:
        damage = f"predicted KL {nats(view['predicted_kl'])} nats per token"
    damage += ", not measured: `autoq validate` does" if view["measured_kl"] is None else f", measured {nats(view['measured_kl'])}"
    return Group(Text(head, style="bold"), Text(damage), unit_table(view["units"], view["predicted_kl"]))


def in_few_words(names: list[str]) -> str:
    """Return unit names in few words: "layers 0-3, 7 self_attn.qkv", or the one name."""
    if len(names) == 1:
        return names[0]
    by_kind: dict[str, list[int]] = {}
    for name in names:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at is None:
            by_kind.setdefault(name, [])
        else:
            by_kind.setdefault(".".join(parts[at + 1 :]), []).append(int(parts[at]))
    found = [
        f"layers {ranges(layers)} {kind}" if len(layers) > 1 else f"layer {layers[0]} {kind}" if layers else kind
        for kind, layers in by_kind.items()
    ]
    return "; ".join(found)


def ranges(numbers: list[int]) -> str:
    """Return whole numbers as ranges: "0-3, 7"."""
    found: list[list[int]] = []
    for n in sorted(set(numbers)):
        if found and n == found[-1][-1] + 1:
            found[-1][-1] = n
        else:
            found.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
