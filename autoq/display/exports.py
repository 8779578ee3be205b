"""What an export wrote and lost, what an import found, what a check found, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoq.display.units import in_few_words
from autoq.display.words import size
from autoq.exporters.consumers import CONSUMERS

if TYPE_CHECKING:
    from autoq.api.exporting import ExportReport
    from autoq.api.importing import Imported


def export_view(report: ExportReport) -> RenderableType:
    """Return what `autoq export --to CONSUMER` prints."""
    parts: list[RenderableType] = [Text(f"{report.consumer}: {report.what}", style="bold")]
    lines = Table.grid(padding=(0, 2))
    for path in report.files:
        lines.add_row("wrote", str(path))
    lines.add_row("weights", _bits(report.bits, report.recipe_bits))
    lines.add_row("cache", _bits(report.kv_bits, report.recipe_kv_bits))
    parts.append(lines)
    parts += [Text(f"changed: {line}", style="yellow") for line in loss_lines(report)]
    if _is_over(report):
        parts.append(
            Text(
                f"More bits than the recipe has: `autoq search --consumer {report.consumer}` takes only formats that it has.",
                style="yellow",
            )
        )
    if report.losses:
        parts.append(Text("The recipe's measured KL is of its own formats: measure again what you quantize.", style="yellow"))
    else:
        parts.append(Text("It says all that the recipe says.", style="green"))
    general = CONSUMERS[report.consumer].notes
    return Group(*parts, *(Text(f"{'in general' if note in general else 'note'}: {note}", style="dim") for note in report.notes))


def export_table(reports: list[ExportReport]) -> RenderableType:
    """Return what `autoq export --to all` prints."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("consumer", "bits", "cache bits", "what is not as in the recipe"):
        table.add_column(name, justify="right" if "bits" in name else "left", overflow="fold")
    for r in reports:
        if r.refused is not None:
            why = f"refused: {r.refused}" if r.needs == "none" else f"needs --round {r.needs}: {summary(r)}"
            table.add_row(r.consumer, "", "", Text(why, style="yellow"))
            continue
        table.add_row(r.consumer, f"{r.bits:.4g}", f"{r.kv_bits:.4g}", summary(r))
    folder = next((r.files[0].parent.parent for r in reports if r.files), None)
    where = f"written below {folder}; export.json in each folder names every change" if folder else "nothing was written"
    parts: list[RenderableType] = [table, Text(where, style="dim")]
    for r in reports:
        if r.files and CONSUMERS[r.consumer].wider:
            parts.append(Text(CONSUMERS[r.consumer].wider, style="dim"))
    if any(r.files and _is_over(r) for r in reports):
        parts.append(
            Text("More bits than the recipe has: `autoq search --consumer NAME` takes only formats that a tool has.", style="dim")
        )
    if any(r.needs != "none" for r in reports):
        parts.append(
            Text(
                "--round scales lets a tool pick its own scales for the same bytes; --round up also takes its next better format.",
                style="dim",
            )
        )
    return Group(*parts)


def summary(report: ExportReport) -> str:
    """Return in a few words how many units are not as in the recipe."""
    own = sum(loss.needs == "scales" for loss in report.losses)
    others: dict[str, int] = {}
    for loss in report.losses:
        if loss.needs == "up":
            key = f"{loss.wanted} -> {loss.got}"
            others[key] = others.get(key, 0) + 1
    parts = [f"{own} units in its own scales"] if own else []
    return ", ".join(parts + [f"{count} {key}" for key, count in others.items()]) or "nothing"


def loss_lines(report: ExportReport) -> list[str]:
    """Return one line for every kind of loss, with what it is about grouped."""
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for loss in report.losses:
        kinds.setdefault((loss.wanted, loss.got or "bf16", loss.why), []).append(loss.what)
    return [f"{in_few_words(what)}: {wanted} -> {got}, {why}" for (wanted, got, why), what in kinds.items()]


def _is_over(report: ExportReport) -> bool:
    """True if what is exported takes more than the recipe, in weights or cache."""
    return report.bits > 1.001 * report.recipe_bits or report.kv_bits > 1.001 * report.recipe_kv_bits


def _bits(exported: float, wanted: float) -> str:
    same = abs(exported - wanted) < 5e-5
    return f"{exported:.4f} bits" + ("" if same else f" (the recipe: {wanted:.4f})")


def import_view(imported: Imported) -> RenderableType:
    """Return what `autoq import` prints."""
    totals = imported.recipe.totals
    lines = Table.grid(padding=(0, 2))
    lines.add_row("read as", imported.kind)
    lines.add_row("wrote", str(imported.path))
    lines.add_row(
        "weights", f"{totals.bits:.4f} bits each ({totals.bits_whole_model:.4f} over the whole model, {size(totals.weight_bytes)})"
    )
    lines.add_row("KV cache", f"{totals.kv_bits:.4g} bits a value")
    lines.add_row("next", f"autoq show {imported.path}; autoq validate {imported.path} measures it")
    return Group(lines, *(Text(f"note: {note}", style="yellow") for note in imported.notes))
