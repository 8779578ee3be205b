"""One budget for weights and cache against dividing it by hand, on a real model; prints tables and writes a JSON file.

    python benchmarks/joint.py --model DIR --calib valid.txt --eval test.txt --out docs/results/joint.json

The total is a share of weights and cache in 16 bit, at 8,192 cached tokens. The same bytes are spent in five ways:
jointly; the same bits for both; weights first (the exact recipe at that many bits), the rest on one cache format for all
layers; one cache format first (the one of no more bits with the least damage), the rest on weights; nvfp4 for the cache, the
rest on weights. Every recipe is measured on the same text. Measurements are kept in the JSON file, so that a stopped run goes on.
"""

from __future__ import annotations

from typing import Any

from bench import CONTEXT, Bench, arguments, bar, corrected_table, fit_text, provenance, ratio, show

from autoq.allocation.problem import Option, make_problem
from autoq.allocation.solver import solve, total_damage
from autoq.allocation.space import load_space
from autoq.api import assignment_of
from autoq.budget import Budget, Budgets, parse_budget
from autoq.cost.bits import weight_cost
from autoq.cost.kv_memory import cache_bits, kv_cost
from autoq.measure.damage import Candidates
from autoq.measure.estimate import DamageTable

SHARES = (4.5, 5.5)  # sixteenths of everything in 16 bit


def measure_columns(bench: Bench, space: Candidates) -> None:
    """Measure every candidate uniformly on the profile's text, as `autoq search` does."""
    text = fit_text(bench.fitted)
    for fmt in space.weights:
        bench.measure(f"weight {fmt.name}", bench.weights_in(fmt.name), text)
    for kind, formats in (("key", space.keys), ("value", space.values)):
        for kv in formats:
            bench.measure(f"{kind} {kv.name}", bench.caches_in(kind, kv.name), text)


def ways(bench: Bench, space: Candidates, table: DamageTable, share: float) -> dict[str, dict[str, Option]]:
    """Return the ways to spend a share of the memory."""
    units = bench.units
    searched, caches = 16 * units.searched, kv_cost(units, {}, CONTEXT)[0]
    bits = int(share / 16 * (searched + caches))
    other = 16 * (units.parameters - units.searched)

    def weights_within(most: int) -> dict[str, Option]:
        budgets = Budgets(Budget("the rest", (most + other) / 8, "bytes"), None, None, CONTEXT)
        return {u: o for u, o in solve(make_problem(units, space, budgets, table)).items() if u in {w.name for w in units.weights}}

    def in_one(name: str) -> dict[str, Option]:
        by_name = {f.name: f for f in (*space.keys, *space.values)}
        return {u.name: Option(name, cache_bits(u, by_name[name], CONTEXT), table[u.name][name]) for u in units.caches}

    def stored(choice: dict[str, Option]) -> int:
        return sum(o.bits for o in choice.values())

    def best_in_one(most: int) -> dict[str, Option]:
        both = [f.name for f in space.keys if f in space.values]
        return min((c for c in map(in_one, both) if stored(c) <= most), key=total_damage)

    total = Budgets(None, None, Budget("all", (bits + other) / 8, "bytes"), CONTEXT)
    equal = Budgets(parse_budget(f"{share}bits"), parse_budget(f"{share}bits"), None, CONTEXT)
    first = weights_within(int((share + 0.001) / 16 * searched))
    uniform = best_in_one(int((share + 0.001) / 16 * caches))
    nvfp4 = in_one("nvfp4")
    return {
        "joint": solve(make_problem(units, space, total, table)),
        "equal bits": solve(make_problem(units, space, equal, table)),
        "weights first": {**first, **best_in_one(bits - stored(first))},
        "cache first": {**uniform, **weights_within(bits - stored(uniform))},
        "nvfp4 cache": {**nvfp4, **weights_within(bits - stored(nvfp4))},
    }


def main() -> None:
    args = arguments(__doc__, "docs/results/joint.json", samples=32, correct=16).parse_args()
    bench, space = Bench(args), load_space("default")
    measure_columns(bench, space)
    table = corrected_table(bench, args.samples)
    rows: list[dict[str, Any]] = []
    bars: list[dict[str, Any]] = []
    for share in SHARES:
        windows = {}
        for name, choice in ways(bench, space, table, share).items():
            assignment = assignment_of(bench.units, choice, bench.profile.calibration)
            found = bench.measure(f"{name} {share}/16", assignment)
            windows[name] = found["windows"]
            stored, values = kv_cost(bench.units, assignment.caches, CONTEXT)
            cost = weight_cost(bench.units, assignment.weights)
            rows.append(
                {"share": share, "way": name, "bits": cost.effective, "kv_bits": stored / values,
                 "MB": (cost.searched_bits + stored) / 8e6, "predicted": total_damage(choice), "measured": found["kl"], "stderr": found["stderr"]}
            )  # fmt: skip
        for name, limit in (("equal bits", 0.95), ("nvfp4 cache", 0.80), ("weights first", 1.0), ("cache first", 1.0)):
            measured, error = ratio(windows["joint"], windows[name])
            bars.append(bar(f"{share}/16: joint / {name}", measured, limit, error))
    bench.save({**provenance(args), "noise_floor": bench.noise_floor(), "joint": rows, "bars": bars})
    show({"joint": rows, "bars": bars}, ("joint", "bars"))


if __name__ == "__main__":
    main()
