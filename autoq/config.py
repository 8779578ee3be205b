"""What a search is asked for. The command line and the notebook read their defaults here."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from pathlib import Path

from autoq.errors import UserError


@dataclass(frozen=True)
class SearchConfig:
    """The options of a search; every field has its one default.

    Attributes:
        model: "demo", a Hub name, a folder or a .gguf file.
        budget, kv_budget: what weights and cache may take; a side without a budget keeps 16 bit.
        memory: what all weights, embeddings too, and the cache may take together.
        target: the device that is to run the recipe; formats it cannot run are left out. engine: what is to serve it, which limits
            how cache formats may be mixed.
        space: a bundled search space or a YAML file.
        calib, eval: text to profile and to measure on; None is the Python standard library's documentation.
        samples, seq_len: sequences to profile and their length in tokens.
        eval_samples, eval_len: windows to measure on and their length.
        context, batch: tokens and sequences for which the cache is priced; None is 8,192 tokens or the model's maximum.
        correct: profile sequences on which every uniform format is measured to correct its column; 0 leaves it out.
        validate: weight units, drawn at random, that the kernels pack at the end to check the recipe on bytes; 0 leaves it out.
        run: the run folder; None makes runs/<model>-<time>.
        profile_batch: sequences scored together.
    """

    model: str = "demo"
    budget: str | None = None
    kv_budget: str | None = None
    memory: str | None = None
    target: str = "any"
    engine: str = "none"
    space: str = "default"
    calib: str | None = None
    eval: str | None = None
    samples: int = 32
    seq_len: int = 256
    eval_samples: int = 16
    eval_len: int = 256
    context: int | None = None
    batch: int = 1
    correct: int = 8
    validate: int = 0
    run: Path | None = None
    resume: bool = False
    include: tuple[str, ...] = ()
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    profile_batch: int = 16

    def options(self) -> str:
        """Return the command-line options that make the same profile again: those that are not the defaults."""
        names = ("model", "space", "calib", "eval", "samples", "seq_len", "seed", "dtype")
        defaults = {f.name: f.default for f in fields(self)}
        given = [f"--{n.replace('_', '-')} {shlex.quote(str(getattr(self, n)))}" for n in names if getattr(self, n) != defaults[n]]
        return " ".join([*given, *(f"--include {name}" for name in self.include)])

    def __post_init__(self) -> None:
        for name, least in (
            ("samples", 2),
            ("seq_len", 8),
            ("eval_samples", 2),
            ("eval_len", 8),
            ("batch", 1),
            ("profile_batch", 1),
            ("correct", 0),
            ("validate", 0),
        ):
            value = getattr(self, name)
            if value < least:
                raise UserError(f"--{name.replace('_', '-')} is {value}, but must be at least {least}")
        if self.batch >= 2**31:
            raise UserError(f"--batch is {self.batch}, but must be below {2**31}")
        if not -(2**31) <= self.seed < 2**31:
            raise UserError(f"--seed is {self.seed}, but must fit 32 bits")
        object.__setattr__(self, "include", tuple(dict.fromkeys(self.include)))
        for name in self.include:
            if name != "lm_head":
                raise UserError(f"--include {name!r} is unknown: only lm_head can be included")
