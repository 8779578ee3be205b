"""autoq beside the searches of ModelOpt and AutoRound: same model, text, formats and counted bytes, each measured in the peer's simulator.

    make consumers   # builds the environments
    python benchmarks/peers.py --model DIR --calib valid.txt --eval test.txt --environments .venv/consumers

Every search runs in a process of its own on the same sequences: 16 of 256 tokens. The peer searches first; what its recipe really stores,
counted by autoq over the same tensors, is autoq's budget. Both recipes are then applied and measured in the peer's own simulator.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from autoq.allocation.problem import make_problem
from autoq.allocation.solver import solve
from autoq.allocation.space import load_space
from autoq.api import export
from autoq.api.applying import recipe_assignment
from autoq.api.entries import provenance, recipe_of
from autoq.budget import Budget, Budgets
from autoq.cost.bits import weight_cost
from autoq.formats.catalog import KV_FORMATS, WEIGHT_FORMATS, weight_format
from autoq.measure.damage import Candidates
from autoq.measure.divergence import Yardstick
from autoq.measure.estimate import damage_table
from autoq.measure.profile import Fingerprint, model_fingerprint, text_fingerprint
from autoq.measure.profiling import make_profile
from autoq.model.load import load_model, load_tokenizer, model_source
from autoq.model.text import sequences, text_sources
from autoq.model.unit import ModelUnits, Unit
from autoq.model.units import find_units
from autoq.run_folder import write_atomically

HERE = Path(__file__).resolve().parent
DRIVERS = HERE.parent / "tests" / "consumers" / "drivers"
OUT = HERE.parent / "docs" / "results" / "peers.json"


def units_of(model: Any, is_tied: bool) -> ModelUnits:
    """Return the model's units; with every matrix on its own, as AutoScheme searches, where they are not tied."""
    units = find_units(model)
    if is_tied:
        return units
    free = [Unit(t.name, "weight", u.role, u.layer, (t,)) for u in units.weights for t in u.tensors]
    return replace(units, units=(*free, *units.caches))


def search(job: dict[str, Any]) -> dict[str, Any]:
    """Search with autoq: one pass, then the exact solution; the clock starts when the model and the text are there."""
    model = load_model(model_source(job["model"]), "cpu", "float32")
    units, ids = units_of(model, job["tied"]), torch.tensor(job["ids"])
    names = job["formats"] or [f.name for f in load_space("default").weights]
    candidates = Candidates(tuple(weight_format(n) for n in names), (), ())
    with tempfile.TemporaryDirectory() as folder:
        start, cpu = time.perf_counter(), time.process_time()
        made = Fingerprint(model_fingerprint(model), text_fingerprint(ids), 0, len(ids), ids.shape[1], "float32", ())
        profile = make_profile(model, units, candidates, ids, made, Path(folder))
        budgets = Budgets(Budget("the peer's bytes", job["bytes"], "bytes"))
        choice = solve(make_problem(units, candidates, budgets, damage_table(profile, units)))
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    formats = {t.name: choice[u.name].format for u in units.weights for t in u.tensors}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"formats": formats, "seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": peak}


