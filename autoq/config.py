"""What a search is asked for. The command line and the notebook read their defaults here."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass, fields
from pathlib import Path

from autoq.errors import UserError, unknown

SIDES = ("weights", "cache", "both")


@dataclass(frozen=True)
class SearchConfig:
    """The options of a search; every field has its one default.

    Attributes:
        model: "demo", a Hub name, a folder or a .gguf file.
        budget, kv_budget: what weights and cache may take; a side without a budget keeps 16 bit.
        memory: what all weights, embeddings too, and the cache may take together.
        target: the device that is to run the recipe; formats it cannot run are left out. engine: what is to serve it, which limits
            how cache formats may be mixed. consumer: the tool that is to make the checkpoint: only formats and rounding that it computes.
        space: a bundled search space or a YAML file.
        calib, eval: text to profile and to measure on; None is the Python standard library's documentation.
        samples, seq_len: sequences to profile and their length in tokens.
        eval_samples, eval_len: windows to measure on and their length.
        context, batch: tokens and sequences for which the cache is priced; None is 8,192 tokens or the model's maximum.
        correct: profile sequences on which every uniform format is measured to correct its column; 0 leaves it out.
        validate: weight units, drawn at random, that the kernels pack at the end to check the recipe on bytes; 0 leaves it out.
        weak: cells outside the trusted range of the prediction that may be measured alone when the solution wants them; 0 leaves it out.
        trials: recipes near the exact solution that Optuna measures. sampler: tpe, gp, nsga3, cmaes or random.
        trial_samples: windows of text to measure trials on, kept apart from what is profiled and what the result is measured on.
        storage: where trials are kept: a database URL, grpc://host:port; None is a journal file in the run folder. study: its name.
        workers: processes on the study, this one included. timeout: seconds after which no more trial is begun.
        front: find the trade-off between damage and memory, not one recipe. max_kl: find the smallest recipe within that damage, in nats.
        sides: what `front` and `max_kl` make smaller where no budget says so: weights, cache or both.
        run: the run folder; None makes runs/<model>-<time>.
        profile_batch: sequences scored together.
    """

    model: str = "demo"
    budget: str | None = None
    kv_budget: str | None = None
    memory: str | None = None
    target: str = "any"
    engine: str = "none"
    consumer: str = "none"
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
    weak: int = 128
    trials: int = 0
    sampler: str = "tpe"
    trial_samples: int = 16
    storage: str | None = None
    study: str | None = None
    workers: int = 1
    timeout: float | None = None
    front: bool = False
    max_kl: float | None = None
    sides: str = "weights"
    run: Path | None = None
    resume: bool = False
    include: tuple[str, ...] = ()
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    profile_batch: int = 16

    @property
    def needs_trial_text(self) -> bool:
        """True if recipes are compared before the last of them is measured."""
        return self.trials > 0 or self.max_kl is not None

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
            ("weak", 0),
            ("trials", 0),
            ("trial_samples", 2),
            ("workers", 1),
        ):
            value = getattr(self, name)
            if value < least:
                raise UserError(f"--{name.replace('_', '-')} is {value}, but must be at least {least}")
        if self.sides not in SIDES:
            raise unknown("value of --sides", self.sides, SIDES)
        if self.max_kl is not None and not 0 < self.max_kl < math.inf:
            raise UserError(f"--max-kl is {self.max_kl}, but must be above 0 nats per token")
        if self.max_kl is not None and self.front:
            raise UserError("--max-kl asks for one recipe and --front for all: leave one out")
        if self.timeout is not None and not self.timeout > 0:
            raise UserError(f"--timeout is {self.timeout}, but must be above 0 seconds")
        if self.study is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", self.study):
            raise UserError(f"--study {self.study!r} must be letters, digits, '.', '_' and '-', at most 100 of them")
        if self.sides != "weights" and not self.front and self.max_kl is None:
            raise UserError("--sides is about --front and --max-kl: give one of them, or budgets for what is searched")
        if self.front and self.validate:
            raise UserError("--validate checks one recipe, and --front has many: run `autoq validate` on one of them")
        if self.front and not self.trials and (self.budget or self.kv_budget or self.memory):
            raise UserError("--front without --trials draws every budget: leave the budgets out, or give --trials")
        if not self.trials:
            if self.sampler != "tpe":
                raise UserError("--sampler is about trials: give --trials too")
            for name in ("storage", "study", "timeout"):
                if getattr(self, name) is not None:
                    raise UserError(f"--{name} is about trials: give --trials too")
            if self.workers > 1:
                raise UserError("--workers is about trials: give --trials too")
        if self.batch >= 2**31:
            raise UserError(f"--batch is {self.batch}, but must be below {2**31}")
        if not -(2**31) <= self.seed < 2**31:
            raise UserError(f"--seed is {self.seed}, but must fit 32 bits")
        object.__setattr__(self, "include", tuple(dict.fromkeys(self.include)))
        for name in self.include:
            if name != "lm_head":
                raise UserError(f"--include {name!r} is unknown: only lm_head can be included")
