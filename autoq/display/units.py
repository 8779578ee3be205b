"""Units in few rows and few words: neighbouring layers of one part and format together."""

from __future__ import annotations

from typing import Any, Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from autoq.display.words import nats, size

MOST_ROWS = 40  # with neighbouring layers together; more are joined over gaps too
COLUMNS = ("unit", "role", "format", "bits", "predicted KL", "share")
LEFT_OUT = ((), ("role",), ("role", "share"))  # where a terminal is too narrow for all


class UnitTable:
    """Units as a table, layers of one part and format in one row; it takes the columns that the terminal has room for."""

    def __init__(self, units: list[dict[str, Any]], total: float | None) -> None:
        self.rows = [_cells(row, total) for row in grouped(units)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for left_out in LEFT_OUT:
            names = [name for name in COLUMNS if name not in left_out]
            widths = [max(len(name), *(len(row[name]) for row in self.rows)) for name in names] if self.rows else []
            if sum(widths) + 2 * len(widths) <= options.max_width:
                break
        table = Table(title="recipe", title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
        for name in names:
            justify: Literal["left", "right"] = "right" if name in COLUMNS[3:] else "left"
            table.add_column(name, justify=justify, no_wrap=name != "unit", overflow="fold")
        for row in self.rows:
            table.add_row(*(row[name] for name in names))
        yield table


def _cells(row: dict[str, Any], total: float | None) -> dict[str, str]:
    damage = row["predicted_kl"]
    return {
        "unit": row["name"], "role": row["role"], "format": row["format"], "bits": f"{row['bits']:.3f}",
        "predicted KL": "" if damage is None else nats(damage),
        "share": "" if damage is None or total is None else f"{100 * damage / total if total > 0 else 0.0:.1f} %",
    }  # fmt: skip


def grouped(units: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join units of layers that have the same part name and format: "layers 3-17 mlp.down_proj".

    Neighbouring layers are joined; where that leaves more than MOST_ROWS rows, all layers are: "layers 0, 3-7 mlp.down_proj".
    """
    order: dict[str, list[dict[str, Any]]] = {}
    for unit in units:
        order.setdefault(_part_name(unit), []).append(unit)
    rows = [_row(part, run) for part, members in order.items() for run in _runs(members)]
    if len(rows) <= MOST_ROWS:
        return rows
    rows = []
    for part, members in order.items():
        formats: dict[str, list[dict[str, Any]]] = {}
        for unit in members:
            formats.setdefault(unit["format"], []).append(unit)
        rows += [_row(part, run) for run in formats.values()]
    return rows


def _runs(members: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Divide units of one part into runs of consecutive layers with one format."""
    runs: list[list[dict[str, Any]]] = []
    for unit in members:
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and unit["format"] == last["format"]
            and None not in (unit["layer"], last["layer"])
            and unit["layer"] == last["layer"] + 1
        ):
            runs[-1].append(unit)
        else:
            runs.append([unit])
    return runs


def _part_name(unit: dict[str, Any]) -> str:
    if unit["layer"] is None:
        return str(unit["unit"])
    return str(unit["unit"]).split(f".{unit['layer']}.", 1)[-1]


def _row(part: str, run: list[dict[str, Any]]) -> dict[str, Any]:
    layers = [u["layer"] for u in run if u["layer"] is not None]
    where = "" if not layers else f"layer{'s' if len(layers) > 1 else ''} {ranges(layers)} "
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
    return Group(Text(head, style="bold"), Text(damage), UnitTable(view["units"], view["predicted_kl"]))


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
