"""Do measured trials improve on the exact solution, and does measuring weak spots? On a real model; prints tables and writes a JSON file.

    python benchmarks/trials.py --model DIR --calib valid.txt --eval test.txt --out docs/results/trials.json

For each budget the prediction is corrected as `autoq search` does, a study of 60 trials runs on text of its own (profile, trials and test
share no text), and the exact solution and the best trial of the first 20 and of all 60 are measured on the test text: chosen on the trials' text
alone. Everything is kept as soon as it is measured; a stopped run goes on where it was.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from bench import Bench, arguments, corrected_table, fit_text, provenance, show

from autoq.allocation.baselines import fair_uniforms
from autoq.allocation.problem import Option, make_problem, recipe_hash
from autoq.allocation.solver import solve, total_bits, total_damage
from autoq.allocation.space import load_space
from autoq.allocation.weak_spots import WeakSpots, measure_weak_spots
from autoq.api import assignment_of
from autoq.api.trialling import question_choice
from autoq.budget import Budgets, parse_budget
from autoq.cost.engines import engine_of
from autoq.measure.damage import Candidates
from autoq.measure.divergence import Yardstick
from autoq.measure.estimate import DamageTable, damage_table
from autoq.model.load import load_tokenizer, model_source
from autoq.model.quantized import Assignment, DecodedWeights
from autoq.model.text import sequences, text_sources
from autoq.model.unit import Unit
from autoq.trials.objective import Objective, paired
from autoq.trials.question import Question, Side, start_recipes
from autoq.trials.storage import open_storage
from autoq.trials.study import finished, open_study, queue_trials, work

BUDGETS = ("3.0", "3.5", "4.0", "4.5", "5.0")
COUNTS = (20, 60)
WINDOWS, LENGTH = 16, 256  # of the trials' text, as by default
WEAK = 128


def candidates() -> Candidates:
    return Candidates(load_space("default").weights, (), ())


def prices(bench: Bench, budget: str) -> tuple[DamageTable, DamageTable, WeakSpots]:
    """Return damage with columns corrected, the same with weak spots measured, and what was measured for it."""
    columns, plain = corrected_table(bench, len(bench.ids)), damage_table(bench.profile, bench.units)
    first = damage_table(bench.profile.first(bench.fitted), bench.units)
    space = candidates()

    def measure(unit: Unit, fmt: str) -> float:
        form = next(f for f in space.weights if f.name == fmt)
        alone = Assignment({unit.name: form}, {}, bench.profile.calibration)
        hardness = sum(plain[u.name][fmt] for u in bench.units.weights) / sum(first[u.name][fmt] for u in bench.units.weights)
        return bench.measure(f"cell {unit.name} {fmt}", alone, fit_text(bench.fitted))["kl"] * hardness

    def solved(table: DamageTable) -> dict[str, Option]:
        return solve(make_problem(bench.units, space, Budgets(parse_budget(budget)), table))

    def measure_recipe(choice: Any) -> float:
        name = f"recipe {recipe_hash(choice)}"
        return bench.measure(name, assignment_of(bench.units, choice, bench.profile.calibration), fit_text(bench.fitted))["kl"]

    found = measure_weak_spots(columns, plain, bench.units, solved, measure, measure_recipe, WEAK)
    weak = {unit: {**row, **found.cells.get(unit, {})} for unit, row in columns.items()}
    return columns, weak, found


def weak_rows(bench: Bench) -> list[dict[str, Any]]:
    """Recipes from uncorrected, column-corrected and weak-spot-corrected damage, measured on the test text."""
    rows = []
    for budget in ("2.8", "3.0", "3.5"):
        columns, weak, spots = prices(bench, budget)
        cells = sum(map(len, spots.measured.values()))
        tables = {
            "prediction alone": damage_table(bench.profile, bench.units),
            "columns corrected": columns,
            "weak spots measured": weak,
        }
        for name, table in tables.items():
            problem = make_problem(bench.units, candidates(), Budgets(parse_budget(budget)), table)
            choice = solve(problem)
            found = bench.measure(f"{name} {budget}", assignment_of(bench.units, choice, bench.profile.calibration))
            rows.append(
                {"budget": budget, "damage": name, "cells_measured": cells if name.startswith("weak") else 0, "company": spots.company if name.startswith("weak") else None, "predicted": total_damage(choice),
                 "measured": found["kl"], "stderr": found["stderr"], **less(found, bench.kept[f"test/columns corrected {budget}"] if name.startswith("weak") else None)}
            )  # fmt: skip
    return rows


def less(found: dict[str, Any], than: dict[str, Any] | None) -> dict[str, float | None]:
    """Return the mean difference of two measurements, paired by window, with its error."""
    if than is None:
        return {"less_than_columns": None, "error": None}
    pairs = [a - b for a, b in zip(found["windows"], than["windows"], strict=True)]
    mean = sum(pairs) / len(pairs)
    error = (sum((p - mean) ** 2 for p in pairs) / (len(pairs) - 1) / len(pairs)) ** 0.5
    return {"less_than_columns": mean, "error": error}


def print_trial(budget: str, trial: Any) -> None:
    print(f"{budget} bits, trial {trial.number}: {trial.values[0]:.5f}", flush=True)


def trial_rows(bench: Bench, args: Any) -> list[dict[str, Any]]:
    """One row for each budget: the exact solution, and the best of 20 and of 60 trials, on the test text."""
    space, engine = candidates(), engine_of("none")
    tokenizer = load_tokenizer(model_source(args.model))
    text = sequences(tokenizer, text_sources(args.calib, args.eval)[0], WINDOWS, LENGTH, skip=bench.ids.numel())
    yardstick = Yardstick(bench.model, bench.units, text)
    decoded = DecodedWeights.beside(bench.model)
    weights = frozenset(u.name for u in bench.units.weights)
    rows = []
    for budget in args.budgets.split(","):
        budgets = Budgets(parse_budget(budget))
        _, table, _ = prices(bench, budget)
        problem = make_problem(bench.units, space, budgets, table)
        uniforms = fair_uniforms(bench.units, space, table, bench.profile.calibration, budgets, engine, 2)
        starts = start_recipes(problem, {u.name: u.formats for u in uniforms}, {})
        question = Question(problem, bench.units, engine, (Side("weights", weights, bench.units.searched),), starts)

        def measure(choice: dict[str, Option], order: Any) -> Any:
            return yardstick.windows(assignment_of(bench.units, choice, bench.profile.calibration), decoded, order)

        study = open_study(open_storage(None, args.run), f"trials-{budget}", question, budget, args.sampler, 0, {})
        queue_trials(study, question, max(COUNTS))
        start = time.time()
        work(study, Objective(question, measure, len(yardstick.hidden)), after=partial(print_trial, budget))
        print(f"{budget}: {time.time() - start:.0f} s", flush=True)
        trials = sorted(finished(study), key=lambda t: t.number)
        zero = trials[0]
        solution = bench.measure(f"solution {budget}", assignment_of(bench.units, solve(problem), bench.profile.calibration))
        row: dict[str, Any] = {"budget": budget, "solution": solution["kl"], "stderr": solution["stderr"]}
        for count in COUNTS:
            whole = [t for t in trials[:count] if "stopped_after" not in t.user_attrs]
            best = min(whole, key=lambda t: (t.values[0], t.number))
            choice = question_choice(question, best)
            name = f"solution {budget}" if best is zero else f"trial {best.number} {budget}"
            found = bench.measure(name, assignment_of(bench.units, choice, bench.profile.calibration))
            difference = less(found, solution)
            seconds = sum((t.datetime_complete - t.datetime_start).total_seconds() for t in trials[:count])
            on_trials = paired(best, zero) if best is not zero else (0.0, 0.0)
            row |= {
                f"best_of_{count}": best.number, f"kl_{count}": found["kl"], f"less_{count}": difference["less_than_columns"],
                f"less_error_{count}": difference["error"], f"less_on_trials_{count}": on_trials[0], f"seconds_{count}": seconds,
                f"bits_{count}": total_bits(choice, weights) / bench.units.searched,
            }  # fmt: skip
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = arguments(__doc__, "docs/results/trials.json", 32, 8)
    parser.add_argument("--budgets", default=",".join(BUDGETS))
    parser.add_argument("--sampler", default="tpe")
    args = parser.parse_args()
    bench = Bench(args)
    for fmt in candidates().weights:
        bench.measure(f"weight {fmt.name}", bench.weights_in(fmt.name), fit_text(bench.fitted))
    results: dict[str, Any] = {**provenance(args), "sampler": args.sampler, "trial_windows": [WINDOWS, LENGTH]}
    results["weak_spots"] = weak_rows(bench)
    bench.save(results)
    results["trials"] = trial_rows(bench, args)
    bench.save(results)
    show(results, ("weak_spots", "trials"))


if __name__ == "__main__":
    main()
