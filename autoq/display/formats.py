"""The catalog as a table; needs no torch."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from autoq.formats.catalog import KV_FORMATS, WEIGHT_FORMATS
from autoq.formats.format import Format, KVFormat

WIDTH, ROWS, HEAD_DIM, TOKENS = 4096, 4096, 128, 8192


def format_rows() -> list[dict[str, Any]]:
    """Return one entry per format; bits for a 4,096 x 4,096 weight, or for a head_dim of 128 at 8,192 tokens."""
    rows = [_row("weight", f.name, f, f.storage_bits((ROWS, WIDTH)) / (ROWS * WIDTH)) for f in WEIGHT_FORMATS.values()]
    for kv in KV_FORMATS.values():
        rows.append(_row("kv", kv.name, kv, kv.storage_bits(TOKENS, 8, HEAD_DIM) / (TOKENS * 8 * HEAD_DIM)))
    return rows


def _row(kind: str, name: str, fmt: Format | KVFormat, bits: float) -> dict[str, Any]:
    values = fmt.values if isinstance(fmt, KVFormat) else fmt
    scale: str = values.scale if values.scale != "none" else "-"
    if isinstance(fmt, KVFormat) and fmt.calibration != "none":
        static = "calibrated" if fmt.calibration == "absmax" else "fixed"
        scale = f"static ({static})" if scale == "-" else f"{scale}, static ({static})"
    return {
        "kind": kind,
        "name": name,
        "element": values.element.name if values.element else "BF16",
        "block": values.block or ("row" if values.scale != "none" else "-"),
        "along": (fmt.axis if isinstance(fmt, KVFormat) else "input") if values.element else "-",
        "scale": scale + (", fp32 tensor" if values.tensor_scale else ""),
        "rule": _rule(fmt, values),
        "activations": values.activation.name if values.activation else "-",
        "bits": round(bits, 4),
    }


def _rule(fmt: Format | KVFormat, values: Format) -> str:
    if values.element is None:
        return "-"
    if isinstance(fmt, KVFormat) and (fmt.center or fmt.rotate):
        return f"{values.rule}, {'around a mean' if fmt.center else 'rotated'}"
    return values.rule


def format_table() -> Table:
    """Return the catalog."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    columns = ("name", "element", "block", "along", "scale", "rule", "activations", "bits")
    for name in columns:
        whole = name in ("name", "block", "bits")  # what a narrow terminal must not cut
        table.add_column(name, justify="right" if name in ("bits", "block") else "left", no_wrap=whole, overflow="fold")
    table.caption = (
        "Rules pick a block's scale. absmax, minmax: up to the largest magnitude; full_range (_full): to the most negative code; half_step (_half): half a step beyond "
        "the largest code; least_squares (_lsq), 4over6: the least squared error; floor, ceil, even: a power of two.\n"
        "Options of a KV format: +sink4 +residual128 +refresh1024 (static scales) +tier512>int4_token (older tokens)."
    )
    table.caption_justify = "left"
    kind = None
    for row in format_rows():
        if row["kind"] != kind:
            kind = row["kind"]
            table.add_section()
            table.add_row(f"[dim]{'weights' if kind == 'weight' else 'KV cache'}[/]")
        table.add_row(*(f"{row[c]:.4f}" if c == "bits" else str(row[c]) for c in columns))
    return table
