"""Predicted against measured KL, and what the search returns, on a real model; prints tables and writes a JSON file.

    python benchmarks/quality.py --model DIR --calib valid.txt --eval test.txt --out docs/results/quality.json

Every measurement is kept in the JSON file as soon as it is made, so that a stopped run goes on where it was. The bars it prints
are those of the issue that asked for them; a missed one is printed as missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from autoq.api import assignment_of
from autoq.budget import Budgets, parse_budget
from autoq.cost.bits import weight_cost
from autoq.cost.kv_memory import kv_cost
from autoq.formats.catalog import kv_format, weight_format
from autoq.measure.damage import Candidates
from autoq.measure.divergence import Yardstick
from autoq.measure.estimate import DamageTable, correction_factors, damage_table
from autoq.measure.importance import input_importance
from autoq.measure.profile import Fingerprint, Profile, UniformKL, make_profile, model_fingerprint, text_fingerprint
from autoq.model.load import load_model, load_tokenizer, model_source
from autoq.model.quantized import Assignment
from autoq.model.text import cut_again, own_bos, sequences, text_sources
from autoq.model.units import find_units
from autoq.run_folder import write_atomically
from autoq.search.problem import Option, make_problem
from autoq.search.solver import solve, total_damage
from autoq.search.space import load_space

CONTEXT = 8192
WEIGHT_ROWS = ("fp8", "int8", "mxfp6_e2m3", "int4_g32_asym", "nvfp4", "nvfp4_4over6", "nvfp4_lsq", "mxfp4",
               "int4_g64", "int4_g64_full", "int4_g128", "int3_g64_asym")  # fmt: skip
KV_ROWS = ("fp8_cast", "int8_token", "nvfp4", "mxfp4", "int4_token", "int4_channel")


FEW = 16  # sequences of the recipes that are made from half the default


def fit_text(sequences: int) -> str:
    """Name the first so many sequences of the profile's text."""
    return f"profile {sequences}"


class Bench:
    """The model, its texts, and the measurements made so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.out: Path = args.out
        self.kept: dict[str, Any] = json.loads(self.out.read_text())["measurements"] if self.out.is_file() else {}
        source = model_source(args.model)
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
        weights = dict.fromkeys([*space.weights, *map(weight_format, WEIGHT_ROWS)])
        caches = dict.fromkeys([*space.keys, *space.values, *map(kv_format, KV_ROWS)])
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


def uniform_rows(bench: Bench, sequences: int) -> list[dict[str, Any]]:
    """One row per kind and format: predicted, corrected on the profile's text, measured on the test text."""
    table = damage_table(bench.profile.first(sequences), bench.units)
    same_text = damage_table(bench.profile.first(bench.fitted), bench.units)
    raw = damage_table(bench.profile.first(sequences), bench.units, "raw")
    todo: list[tuple[str, str, Callable[[str], Assignment]]] = [("weight", n, bench.weights_in) for n in WEIGHT_ROWS]
    for kind in ("key", "value"):
        todo += [(kind, n, lambda n, kind=kind: bench.caches_in(kind, n)) for n in KV_ROWS]  # type: ignore[misc]
    rows = []
    for kind, name, build in todo:
        units = [u for u in bench.units.units if u.kind == kind]
        predicted, on_fit = (sum(t[u.name][name] for u in units) for t in (table, same_text))
        fitted = bench.measure(f"{kind} {name}", build(name), fit_text(bench.fitted))
        tested = bench.measure(f"{kind} {name}", build(name))
        corrected = predicted * fitted["kl"] / on_fit
        if kind == "weight":
            bits = weight_cost(bench.units, {u.name: weight_format(name) for u in units}).effective
        else:
            stored, values = kv_cost(bench.units, {u.name: kv_format(name) for u in bench.units.caches}, CONTEXT)
            bits = stored / values
        rows.append(
            {
                "kind": kind, "format": name, "bits": bits, "predicted": predicted, "raw": sum(raw[u.name][name] for u in units),
                "measured_on_profile_text": fitted["kl"], "corrected": corrected, "measured": tested["kl"], "stderr": tested["stderr"],
                "plain_off": predicted / tested["kl"] - 1, "corrected_off": corrected / tested["kl"] - 1,
            }
        )  # fmt: skip
    return rows