class Contest:
    """The model, the texts, and the processes that searches and simulators run in."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.folder = Path(tempfile.mkdtemp(prefix="autoq-peers-"))
        self.model = load_model(model_source(args.model), "cpu", "float32")
        self.tied, self.free = units_of(self.model, True), units_of(self.model, False)
        calib, measure = text_sources(args.calib, args.eval)
        tokenizer = load_tokenizer(model_source(args.model))
        self.ids = sequences(tokenizer, calib, args.samples, 256)
        self.peer_ids = sequences(tokenizer, calib, args.peer_samples or args.samples, 256)
        self.eval_ids = sequences(tokenizer, measure, args.windows, 256)
        self.yardstick = Yardstick(self.model, self.tied, self.eval_ids)
        self.count = 0

    def run(self, python: str, script: Path, job: dict[str, Any]) -> dict[str, Any]:
        """Run a script on a job in a process of its own, and return its result."""
        self.count += 1
        given, taken = self.folder / f"job-{self.count}.json", self.folder / f"result-{self.count}.json"
        given.write_text(json.dumps(job))
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": str(self.args.threads),
            "HF_HUB_OFFLINE": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
        }
        done = subprocess.run(
            [python, str(script), str(given), str(taken)], env=environ, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{script.name} failed:\n{done.stderr[-4000:]}")
        found: dict[str, Any] = json.loads(taken.read_text())
        return found

    def peer(self, environment: str, script: str, **job: Any) -> dict[str, Any]:
        python = str(self.args.environments / environment / "bin" / "python")
        return self.run(python, HERE / script, {"model": self.args.model, "ids": self.peer_ids.tolist(), **job})

    def autoq(self, formats: list[str] | None, size: int, is_tied: bool) -> dict[str, Any]:
        job = {"model": self.args.model, "ids": self.ids.tolist(), "formats": formats, "bytes": size, "tied": is_tied}
        return self.run(sys.executable, Path(__file__), job)

    def cost(self, formats: dict[str, str]) -> tuple[int, float]:
        """Return (bytes of all weights, bits per searched weight), counted by autoq."""
        assignment = {t.name: WEIGHT_FORMATS[formats.get(t.name, "bf16")] for u in self.tied.weights for t in u.tensors}
        cost = weight_cost(self.free, assignment)
        return -(-cost.whole_bits // 8), cost.effective

    def simulated(self, environment: str, consumer: str, driver: str, formats: dict[str, str], units: ModelUnits) -> list[float]:
        """Apply a recipe in the peer's own simulator, through autoq's export of it; return the KL by window."""
        weights = {u.name: WEIGHT_FORMATS[formats.get(u.tensors[0].name, "bf16")] for u in units.weights}
        document = self._document(consumer, weights, units)
        python = str(self.args.environments / environment / "bin" / "python")
        job = {
            "model": self.args.model, "recipe": str(document), "ids": self.eval_ids.tolist(), "calibration": self.ids[:1].tolist(),
            "weights": str(self.folder / "weights.safetensors"), "runs": True,
        }  # fmt: skip
        found: list[float] = self.run(python, DRIVERS / f"run_{driver}.py", job)["kl"]
        return found

    def _document(self, consumer: str, weights: dict[str, Any], units: ModelUnits) -> Path:
        """Write the recipe as the consumer takes it. Free units are no recipe of autoq's: they are written without one."""
        self.count += 1
        if units is self.tied:
            caches = {u.name: KV_FORMATS["bf16"] for u in units.caches}
            made = provenance(0, "peers", self.args.calib, 0, 0, "float32", "cpu")
            recipe = recipe_of(self.args.model, self.model, units, weights, caches, {}, made, 1024)
            return export(recipe, consumer, out=self.folder / f"export-{self.count}").files[0]
        from autoq.exporters.consumers import consumer_of
        from autoq.exporters.subject import bare_subject

        files = consumer_of(consumer).write(bare_subject(self.model, units, self.args.model).with_formats(weights, {}))
        path = self.folder / f"document-{self.count}.json"
        path.write_text(next(iter(files.values())))
        return path

    def measured(self, formats: dict[str, str]) -> list[float]:
        """Measure a recipe of formats that the peer does not have, in autoq."""
        choice = {u.name: formats.get(u.tensors[0].name, "bf16") for u in self.tied.weights}
        weights = {name: WEIGHT_FORMATS[fmt] for name, fmt in choice.items()}
        made = provenance(0, "peers", self.args.calib, 0, 0, "float32", "cpu")
        caches = {u.name: KV_FORMATS["bf16"] for u in self.tied.caches}
        recipe = recipe_of(self.args.model, self.model, self.tied, weights, caches, {}, made, 1024)
        found: list[float] = self.yardstick.measure(recipe_assignment(recipe, self.tied)).kl.mean(1).tolist()
        return found


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def row(contest: Contest, who: str, found: dict[str, Any], kl: list[float], where: str) -> dict[str, Any]:
    size, bits = contest.cost(found["formats"])
    return {
        "search": who, "bits": bits, "own_bits": found.get("own_bits"), "bytes": size, "kl": mean(kl), "simulator": where,
        "seconds": found["seconds"], "cpu_seconds": found["cpu_seconds"], "peak_bytes": found["peak_bytes"], "windows": kl,
        "formats": {name: list(found["formats"].values()).count(name) for name in sorted(set(found["formats"].values()))},
    }  # fmt: skip


Part = dict[str, Any]


def beside_modelopt(contest: Contest) -> Part:
    """ModelOpt's searches, autoq's under the same bytes, and the bars."""
    args, rows = contest.args, Rows(contest)

    def simulated(found: dict[str, Any]) -> list[float]:
        return contest.simulated("modelopt", "modelopt", "modelopt", found["formats"], contest.tied)

    gradient = contest.peer("modelopt", "peer_modelopt.py", bits=args.bits, method="gradient")
    theirs = rows.add("ModelOpt auto_quantize, gradient", gradient, simulated(gradient), "ModelOpt")
    mine = contest.autoq(["int4_g64", "int8"], theirs["bytes"], True)
    same = rows.add("autoq, the same two formats", mine, simulated(mine), "ModelOpt")
    own = rows.add("ModelOpt auto_quantize, gradient", gradient, contest.measured(gradient["formats"]), "autoq")
    every = contest.autoq(None, theirs["bytes"], True)
    best = rows.add("autoq, all its weight formats", every, contest.measured(every["formats"]), "autoq")
    if args.kl_div:
        job = {"bits": args.bits, "method": "kl_div", "score_sequences": args.kl_div, "batch": 1}
        divergence = contest.peer("modelopt", "peer_modelopt.py", **job)
        rows.add(f"ModelOpt auto_quantize, kl_div, {args.kl_div} sequences", divergence, simulated(divergence), "ModelOpt")
    return rows.part(
        bar("KL / ModelOpt's, same formats and bytes", same["kl"] / theirs["kl"], 1.03),
        bar("search time / ModelOpt's", same["seconds"] / theirs["seconds"], 1 / 3),
        bar("KL / ModelOpt's, all of autoq's formats", best["kl"] / own["kl"], 0.65),
    )


