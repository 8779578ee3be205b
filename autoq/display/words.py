"""Numbers for people."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoq.recipe import Recipe

KIB, MIB, GIB = 2**10, 2**20, 2**30


def size(count: float) -> str:
    """Write bytes for people."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count:.0f} B"


def nats(value: float) -> str:
    """Write a damage: enough digits to compare, no more."""
    return f"{value:.4f}" if value >= 0.001 or value == 0 else f"{value:.1e}"


def model_limit(limit: int | None) -> str:
    """Return what bounds a context beside the memory."""
    return "" if limit is None else f"; the model itself reads at most {limit:,} tokens"


def tiny(value: float) -> str:
    """Write a number near zero."""
    return f"{value:.1e}" if value >= 1e-12 else "below 1e-12"


def plus_minus(value: float, error: float | None) -> str:
    """Write a damage with its standard error, in as many digits."""
    if error is None or not math.isfinite(error):
        return nats(value)
    if value >= 0.001:
        return f"{value:.4f} ± {error:.4f}" if error >= 5e-5 or error == 0 else f"{value:.4f} ± {error:.1e}"
    return f"{nats(value)} ± {nats(error)}"


def answer(recipe: Recipe, facts: dict[str, Any]) -> str:
    """Return a search's result in one sentence."""
    totals = recipe.totals
    parts = []
    if facts["front"]:
        parts.append(f"{totals.bits:.4g} bits per weight ({size(totals.weight_bytes)} with all that stays in 16 bit)")
    if facts["kv_front"]:
        parts.append(f"{totals.kv_bits:.4g} bits per cached value ({size(totals.kv_bytes)})")
    error = facts["measured_kl_stderr"]
    text = f"{recipe.model.id} in {' and '.join(parts) or '16 bit'} costs {plus_minus(facts['measured_kl'], error)} nats of KL per token"
    others = [r for r in facts["confirmed"] if r["recipe"].startswith("uniform ") and not r["is_best"]]
    if others:
        best = min(others, key=lambda r: float(r["measured_kl"]))
        if best["measured_kl"] > 0:
            text += f", {facts['measured_kl'] / best['measured_kl']:.2f} x that of the best uniform format of no more bits ({best['recipe'].removeprefix('uniform ')})"
    return text + "."