def measure_columns(bench: Bench) -> None:
    """Measure every candidate of the searched spaces uniformly on the profile's text, as `autoq search` does."""
    plain, default = load_space("plain"), load_space("default")
    for text in (fit_text(bench.fitted), fit_text(FEW)):
        for fmt in dict.fromkeys([*plain.weights, *default.weights]):
            bench.measure(f"weight {fmt.name}", bench.weights_in(fmt.name), text)
    for kind, formats in (("key", default.keys), ("value", default.values)):
        for kv in formats:
            bench.measure(f"{kind} {kv.name}", bench.caches_in(kind, kv.name), fit_text(bench.fitted))


def solve_weights(bench: Bench, candidates: Candidates, budget: str, table: DamageTable) -> dict[str, Option]:
    return solve(make_problem(bench.units, candidates, Budgets(parse_budget(budget)), table))


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


def recipe_name(space: str, budget: str, count: int, estimator: str = "steady") -> str:
    return f"recipe {space} {budget} bits {count} {estimator}"


def ratio(above: list[float], below: list[float]) -> tuple[float, float]:
    """Return the ratio of two mean KLs and its standard error, paired by window."""
    a, b = torch.tensor(above, dtype=torch.float64), torch.tensor(below, dtype=torch.float64)
    r = a.mean() / b.mean()
    return float(r), float((a - r * b).std() / len(a) ** 0.5 / b.mean())


def recipe_rows(bench: Bench) -> list[dict[str, Any]]:
    """Searched recipes: by space, budget, number of sequences and estimator, beside uniform nvfp4."""
    plain, default = load_space("plain"), load_space("default")
    nvfp4 = bench.measure("weight nvfp4", bench.weights_in("nvfp4"))["kl"]
    most = len(bench.ids)
    todo = [("plain", plain, b, 32, "steady") for b in ("3.5", "4.5", "5.0", "6.0")]
    todo += [("default", default, b, 32, "steady") for b in ("3.5", "4.5", "5.0", "5.5", "6.0")]
    todo += [("default", default, b, n, "steady") for b in ("4.5", "5.0") for n in (FEW, most)]
    todo += [("default", default, b, FEW, "raw") for b in ("4.5", "5.0")]
    rows = []
    for space, candidates, budget, count, estimator in todo:
        choice = solve_weights(bench, candidates, budget, corrected_table(bench, count, estimator))
        assignment = assignment_of(bench.units, choice, bench.profile.calibration)
        name = recipe_name(space, budget, count, estimator)
        found = bench.measure(name, assignment)
        bits = weight_cost(bench.units, assignment.weights).effective
        rows.append(
            {"space": space, "budget": budget, "sequences": count, "estimator": estimator, "weighted": False, "bits": bits,
             "predicted": total_damage(choice), "measured": found["kl"], "stderr": found["stderr"], "perplexity": found["perplexity"],
             "against_nvfp4": found["kl"] / nvfp4}
        )  # fmt: skip
    importance = None
    for budget in ("4.5", "5.0"):
        choice = solve_weights(bench, default, budget, corrected_table(bench, most))
        importance = importance or input_importance(bench.model, bench.units, bench.texts[fit_text(bench.fitted)])
        assignment = replace(assignment_of(bench.units, choice, bench.profile.calibration), importance=importance)
        found = bench.measure(f"recipe default {budget} bits {most} steady, Fisher-weighted scales", assignment)
        rows.append(
            {"space": "default", "budget": budget, "sequences": most, "estimator": "steady", "weighted": True,
             "bits": weight_cost(bench.units, assignment.weights).effective, "predicted": total_damage(choice),
             "measured": found["kl"], "stderr": found["stderr"], "perplexity": found["perplexity"], "against_nvfp4": found["kl"] / nvfp4}
        )  # fmt: skip
    return rows


