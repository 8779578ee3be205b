"""From samples to predicted damage: the raw mean, the steadier estimate of it, its correction and its standard error.

Nearly all of a weight cell's structure is known: damage(unit, format) = sensitivity of the unit x factor of the format x exact
relative squared error. The logs of raw / error are averaged over formats for the unit's factor, the rest over units of one
role for the format's factor; what remains of a cell is kept as far as two halves of the sequences agree on it. Keys and
values are left as they are, but a single token can carry a sequence, so that a sequence counts for at most WINSOR times the
median one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from autoq.measure.profile import Profile
from autoq.model.unit import ModelUnits, Unit

Estimator = Literal["steady", "raw"]
DamageTable = dict[str, dict[str, float]]
TRUSTED_KL = 0.5  # nats; above this second order is too low
WINSOR = 4.0


def damage_table(
    profile: Profile,
    units: ModelUnits,
    estimator: Estimator = "steady",
    factors: Mapping[str, float] | None = None,
    skip: int | None = None,
    cells: Mapping[str, Mapping[str, float]] | None = None,
) -> DamageTable:
    """Return unit -> format -> predicted damage in nats per token.

    Args:
        factors: "kind/format" -> what to multiply that column with, from `correction_factors`.
        cells: unit -> format -> damage to put in place of the prediction.
        skip: leave one sequence out (for the jackknife).
    """
    table: DamageTable = {}
    for members in _by_role(units).values():
        if estimator == "steady" and members[0].kind == "weight":
            table.update(_steady(profile, members, skip))
        else:
            table.update({u.name: _mean(profile, u, skip, robust=estimator == "steady") for u in members})
    for unit in units.units if factors else ():
        row = table[unit.name]
        for fmt in row:
            row[fmt] *= (factors or {}).get(f"{unit.kind}/{fmt}", 1.0)
    for name, known in (cells or {}).items():
        if name in table:
            table[name].update({fmt: damage for fmt, damage in known.items() if fmt in table[name]})
    return table


def correction_factors(
    profile: Profile, units: ModelUnits, sequences: int, noise_floor: float = 0.0, estimator: Estimator = "steady"
) -> dict[str, float]:
    """Return "kind/format" -> measured over predicted KL of the uniform formats that were measured on the first `sequences`.

    Both are taken on the same text, so that how hard it happens to be cancels; the measurement was made in windows as long as
    the recipe will be measured in, because a cache costs less per token in a longer context. A measurement within twice the
    noise floor says nothing, and leaves its column as it is.
    """
    table = damage_table(profile.first(sequences), units, estimator)
    factors = {}
    for key, (kl, measured_on, _) in profile.uniform_kl.items():
        kind, fmt = key.split("/", 1)
        predicted = sum(table[u.name].get(fmt, 0.0) for u in units.units if u.kind == kind)
        if measured_on == sequences and predicted > 0 and kl > 2 * noise_floor:
            factors[key] = kl / predicted
    return factors


@dataclass(frozen=True)
class Prediction:
    """Predicted KL in nats per token, and its standard error over the profile's sequences (jackknife)."""

    kl: float
    stderr: float


