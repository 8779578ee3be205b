"""Make a profile: score every candidate on every sequence, batch by batch; go on after a kill, and add formats to a finished one."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from autoq.errors import AutoqError, UserError
from autoq.measure.cache_statistics import CacheStatistics
from autoq.measure.damage import Candidates, DamageScorer
from autoq.measure.profile import FILE, Fingerprint, Profile
from autoq.model.unit import ModelUnits

ADDITION = "profile-addition"  # formats that join a finished profile, until they are all scored
Progress = Callable[[int, int], None]


def make_profile(
    model: PreTrainedModel,
    units: ModelUnits,
    candidates: Candidates,
    ids: torch.Tensor,
    fingerprint: Fingerprint,
    run: Path,
    batch: int = 16,
    progress: Progress = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Score all candidates on the sequences ids [sequences, tokens], or finish, extend or reuse the profile in `run`.

    Raises UserError if `run` holds a profile of something else.
    """
    have = existing(run, fingerprint)
    profile = have or Profile(fingerprint)
    if profile.complete or profile.done == 0:
        missing = _missing(profile, units, candidates)
        if have is not None and profile.complete:
            if not _any(missing):
                say("the profile is complete: nothing to score")
                return profile
            names = sorted({f.name for group in (missing.weights, missing.keys, missing.values) for f in group})
            say(f"scoring {', '.join(names)}; the {len(have.samples)} units' other formats are kept (same gradients)")
            addition = _resumable(run / ADDITION, fingerprint, missing, units)
            _run(model, units, missing, ids, addition, run / ADDITION, batch, progress)
            _merge(profile, addition)
            profile.save(run)
            shutil.rmtree(run / ADDITION)
            return profile
        _run(model, units, missing, ids, profile, run, batch, progress)
        return profile
    say(f"going on after sequence {profile.done} of {fingerprint.sequences}")
    scored = _scored(profile, units, candidates)
    _run(model, units, scored, ids, profile, run, batch, progress)
    if not _any(_missing(profile, units, candidates)):
        return profile
    return make_profile(model, units, candidates, ids, fingerprint, run, batch, progress, say)


def existing(run: Path, fingerprint: Fingerprint) -> Profile | None:
    """Return the profile in a run folder, or None; raises UserError if it is of something else."""
    have = Profile.load(run) if (run / FILE).is_file() else None
    if have is not None and (changed := have.fingerprint.difference(fingerprint)):
        raise UserError(
            f"{str(run)!r} holds a profile of another {' and '.join(changed)}: choose another --run folder, or delete {FILE} there"
        )
    return have


def _run(
    model: PreTrainedModel,
    units: ModelUnits,
    candidates: Candidates,
    ids: torch.Tensor,
    profile: Profile,
    run: Path,
    batch: int,
    progress: Progress,
) -> None:
    scorer = DamageScorer(model, units, candidates)
    total = len(ids)
    start = profile.done
    for name, kv in scorer.caches.items():
        kv.resume(
            profile.statistics.get(name, CacheStatistics()),
            profile.squared_norm.get(name, 0.0),
            profile.relative_error.get(name, {}),
        )
    if start == 0:
        for unit in units.units:
            names = [f.name for f in candidates.for_unit(unit)]
            profile.samples[unit.name] = {n: torch.full((total,), float("nan")) for n in names}
    progress(start, total)
    for at in range(start, total, batch):
        part = slice(at, min(at + batch, total))
        seeds = [_sequence_seed(profile.fingerprint.seed, i) for i in range(part.start, part.stop)]
        scores = scorer.score(ids[part].to(model.device), seeds)
        for unit in units.units:
            for fmt, row in zip(candidates.for_unit(unit), scores[unit.name].cpu(), strict=True):
                profile.samples[unit.name][fmt.name][part] = row
        _take_errors(profile, units, candidates, scorer)
        profile.done = part.stop
        profile.save(run)
        progress(part.stop, total)
    if not all(torch.isfinite(s).all() for by_format in profile.samples.values() for s in by_format.values()):
        raise AutoqError("a gradient of this model is not finite: try --dtype float32")


def _resumable(run: Path, fingerprint: Fingerprint, candidates: Candidates, units: ModelUnits) -> Profile:
    """Return the addition that a killed run left behind, if it is of the same formats; else a new one."""
    if (run / FILE).is_file():
        left = Profile.load(run)
        wanted = {u.name: [f.name for f in candidates.for_unit(u)] for u in units.units}
        if left.fingerprint == fingerprint and {u: list(f) for u, f in left.samples.items()} == wanted:
            return left
    return Profile(fingerprint)


def _take_errors(profile: Profile, units: ModelUnits, candidates: Candidates, scorer: DamageScorer) -> None:
    """Note relative errors and calibration."""
    for unit in units.units:
        formats = candidates.for_unit(unit)
        if unit.kind == "weight":
            parts = [scorer.weights[t.name] for t in unit.tensors if t.name in scorer.weights]
            if not formats or len(parts) < len(unit.tensors):  # no token of this batch reached an expert layer
                continue
            error = torch.stack([p.squared_error for p in parts]).sum(0) / max(sum(p.squared_norm for p in parts), 1e-300)
        else:
            kv = scorer.caches[unit.name]
            error = kv.squared_error / max(kv.squared_norm, 1e-300)
            profile.statistics[unit.name], profile.squared_norm[unit.name] = kv.statistics, kv.squared_norm
        profile.relative_error[unit.name] = {f.name: float(e) for f, e in zip(formats, error, strict=True)}


def _missing(profile: Profile, units: ModelUnits, candidates: Candidates) -> Candidates:
    def lacking(kind: str, formats: tuple[Any, ...]) -> tuple[Any, ...]:
        of_kind = [u for u in units.units if u.kind == kind]
        able = {u.name: {f.name for f in candidates.for_unit(u)} for u in of_kind}
        return tuple(
            f for f in formats if any(f.name in able[u.name] and f.name not in profile.samples.get(u.name, {}) for u in of_kind)
        )

    return Candidates(lacking("weight", candidates.weights), lacking("key", candidates.keys), lacking("value", candidates.values))


def _scored(profile: Profile, units: ModelUnits, candidates: Candidates) -> Candidates:
    """The candidates that a half-finished profile was made for, by name."""
    from autoq.formats.catalog import kv_format, weight_format

    def names(kind: str) -> list[str]:
        found: dict[str, None] = {}
        for unit in units.units:
            if unit.kind == kind:
                found.update(dict.fromkeys(profile.samples.get(unit.name, {})))
        return list(found)

    known = {f.name: f for f in candidates.weights}
    return Candidates(
        tuple(known.get(n) or weight_format(n) for n in names("weight")),
        tuple(kv_format(n) for n in names("key")),
        tuple(kv_format(n) for n in names("value")),
    )


def _any(candidates: Candidates) -> bool:
    return bool(candidates.weights or candidates.keys or candidates.values)


def _merge(profile: Profile, addition: Profile) -> None:
    for unit, by_format in addition.samples.items():
        profile.samples.setdefault(unit, {}).update(by_format)
        profile.relative_error.setdefault(unit, {}).update(addition.relative_error.get(unit, {}))
    profile.statistics.update(addition.statistics)
    profile.squared_norm.update(addition.squared_norm)


def _sequence_seed(seed: int, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:7], "little")
