"""Devices: how much memory they have, and which formats they can run."""

from __future__ import annotations

from dataclasses import dataclass

from autoq.errors import unknown
from autoq.formats.format import Format, KVFormat

FP8_NEEDS, FP4_NEEDS = (8, 9), (10, 0)  # compute capability for E4M3, and for FP4 caches and products
_FP4_NAMES = ("E2M1",)
_FP8_NAMES = ("E4M3", "E5M2")


@dataclass(frozen=True)
class Target:
    """A device.

    Attributes:
        memory: bytes, or None where it is the machine's own. capability: CUDA compute capability, or None (no GPU).
    """

    name: str
    memory: int | None
    capability: tuple[int, int] | None

    def refusal(self, fmt: Format | KVFormat) -> str | None:
        """Say why this device cannot run a format, or None. Weights alone decode anywhere; products and caches need the numbers.

        A CPU runs what transformers runs: every format is decoded before it is used.
        """
        if self.capability is None:
            return None
        if isinstance(fmt, KVFormat) and fmt.older is not None and (reason := self.refusal(fmt.older)):
            return reason
        if isinstance(fmt, KVFormat):
            element, what = fmt.values.element, "a cache"
        else:
            element, what = fmt.activation.element if fmt.activation else None, "a product"
        name = element.name if element else ""
        needs = FP4_NEEDS if name in _FP4_NAMES else FP8_NEEDS if name in _FP8_NAMES else (0, 0)
        if fmt_scale(fmt) == "e8m0" and what == "a product" and element is not None:
            needs = max(needs, FP4_NEEDS)  # block-scaled products
        if self.capability >= needs:
            return None
        return f"{what} in {name} needs compute capability {needs[0]}.{needs[1]}, and {self.name} has {self.capability[0]}.{self.capability[1]}"


def fmt_scale(fmt: Format | KVFormat) -> str:
    """Return the type of a format's block scales."""
    return fmt.values.scale if isinstance(fmt, KVFormat) else fmt.scale


_GIB = 2**30
TARGETS: dict[str, Target] = {
    "any": Target("any", None, None),
    "cpu": Target("cpu", None, None),
    "a100": Target("a100", 80 * _GIB, (8, 0)),
    "l40s": Target("l40s", 48 * _GIB, (8, 9)),
    "h100": Target("h100", 80 * _GIB, (9, 0)),
    "h200": Target("h200", 141 * 10**9, (9, 0)),
    "b200": Target("b200", 180 * 10**9, (10, 0)),
    "rtx4090": Target("rtx4090", 24 * _GIB, (8, 9)),
    "rtx5090": Target("rtx5090", 32 * _GIB, (12, 0)),
}


def target_of(name: str) -> Target:
    """Return the target of that name; raises UserError with the nearest name."""
    if name not in TARGETS:
        raise unknown("target", name, TARGETS)
    return TARGETS[name]
