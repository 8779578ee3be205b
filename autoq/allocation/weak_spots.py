"""Weak spots of the prediction: cells outside its trusted range that the solution wants are measured, and the problem is solved again.

Second order in the damage is too low below 3 bits and above half a nat. A uniform measurement corrects a column at the damage of a
whole model in that format, which no unit of a mixed recipe has; a unit measured alone does not tell what it costs in the company of others as
coarse. So weak cells are measured alone, and one factor for all of them is found by measuring whole recipes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

from autoq.allocation.problem import Option
from autoq.formats.catalog import kv_format, weight_format
from autoq.measure.estimate import TRUSTED_KL, DamageTable
from autoq.measure.profiling import Progress
from autoq.model.unit import ModelUnits, Unit

TRUSTED_BITS = 3  # of an element
COMPANY = (1.0, 1.25, 1.6, 2.0, 2.5)  # what weak cells may cost together, as multiples of what they cost alone
Cells = dict[str, dict[str, float]]


@dataclass
class WeakSpots:
    """What was measured.

    Attributes:
        measured: unit -> format -> KL in nats per token with that unit alone in that format.
        cells: the same, and estimates for the other weak cells of a format that was measured; times `company`, or empty where the
            recipe without them measured less. rounds: solutions made. company: the factor that was best, 0 for none of it.
        is_settled: False if the measuring budget ended before the solution did not change any more.
    """

    measured: Cells = field(default_factory=dict)
    cells: Cells = field(default_factory=dict)
    rounds: int = 0
    is_settled: bool = True
    company: float = 1.0


def is_weak(unit: Unit, fmt: str, damage: float) -> bool:
    """Return True if a cell is outside the range in which the prediction is trusted."""
    if fmt == "bf16":
        return False
    parts = [weight_format(fmt)] if unit.kind == "weight" else [f.values for f in kv_format(fmt).chain]
    return damage > TRUSTED_KL or any(f.element is not None and f.element.bits < TRUSTED_BITS for f in parts)


def measure_weak_spots(
    table: DamageTable,
    plain: DamageTable,
    units: ModelUnits,
    solve: Callable[[DamageTable], Mapping[str, Option]],
    measure: Callable[[Unit, str], float],
    measure_recipe: Callable[[Mapping[str, Option]], float],
    most: int,
    progress: Progress = lambda done, total: None,
) -> WeakSpots:
    """Solve, measure the weak cells of the solution alone, put them in place, and solve again until it has no new ones.

    A weak cell that was not measured takes the prediction times what the measured ones of its format showed (the median), so that
    none looks better for not having been looked at. At the end the factor of `COMPANY` is taken whose recipe measures least; the recipe
    of the given table is measured too, and stays where it is better.

    Args:
        table: damage as it is solved with. plain: as predicted, without corrections.
        measure: returns the KL of one unit alone in a format. measure_recipe: that of a whole recipe on the same text. most: cells to measure; those of the most damage come first.
    """
    found, by_name = WeakSpots(), {u.name: u for u in units.units}
    left = most
    while True:
        current = {unit: {**row, **found.cells.get(unit, {})} for unit, row in table.items()}
        choice = solve(current)
        found.rounds += 1
        wanted = [
            (unit, option.format)
            for unit, option in choice.items()
            if is_weak(by_name[unit], option.format, option.damage) and option.format not in found.measured.get(unit, {})
        ]
        wanted.sort(key=lambda cell: (-current[cell[0]][cell[1]], cell))
        if not wanted or not left:
            found.is_settled = not wanted
            if found.measured:
                _in_company(found, table, solve, measure_recipe)
            return found
        for i, (unit, fmt) in enumerate(wanted[:left]):
            progress(i, min(len(wanted), left))
            found.measured.setdefault(unit, {})[fmt] = measure(by_name[unit], fmt)
        left -= min(left, len(wanted))
        found.cells = _with_neighbours(found.measured, table, plain, by_name)


def _in_company(
    found: WeakSpots,
    table: DamageTable,
    solve: Callable[[DamageTable], Mapping[str, Option]],
    measure_recipe: Callable[[Mapping[str, Option]], float],
) -> None:
    """Find the factor for the weak cells whose recipe measures least; they are dropped where the recipe without them does."""
    least, alone = measure_recipe(solve(table)), found.cells
    found.company, found.cells = 0.0, {}
    rising = 0
    for factor in COMPANY:
        cells = {unit: {fmt: damage * factor for fmt, damage in row.items()} for unit, row in alone.items()}
        kl = measure_recipe(solve({unit: {**row, **cells.get(unit, {})} for unit, row in table.items()}))
        if kl < least:
            least, found.company, found.cells, rising = kl, factor, cells, 0
        else:
            rising += 1
        if rising == 2 and found.company:
            return


def _with_neighbours(measured: Cells, table: DamageTable, plain: DamageTable, units: Mapping[str, Unit]) -> Cells:
    ratios: dict[tuple[str, str], list[float]] = {}
    for unit, row in measured.items():
        for fmt, kl in row.items():
            if kl > 0 and plain[unit][fmt] > 0:
                ratios.setdefault((units[unit].role, fmt), []).append(math.log(kl / plain[unit][fmt]))
    every: dict[tuple[str, str], list[float]] = {}
    for (role, fmt), logs in ratios.items():
        kind = next(u.kind for u in units.values() if u.role == role)
        every.setdefault((kind, fmt), []).extend(logs)
    cells: Cells = {}
    for unit, row in table.items():
        for fmt, damage in row.items():
            known = every.get((units[unit].kind, fmt))
            if fmt in measured.get(unit, {}):
                cells.setdefault(unit, {})[fmt] = measured[unit][fmt]
            elif known and is_weak(units[unit], fmt, damage):
                cells.setdefault(unit, {})[fmt] = plain[unit][fmt] * math.exp(median(known))
    return cells