def beside_auto_round(contest: Contest) -> Part:
    """AutoScheme with every matrix free, autoq's search of free and of tied matrices under the same bytes, and the bars."""
    args, rows = contest.args, Rows(contest)

    def simulated(found: dict[str, Any], units: ModelUnits) -> list[float]:
        return contest.simulated("auto-round", "auto-round", "auto_round", found["formats"], units)

    settings = (True,) if args.one_way else (True, False)
    ways = [contest.peer("auto-round", "peer_auto_scheme.py", bits=args.bits, low_gpu=low) for low in settings]
    scheme = min(ways, key=lambda found: found["seconds"])  # the peer at its best
    renamed = {"int4_g64": "int4_g64_full", "int8": "int8_full"}
    scheme["formats"] = {n: renamed.get(f, f) for n, f in scheme["formats"].items()}
    auto = rows.add("AutoRound AutoScheme, matrices free", scheme, simulated(scheme, contest.free), "AutoRound")
    free = contest.autoq(["int4_g64_full", "int8_full"], auto["bytes"], False)
    loose = rows.add("autoq, the same two formats, matrices free", free, simulated(free, contest.free), "AutoRound")
    tied = contest.autoq(["int4_g64_full", "int8_full"], auto["bytes"], True)
    rows.add("autoq, the same two formats, q/k/v and gate/up tied", tied, simulated(tied, contest.tied), "AutoRound")
    return rows.part(
        bar("KL / AutoScheme's, same formats and bytes", loose["kl"] / auto["kl"], 0.90),
        bar("search time / AutoScheme's", loose["seconds"] / auto["seconds"], 1 / 3),
    )


PEERS = {"modelopt": beside_modelopt, "auto-round": beside_auto_round}


class Rows:
    """The searches of one part, printed as they come."""

    def __init__(self, contest: Contest) -> None:
        self.contest = contest
        self.rows: list[dict[str, Any]] = []

    def add(self, who: str, found: dict[str, Any], kl: list[float], where: str) -> dict[str, Any]:
        self.rows.append(row(self.contest, who, found, kl, where))
        print({k: v for k, v in self.rows[-1].items() if k != "windows"}, flush=True)
        return self.rows[-1]

    def part(self, *bars: dict[str, Any]) -> Part:
        args = self.contest.args
        return {
            "commit": commit(), "machine": f"{platform.machine()}, {args.threads} threads, torch {torch.__version__}",
            "text": [Path(args.calib).name, Path(args.eval).name], "samples": len(self.contest.ids),
            "peer_samples": len(self.contest.peer_ids), "windows": args.windows, "asked_bits": args.bits, "rows": self.rows, "bars": list(bars),
        }  # fmt: skip


def bar(what: str, measured: float, limit: float) -> dict[str, Any]:
    return {"what": what, "measured": measured, "limit": limit, "holds": measured <= limit}


def commit() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()


def show(results: dict[str, Part]) -> None:
    console = Console(width=150)
    table = Table(box=None)
    names = ("search", "bits", "own_bits", "kl", "simulator", "seconds", "cpu_seconds")
    for name in names:
        table.add_column(name)
    for part in results.values():
        for one in part["rows"]:
            table.add_row(*(f"{one[n]:.4g}" if isinstance(one[n], float) else str(one[n]) for n in names))
    console.print(table)
    for part in results.values():
        for one in part["bars"]:
            console.print(f"{'holds ' if one['holds'] else 'MISSED'} {one['what']}: {one['measured']:.3f} (bar {one['limit']:.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--calib", required=True)
    parser.add_argument("--eval", required=True)
    parser.add_argument("--environments", type=Path, default=Path(".venv/consumers"))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument(
        "--peers", nargs="+", choices=list(PEERS), default=list(PEERS), help="what is known of the others stays in --out"
    )
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--peer-samples", type=int, help="sequences for the peers; default: as many as autoq's")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--bits", type=float, default=4.9, help="what the peers are asked for, as they count")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--kl-div", type=int, default=2, help="sequences that ModelOpt's kl_div is given (240 passes over each); 0 leaves it out"
    )
    parser.add_argument("--one-way", action="store_true", help="run AutoScheme block by block only, not also by one backward pass")
    args = parser.parse_args()
    args.environments = args.environments.resolve()
    args.model = str(Path(args.model).resolve())
    contest = Contest(args)
    results: dict[str, Part] = json.loads(args.out.read_text()) if args.out.is_file() else {}
    for name in args.peers:
        results[name] = PEERS[name](contest)
        write_atomically(args.out, json.dumps(results, indent=1) + "\n")
    show(results)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].endswith(".json"):  # a search of autoq's, in its own process
        Path(sys.argv[2]).write_text(json.dumps(search(json.loads(Path(sys.argv[1]).read_text()))))
    else:
        main()
