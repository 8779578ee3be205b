"""Cache formats on a real model: what each costs for keys and for values, mixed under a budget, and at longer contexts.

    python benchmarks/kv.py --model DIR --calib valid.txt --eval test.txt --out docs/results/kv.json

Prints tables and writes a JSON file. Measurements are kept in it, so that a stopped run goes on.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from bench import CONTEXT, Bench, arguments, bar, corrected_table, fit_text, provenance, show

from autoq.allocation.problem import make_problem
from autoq.allocation.solver import solve, total_damage
from autoq.allocation.space import load_space
from autoq.api import assignment_of
from autoq.budget import Budgets, parse_budget
from autoq.cost.kv_memory import kv_cost
from autoq.formats.catalog import kv_format
from autoq.measure.damage import Candidates
from autoq.measure.divergence import Yardstick
from autoq.model.load import load_tokenizer, model_source
from autoq.model.quantized import Assignment
from autoq.model.text import sequences, text_sources

BUDGETS = ("4.0", "4.5", "5.0", "6.0")
LENGTHS = (256, 1024, 4096)
TOKENS = 8192  # measured at every length
GROWING = ("nvfp4", "int4_channel")
RESIDUAL = ("int2_channel", "int2_token")  # keys, values


def columns(bench: Bench, space: Candidates) -> list[dict[str, Any]]:
    """Every candidate for all keys, and for all values: predicted, corrected on the profile's text, measured on the test text."""
    for kind, formats in (("key", space.keys), ("value", space.values)):
        for fmt in formats:
            bench.measure(f"{kind} {fmt.name}", bench.caches_in(kind, fmt.name), fit_text(bench.fitted))
    table = corrected_table(bench, len(bench.ids))
    rows = []
    for kind, formats in (("key", space.keys), ("value", space.values)):
        units = [u for u in bench.units.caches if u.kind == kind]
        for fmt in formats:
            found = bench.measure(f"{kind} {fmt.name}", bench.caches_in(kind, fmt.name))
            stored, values = kv_cost(replace(bench.units, units=tuple(units)), {u.name: fmt for u in units}, CONTEXT)
            rows.append(
                {"kind": kind, "format": fmt.name, "bits": stored / values, "predicted": sum(table[u.name][fmt.name] for u in units),
                 "measured": found["kl"], "stderr": found["stderr"]}
            )  # fmt: skip
    return rows


def mixed(bench: Bench, space: Candidates) -> list[dict[str, Any]]:
    """Formats chosen freely, K apart from V, layer by layer, beside uniform nvfp4."""
    nvfp4 = bench.measure("kv nvfp4", bench.caches_in("both", "nvfp4"))
    rows = [
        {"what": "uniform nvfp4", "bits": 4.5, "predicted": None, "measured": nvfp4["kl"], "stderr": nvfp4["stderr"], "formats": ""}
    ]
    table = corrected_table(bench, len(bench.ids))
    for budget in BUDGETS:
        choice = solve(make_problem(bench.units, space, Budgets(kv=parse_budget(budget), context=CONTEXT), table))
        assignment = assignment_of(bench.units, choice, bench.profile.calibration)
        found = bench.measure(f"kv mixed {budget} bits", assignment)
        stored, values = kv_cost(bench.units, assignment.caches, CONTEXT)
        names = [choice[u.name].format for u in bench.units.caches]
        counts = ", ".join(f"{names.count(n)} {n}" for n in sorted(set(names), key=lambda n: -names.count(n)))
        rows.append(
            {"what": f"mixed {budget}", "bits": stored / values, "predicted": total_damage(choice), "measured": found["kl"],
             "stderr": found["stderr"], "formats": counts}
        )  # fmt: skip
    return rows


def residual(bench: Bench) -> list[dict[str, Any]]:
    """Two bits for keys by channel and values by token, without and with the newest 128 tokens in 16 bit."""
    rows = []
    for option in ("", "+residual128"):
        caches = {u.name: kv_format(RESIDUAL[u.kind == "value"] + option) for u in bench.units.caches}
        found = bench.measure(f"kv 2 bits{option}", Assignment({}, caches, bench.profile.calibration))
        stored, values = kv_cost(bench.units, caches, CONTEXT)
        rows.append({"what": f"2 bits{option}", "bits": stored / values, "measured": found["kl"], "stderr": found["stderr"]})
    return rows


def contexts(bench: Bench, args: Any) -> list[dict[str, Any]]:
    """The same formats for all keys and values, measured in windows of different lengths over the same number of tokens."""
    tokenizer = load_tokenizer(model_source(args.model))
    _, text = text_sources(args.calib, args.eval)
    rows = []
    for length in LENGTHS:
        yardstick = None
        for name in GROWING:
            key = f"{length} tokens/kv {name}"
            if key not in bench.kept:
                start = time.time()
                if yardstick is None:
                    ids = sequences(tokenizer, text, TOKENS // length, length)
                    yardstick = Yardstick(bench.model, bench.units, ids, batch=1)
                found = yardstick.measure(bench.caches_in("both", name))
                bench.kept[key] = {
                    "kl": found.mean_kl,
                    "stderr": found.stderr,
                    "second_half": float(found.kl[:, length // 2 :].mean()),
                }
                bench.save({})
                print(f"{key}: {found.mean_kl:.5f} ± {found.stderr:.5f}  ({time.time() - start:.0f} s)", flush=True)
            kept = bench.kept[key]
            rows.append(
                {
                    "length": length,
                    "format": name,
                    "measured": kept["kl"],
                    "stderr": kept["stderr"],
                    "second half": kept["second_half"],
                }
            )
    return rows


def main() -> None:
    args = arguments(__doc__, "docs/results/kv.json", samples=32, correct=16).parse_args()
    bench, space = Bench(args), load_space("default")
    results: dict[str, Any] = {"columns": columns(bench, space), "mixed": mixed(bench, space), "residual": residual(bench)}
    results["contexts"] = contexts(bench, args)
    results["bars"] = [
        bar("mixed at 4.5 bits / uniform nvfp4", results["mixed"][2]["measured"] / results["mixed"][0]["measured"], 0.5)
    ]
    bench.save({**provenance(args), "noise_floor": bench.noise_floor(), **results})
    show(results, tuple(results))


if __name__ == "__main__":
    main()
