"""Numbers for people."""

from __future__ import annotations

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
