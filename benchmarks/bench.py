"""What the benchmarks of quality share: a model, texts, a profile in a run folder, and measurements kept in the results file."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from autoq.allocation.space import load_space
from autoq.formats.catalog import kv_format, weight_format
from autoq.measure.damage import Candidates
from autoq.measure.divergence import Yardstick
from autoq.measure.estimate import DamageTable, correction_factors, damage_table
from autoq.measure.profile import Fingerprint, Profile, UniformKL, model_fingerprint, text_fingerprint
from autoq.measure.profiling import make_profile
from autoq.model.load import load_model, load_tokenizer, model_source
from autoq.model.quantized import Assignment
from autoq.model.text import cut_again, own_bos, sequences, text_sources
from autoq.model.units import find_units
from autoq.run_folder import write_atomically

CONTEXT = 8192
FEW = 16  # sequences of the recipes that are made from half the default


def arguments(about: str | None, out: str, samples: int, correct: int) -> argparse.ArgumentParser:
    """Return the options that these benchmarks share."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--calib", required=True)
    parser.add_argument("--eval", required=True)
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--run", type=Path, default=Path(tempfile.gettempdir()) / f"autoq-{Path(out).stem}")
    parser.add_argument("--samples", type=int, default=samples)
    parser.add_argument("--correct", type=int, default=correct)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--kept", type=Path, help="results of another of these benchmarks: uniform formats are not measured again")
    parser.add_argument("--dtype", default="float32")
    return parser


def provenance(args: argparse.Namespace) -> dict[str, Any]:
    """Return what a results file says of where it came from."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit, "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "text": [Path(args.calib).name, Path(args.eval).name], "samples": args.samples,
    }  # fmt: skip


def bar(what: str, measured: float, limit: float, error: float | None = None) -> dict[str, Any]:
    """Return a figure that must not exceed a limit."""
    return {"what": what, "measured": measured, "error": error, "limit": limit, "holds": measured <= limit}


def show(results: dict[str, Any], names: Sequence[str]) -> None:
    """Print the named lists of rows as tables."""
    console = Console(width=130)
    for title in names:
        table = Table(title=title, box=None, title_justify="left")
        for name in results[title][0]:
            table.add_column(name)
        for row in results[title]:
            table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
        console.print(table)


def fit_text(sequences: int) -> str:
    """Name the first so many sequences of the profile's text."""
    return f"profile {sequences}"


def uniform_measurements(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return what another benchmark measured of uniform formats; caches only with a profile of as many sequences, which calibrates them."""
    results = json.loads(path.read_text())
    kinds = {"weight"} | ({"key", "value", "kv"} if results.get("samples") == args.samples else set())

    def is_uniform(key: str) -> bool:
        words = key.partition("/")[2].split()
        return len(words) == 2 and words[0] in kinds

    return {key: found for key, found in results["measurements"].items() if key == "noise" or is_uniform(key)}


class Bench:
    """The model, its texts, its profile, and the measurements made so far.

    Scores the default space, every cache format for K and for V, and `more_weights` and `more_caches`.
    """

    def __init__(self, args: argparse.Namespace, more_weights: Sequence[str] = (), more_caches: Sequence[str] = ()) -> None:
        self.out: Path = args.out
        self.kept: dict[str, Any] = json.loads(self.out.read_text())["measurements"] if self.out.is_file() else {}
        source = model_source(args.model)
        self.kept = {**(uniform_measurements(args.kept, args) if args.kept else {}), **self.kept}
        tokenizer = load_tokenizer(source)
        self.model = load_model(source, "cpu", args.dtype)
        self.units = find_units(self.model)
        calib, measure = text_sources(args.calib, args.eval)
        self.ids = sequences(tokenizer, calib, args.samples, 256)
        self.eval_ids = sequences(tokenizer, measure, args.windows, 512)
        self.fitted = args.correct
        bos = own_bos(tokenizer)
        self.texts = {"test": self.eval_ids}
        self.texts |= {fit_text(n): cut_again(self.ids[:n], 512, bos) for n in (FEW, self.fitted)}
        space = load_space("default")
        weights = dict.fromkeys([*space.weights, *map(weight_format, more_weights)])
        caches = dict.fromkeys([*space.keys, *space.values, *map(kv_format, more_caches)])
        self.candidates = Candidates(tuple(weights), tuple(caches), tuple(caches))
        self.yardsticks: dict[str, Yardstick] = {}
        self.profile = self._profile(args.run)

    def _profile(self, run: Path) -> Profile:
        made = Fingerprint(model_fingerprint(self.model), text_fingerprint(self.ids), 0, len(self.ids), 256, "float32", ())

        def progress(done: int, total: int) -> None:
            print(f"profile {done}/{total}", flush=True)

        return make_profile(self.model, self.units, self.candidates, self.ids, made, run, progress=progress, say=print)

    def yardstick(self, text: str) -> Yardstick:
        if text not in self.yardsticks:
            self.yardsticks[text] = Yardstick(self.model, self.units, self.texts[text])
        return self.yardsticks[text]

    def measure(self, name: str, assignment: Assignment, text: str = "test") -> dict[str, float]:
        """Return KL, its error, perplexity and top-1 agreement of an assignment; made once, then read from the file."""
        key = f"{text}/{name}"
        if key not in self.kept:
            start = time.time()
            found = self.yardstick(text).measure(assignment)
            self.kept[key] = {
                "kl": found.mean_kl, "stderr": found.stderr, "top1": found.top1_agreement,
                "perplexity": found.perplexity, "perplexity_original": found.perplexity_original, "windows": found.kl.mean(1).tolist(),
            }  # fmt: skip
            print(f"{key}: {found.mean_kl:.5f} ± {found.stderr:.5f}  ({time.time() - start:.0f} s)", flush=True)
            self.save({})
        return self.kept[key]

    def noise_floor(self) -> float:
        if "noise" not in self.kept:
            self.kept["noise"] = {"kl": self.yardstick("test").noise_floor()}
        return float(self.kept["noise"]["kl"])

    def save(self, results: dict[str, Any]) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.out, json.dumps({**results, "measurements": self.kept}, indent=1) + "\n")

    def weights_in(self, name: str) -> Assignment:
        fmt = weight_format(name)
        return Assignment({u.name: fmt for u in self.units.weights}, {}, self.profile.calibration)

    def caches_in(self, kind: str, name: str) -> Assignment:
        fmt = kv_format(name)
        return Assignment({}, {u.name: fmt for u in self.units.caches if kind in (u.kind, "both")}, self.profile.calibration)


def corrected_table(bench: Bench, sequences: int, estimator: Any = "steady") -> DamageTable:
    """Damage with every column corrected by its uniform measurement on the profile's text."""
    fitted = min(sequences, bench.fitted)
    prefix = f"{fit_text(fitted)}/"
    measured = {
        key.removeprefix(prefix).replace(" ", "/"): UniformKL(found["kl"], fitted, 512)
        for key, found in bench.kept.items()
        if key.startswith(prefix)
    }
    factors = correction_factors(replace(bench.profile, uniform_kl=measured), bench.units, fitted, bench.noise_floor(), estimator)
    return damage_table(bench.profile.first(sequences), bench.units, estimator, factors)


def ratio(above: list[float], below: list[float]) -> tuple[float, float]:
    """Return the ratio of two mean KLs and its standard error, paired by window."""
    a, b = torch.tensor(above, dtype=torch.float64), torch.tensor(below, dtype=torch.float64)
    r = a.mean() / b.mean()
    return float(r), float((a - r * b).std() / len(a) ** 0.5 / b.mean())