class Predictor:
    """Predicts the damage of choices unit -> format name; units in 16 bit cost nothing.

    The tables with one sequence left out are made once, so that the error of many choices costs little more than that of one.
    """

    def __init__(
        self,
        profile: Profile,
        units: ModelUnits,
        estimator: Estimator = "steady",
        factors: Mapping[str, float] | None = None,
        cells: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        self.whole = damage_table(profile, units, estimator, factors, cells=cells)
        n = profile.done
        self.left_out = [damage_table(profile, units, estimator, factors, i, cells) for i in range(n)] if n > 1 else []

    def error(self, choice: Mapping[str, str]) -> float:
        """Return the standard error of a choice's prediction."""
        return self(choice).stderr

    def __call__(self, choice: Mapping[str, str]) -> Prediction:
        """Return the predicted damage of a choice, and its standard error."""

        def total(table: DamageTable) -> float:
            return sum(table[unit][fmt] for unit, fmt in choice.items() if fmt in table.get(unit, {}))

        n = len(self.left_out)
        if not n:
            return Prediction(total(self.whole), math.nan)
        left = np.array([total(table) for table in self.left_out])
        return Prediction(total(self.whole), float(np.sqrt((n - 1) / n * ((left - left.mean()) ** 2).sum())))


def disagreeing_cells(profile: Profile, units: ModelUnits, sigmas: float = 4.0) -> list[tuple[str, str, float]]:
    """Return (unit, format, raw / steady) of the cells where the two part: outlier channels or tokens, worth a look."""
    raw, steady = (damage_table(profile, units, e) for e in ("raw", "steady"))
    width = sigmas * math.sqrt(2 / max(1, profile.done))
    found = [
        (unit, fmt, value / steady[unit][fmt])
        for unit, row in raw.items()
        for fmt, value in row.items()
        if value > 0 and steady[unit][fmt] > 0 and abs(math.log(value / steady[unit][fmt])) > width
    ]
    return sorted(found, key=lambda cell: -abs(math.log(cell[2])))


def _by_role(units: ModelUnits) -> dict[str, list[Unit]]:
    roles: dict[str, list[Unit]] = {}
    for unit in units.units:
        roles.setdefault(unit.role, []).append(unit)
    return roles


def _mean(profile: Profile, unit: Unit, skip: int | None, robust: bool) -> dict[str, float]:
    by_format = profile.samples.get(unit.name, {})
    if not by_format:
        return {}
    u = torch.stack(list(by_format.values()))[:, : profile.done].to(torch.float64)
    if skip is not None:
        u = torch.cat([u[:, :skip], u[:, skip + 1 :]], dim=1)
    damage = u.square() / (2 * profile.fingerprint.tokens)
    if robust:
        damage = torch.minimum(damage, WINSOR * damage.median(1, keepdim=True).values)
    return dict(zip(by_format, damage.mean(1).tolist(), strict=True))


def _steady(profile: Profile, members: list[Unit], skip: int | None) -> DamageTable:
    """Shrink the members' raw means towards the pooled form, as far as they are noise.

    The residuals of two halves of the sequences tell how much of a residual is noise and how much the cell's own
    (James and Stein 1961): with few sequences the pooled form holds, with many the mean itself.
    """
    formats = list(dict.fromkeys(f for u in members for f in profile.samples.get(u.name, {})))
    if not formats:
        return {u.name: {} for u in members}
    errors = np.array([[profile.relative_error.get(u.name, {}).get(f, 0.0) for f in formats] for u in members])
    everything = [i for i in range(profile.done) if i != skip]
    pooled, residual, raw = _pooled(profile, members, formats, errors, everything)
    share = 0.0
    if len(everything) >= 4:
        halves = [_pooled(profile, members, formats, errors, everything[start::2])[1] for start in (0, 1)]
        total, noise = float(np.nanmean(residual**2)), float(np.nanmean((halves[0] - halves[1]) ** 2)) / 4
        share = max(0.0, 1 - noise / total) if total > 0 else 0.0
    steady = pooled * np.exp(share * np.nan_to_num(residual))
    found = np.where(np.isnan(residual), raw, steady)
    return {
        u.name: {f: float(found[i, j]) for j, f in enumerate(formats) if f in profile.samples.get(u.name, {})}
        for i, u in enumerate(members)
    }


def _pooled(
    profile: Profile, members: list[Unit], formats: list[str], errors: np.ndarray, sequences: list[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (pooled damage, log of raw over pooled, raw damage), each [units, formats]; NaN residuals where nothing is known."""
    raw = np.zeros_like(errors)
    for i, unit in enumerate(members):
        by_format = profile.samples.get(unit.name, {})
        if by_format:
            u = torch.stack(list(by_format.values()))[:, sequences].to(torch.float64)
            damage = u.square().mean(1) / (2 * profile.fingerprint.tokens)
            raw[i, [formats.index(f) for f in by_format]] = damage.numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where((raw > 0) & (errors > 0), np.log(raw / errors), np.nan)
    known = ~np.isnan(logs)
    unit_factor = np.where(known, logs, 0).sum(1, keepdims=True) / np.maximum(1, known.sum(1, keepdims=True))
    format_factor = np.where(known, logs - unit_factor, 0).sum(0, keepdims=True) / np.maximum(1, known.sum(0, keepdims=True))
    pooled = np.exp(unit_factor + format_factor) * errors
    return pooled, logs - unit_factor - format_factor, raw
