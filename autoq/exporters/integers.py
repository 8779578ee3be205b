"""Integer formats by their numbers: the catalog's name where it has one, else a name that says them."""

from __future__ import annotations

from autoq.errors import UserError
from autoq.exporters.consumer import same_numbers
from autoq.formats.catalog import WEIGHT_FORMATS
from autoq.formats.format import Format, IntElement, ScaleRule


def integer(bits: int, group: int | None, symmetric: bool, rule: ScaleRule) -> Format:
    """Return the format of `bits`-bit integers in groups along a row (None: the whole row), scales in float16.

    Args:
        rule: how symmetric scales are picked; asymmetric ones are from the smallest and the largest value.

    Raises UserError for bits that autoq cannot pack.
    """
    if type(bits) is not int or not 2 <= bits <= 8:
        raise UserError(f"integers of {bits!r} bits are out of reach: 2 to 8 bits are packed")
    if group is not None and (type(group) is not int or not 8 <= group <= 2**16 or group % 8):
        raise UserError(f"a group size of {group!r} is none that can be packed: a multiple of 8, or the whole row")
    if type(symmetric) is not bool:
        raise UserError(f"{symmetric!r} does not say whether an integer is symmetric: true or false")
    found = Format("", IntElement(bits, not symmetric), group, "fp16", rule if symmetric else "minmax")
    return named(found, f"int{bits}" + (f"_g{group}" if group else "") + ("" if symmetric else "_asym"))


def named(fmt: Format, fallback: str) -> Format:
    """Return the catalog's format of the same numbers, or this one under another name."""
    known = next((f for f in WEIGHT_FORMATS.values() if same_numbers(f, fmt)), None)
    if known is not None:
        return known
    suffix = {"half_step": "_half", "full_range": "_full"}.get(fmt.rule, "")
    return Format(
        fallback + suffix, fmt.element, fmt.block, fmt.scale, fmt.rule, fmt.tensor_scale, fmt.tensor_range, fmt.activation
    )