def kv_rows(bench: Bench) -> list[dict[str, Any]]:
    """K and V chosen freely per layer at 4.5 bits on average, beside uniform nvfp4."""
    nvfp4 = bench.measure("kv nvfp4", bench.caches_in("both", "nvfp4"))
    rows = [{"what": "uniform nvfp4", "bits": 4.5, "predicted": None, "measured": nvfp4["kl"], "stderr": nvfp4["stderr"]}]
    for budget in ("4.5", "5.0", "6.0"):
        space = load_space("default")
        choice = solve(
            make_problem(bench.units, space, Budgets(kv=parse_budget(budget), context=CONTEXT), corrected_table(bench, 32))
        )
        assignment = assignment_of(bench.units, choice, bench.profile.calibration)
        found = bench.measure(f"kv free choice {budget} bits", assignment)
        stored, values = kv_cost(bench.units, assignment.caches, CONTEXT)
        row = {"what": f"free choice at {budget}", "bits": stored / values, "predicted": total_damage(choice)}
        rows.append({**row, "measured": found["kl"], "stderr": found["stderr"]})
    return rows


def bars(
    bench: Bench, uniform: list[dict[str, Any]], recipes: list[dict[str, Any]], kv: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The figures that must hold, each with what was measured."""
    floor = bench.noise_floor()
    found: list[dict[str, Any]] = []

    def bar(what: str, measured: float, limit: float, error: float | None = None) -> None:
        found.append({"what": what, "measured": measured, "error": error, "limit": limit, "holds": measured <= limit})

    for kind, least in (("weight", 3.0), ("key", 4.0), ("value", 4.0)):
        rows = [r for r in uniform if r["kind"] == kind and r["bits"] >= least and max(r["predicted"], r["measured"]) > 2 * floor]
        for column, limit in (("plain_off", 0.30), ("corrected_off", 0.12)):
            worst = max(rows, key=lambda r: abs(r[column]))
            bar(f"{kind}: {column}, worst row ({worst['format']})", abs(worst[column]), limit)

    def one(space: str, budget: str, sequences: int) -> dict[str, Any]:
        return next(
            r for r in recipes
            if (r["space"], r["budget"], r["sequences"], r["estimator"], r["weighted"]) == (space, budget, sequences, "steady", False)
        )  # fmt: skip

    for space, budget, limit in (
        ("plain", "4.5", 0.92),
        ("plain", "5.0", 0.52),
        ("default", "4.5", 0.83),
        ("default", "5.0", 0.41),
    ):
        bar(f"{space} {budget} bits / uniform nvfp4, 32 sequences", one(space, budget, 32)["against_nvfp4"], limit)
    for budget in ("4.5", "5.0"):
        few, all_of_them = (bench.kept[f"test/{recipe_name('default', budget, n)}"] for n in (FEW, 32))
        measured, error = ratio(few["windows"], all_of_them["windows"])
        bar(f"default {budget} bits: {FEW} sequences / 32", measured, 1.04, error)
    for row in recipes:
        if row["sequences"] == 32 and row["estimator"] == "steady" and not row["weighted"]:
            limit = 0.30 if row["budget"] == "3.5" else 0.15
            bar(
                f"{row['space']} {row['budget']} bits: predicted against measured",
                abs(row["predicted"] / row["measured"] - 1),
                limit,
            )
    bar("KV free choice at 4.5 bits / uniform nvfp4", kv[1]["measured"] / kv[0]["measured"], 0.60)
    return found


def show(results: dict[str, Any]) -> None:
    console = Console(width=130)
    for title, rows in ((k, results[k]) for k in ("uniform", "recipes", "kv", "bars")):
        table = Table(title=title, box=None, title_justify="left")
        for name in rows[0]:
            table.add_column(name)
        for row in rows:
            table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--calib", required=True)
    parser.add_argument("--eval", required=True)
    parser.add_argument("--out", type=Path, default=Path("docs/results/quality.json"))
    parser.add_argument("--run", type=Path, default=Path(tempfile.gettempdir()) / "autoq-quality")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--correct", type=int, default=32)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    bench = Bench(args)
    recipes_first = bench.noise_floor()
    uniform = uniform_rows(bench, 32)
    measure_columns(bench)
    recipes, kv = recipe_rows(bench), kv_rows(bench)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    results = {
        "commit": commit, "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "text": [Path(args.calib).name, Path(args.eval).name], "noise_floor": recipes_first,
        "uniform": uniform, "recipes": recipes, "kv": kv, "bars": bars(bench, uniform, recipes, kv),
    }  # fmt: skip
    bench.save(results)
    show(results)


if __name__ == "__main__":
    main()
