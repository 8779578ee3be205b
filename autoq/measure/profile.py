"""The profile: for every unit and candidate format the samples u, their storage, and what calibrates static scales.

It is one safetensors file that grows batch by batch and is replaced atomically; profile.json beside it is the same in words.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from autoq.errors import AutoqError, UserError
from autoq.formats.calibration import Calibration
from autoq.measure.cache_statistics import CacheStatistics
from autoq.measure.damage import Candidates, DamageScorer
from autoq.model.unit import ModelUnits
from autoq.run_folder import replacing, write_atomically

FILE = "profile.safetensors"
ADDITION = "profile-addition"  # formats that join a finished profile, until they are all scored
VERSION = 3
STATISTICS = "statistics/"  # before a cache unit's name, in the file
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Fingerprint:
    """What a profile came from; two profiles with the same fingerprint have the same gradients, so their samples combine."""

    model: str
    text: str
    seed: int
    sequences: int
    tokens: int
    dtype: str
    include: tuple[str, ...]

    def difference(self, other: Fingerprint) -> list[str]:
        """Return the names of the fields that differ."""
        return [key for key, value in asdict(self).items() if value != getattr(other, key)]


class UniformKL(NamedTuple):
    """The KL of a uniform format in nats per token, on the text of the profile's first sequences, cut into such windows."""

    kl: float
    sequences: int
    window: int


@dataclass
class Profile:
    """Samples by unit and format.

    Attributes:
        samples: unit -> format -> float32 [sequences], u with damage = mean of u^2 / 2T (NaN where not scored yet): roots of
            sums of squared inner products.
        relative_error: unit -> format -> squared error over squared norm.
        statistics: cache unit -> of its values, to calibrate static scales and means.
        squared_norm: cache unit -> sum of squares behind its relative errors.
        uniform_kl: "kind/format" -> what that uniform format measured on the profile's text. cell_kl: "unit/format" -> the same of
            that unit alone; recipe_kl: recipe hash -> of that recipe.
        done: sequences scored.
    """

    fingerprint: Fingerprint
    samples: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    relative_error: dict[str, dict[str, float]] = field(default_factory=dict)
    statistics: dict[str, CacheStatistics] = field(default_factory=dict)
    squared_norm: dict[str, float] = field(default_factory=dict)
    uniform_kl: dict[str, UniformKL] = field(default_factory=dict)
    cell_kl: dict[str, UniformKL] = field(default_factory=dict)
    recipe_kl: dict[str, UniformKL] = field(default_factory=dict)
    done: int = 0

    @property
    def calibration(self) -> dict[str, Calibration]:
        """Return cache unit -> what its static scales and means are made of."""
        return {unit: found.calibration() for unit, found in self.statistics.items()}

    @property
    def complete(self) -> bool:
        return self.done >= self.fingerprint.sequences

    def first(self, sequences: int) -> Profile:
        """Return the profile as if only the first sequences had been scored."""
        samples = {u: {f: s[:sequences] for f, s in by_format.items()} for u, by_format in self.samples.items()}
        fingerprint = replace(self.fingerprint, sequences=sequences)
        return replace(self, fingerprint=fingerprint, samples=samples, done=min(self.done, sequences))

    def heavy_sequences(self) -> list[int]:
        """Return the sequences that carry more than ten times their share of the summed damage: read the prediction with care."""
        total = sum(torch.stack(list(by_format.values())).square().sum(0) for by_format in self.samples.values() if by_format)
        if isinstance(total, int) or float(total.sum()) == 0:
            return []
        share = total / total.sum() * len(total)
        return [i for i, s in enumerate(share.tolist()) if s > 10]

    def save(self, run: Path) -> None:
        """Write the profile into the run folder; a reader sees the old file or the new one, never half of one."""
        tensors = {}
        for unit, by_format in self.samples.items():
            if by_format:
                tensors[unit] = torch.stack(list(by_format.values())).contiguous()
        for unit, found in self.statistics.items():
            if found.by_channel is not None:
                tensors[STATISTICS + unit] = found.by_channel.contiguous()
        meta = {
            "version": VERSION,
            "fingerprint": asdict(self.fingerprint),
            "done": self.done,
            "formats": {unit: list(by_format) for unit, by_format in self.samples.items()},
            "relative_error": self.relative_error,
            "statistics": {u: {"tokens": s.tokens, "rotated": s.rotated} for u, s in self.statistics.items()},
            "squared_norm": self.squared_norm,
            "uniform_kl": self.uniform_kl,
            "cell_kl": self.cell_kl,
            "recipe_kl": self.recipe_kl,
        }
        run.mkdir(parents=True, exist_ok=True)
        with replacing(run / FILE) as part:
            save_file(tensors, part, metadata={"autoq": json.dumps(meta)})
        write_atomically(run / "profile.json", json.dumps(meta, indent=1) + "\n")

    @staticmethod
    def load(run: Path) -> Profile:
        """Read a run folder's profile; raises UserError if there is none or it cannot be read."""
        path = run / FILE
        if not path.is_file():
            raise UserError(f"there is no profile in {str(run)!r}: `autoq profile --run {run}` writes one")
        try:
            with safe_open(path, framework="pt") as stored:
                meta = json.loads(stored.metadata()["autoq"])
                rows = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            if meta["version"] == VERSION:
                return Profile._of(meta, rows)
        except (SafetensorError, AttributeError, KeyError, TypeError, ValueError, RecursionError, OSError) as error:
            raise UserError(
                f"the profile {str(path)!r} cannot be read ({type(error).__name__}: {error}): delete it and profile again"
            ) from error
        raise UserError(f"the profile {str(path)!r} is of version {meta['version']}, this autoq reads {VERSION}: profile again")

    @staticmethod
    def _of(meta: dict[str, Any], rows: dict[str, torch.Tensor]) -> Profile:
        made = meta["fingerprint"]
        profile = Profile(
            fingerprint=Fingerprint(**{**made, "include": tuple(made["include"])}),
            samples={u: dict(zip(f, rows[u], strict=True)) if f else {} for u, f in meta["formats"].items()},
            relative_error={u: {f: float(e) for f, e in by.items()} for u, by in meta["relative_error"].items()},
            statistics={
                u: CacheStatistics(rows.get(STATISTICS + u), int(s["tokens"]), float(s["rotated"]))
                for u, s in meta["statistics"].items()
            },
            squared_norm={u: float(v) for u, v in meta["squared_norm"].items()},
            uniform_kl={key: UniformKL(*found) for key, found in meta["uniform_kl"].items()},
            cell_kl={key: UniformKL(*found) for key, found in meta.get("cell_kl", {}).items()},
            recipe_kl={key: UniformKL(*found) for key, found in meta.get("recipe_kl", {}).items()},
            done=int(meta["done"]),
        )
        sequences = profile.fingerprint.sequences
        if not 0 <= profile.done <= sequences:
            raise ValueError(f"{profile.done} of {sequences} sequences are done")
        if any(s.shape != (sequences,) for by_format in profile.samples.values() for s in by_format.values()):
            raise ValueError(f"a row of samples is not {sequences} long")
        return profile


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


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return a hash of every tensor's name, shape and up to 4,096 of its values, spread evenly."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, len(flat) // 4096)].to(torch.float32).cpu()
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def text_fingerprint(ids: torch.Tensor) -> str:
    """Return a hash of token ids."""
    return hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()[:16]
