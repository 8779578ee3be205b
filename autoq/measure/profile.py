"""The profile: for every unit and candidate format the samples u, their storage, and what calibrates static scales.

It is one safetensors file that grows batch by batch and is replaced atomically; profile.json beside it is the same in words.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from autoq.errors import UserError
from autoq.formats.calibration import Calibration
from autoq.measure.cache_statistics import CacheStatistics
from autoq.run_folder import replacing, write_atomically

FILE = "profile.safetensors"
VERSION = 3
STATISTICS = "statistics/"  # before a cache unit's name, in the file


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
