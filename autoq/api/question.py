"""A study's question as a file of the run folder, from which any worker can ask it again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autoq.allocation.baselines import fair_uniforms
from autoq.allocation.engine import solve_for_engine
from autoq.allocation.problem import Limit, Problem
from autoq.allocation.solver import total_bits
from autoq.api.plan import Plan
from autoq.budget import Budget, Budgets
from autoq.config import SearchConfig
from autoq.errors import AutoqError, UserError
from autoq.formats.catalog import define, is_own, kv_format, weight_format
from autoq.measure.damage import Candidates
from autoq.measure.estimate import DamageTable
from autoq.measure.profile import Profile
from autoq.recipe_formats import FormatEntry, describe, format_of, kv_format_of
from autoq.run_folder import write_atomically
from autoq.trials.question import MOST_BITS, Choice, Question, Side, start_recipes

UNIFORM_STARTS = 2
NEARBY = (0.98, 0.95)  # of every limit
DIGITS = 9
CORNERS = 6  # of a front


@dataclass(frozen=True)
class QuestionFile:
    """What trials are about: the options of the search, the damage of every cell as corrected, the text, the model's fingerprint, and
    the budgets and formats as they were resolved.
    """

    config: SearchConfig
    table: DamageTable
    ids: torch.Tensor
    model: str
    dtype: str
    budgets: Budgets
    candidates: Candidates

    @property
    def fingerprint(self) -> str:
        """16 hex digits that differ where the trials would."""
        return hashlib.sha256(json.dumps(self._content(), sort_keys=True).encode()).hexdigest()[:16]

    def _content(self) -> dict[str, Any]:
        asked = ("target", "engine", "consumer", "include", "front")
        kinds = ("weights", "keys", "values")
        candidates = [f for kind in kinds for f in getattr(self.candidates, kind)]
        own = {f.name: describe(f).model_dump() for f in candidates if is_own(f)}
        return ({"own_formats": own} if own else {}) | {
            "budgets": asdict(self.budgets),
            "candidates": {kind: [f.name for f in getattr(self.candidates, kind)] for kind in kinds},
            "asked": {name: getattr(self.config, name) for name in asked},
            "table": {u: {f: float(f"{d:.{DIGITS}g}") for f, d in row.items()} for u, row in self.table.items()},
            "ids": self.ids.tolist(),
            "model": self.model,
            "dtype": self.dtype,
        }

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        config = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self.config).items() if k not in ("storage", "run")}
        write_atomically(path, json.dumps({"config": config, **self._content()}) + "\n")

    @staticmethod
    def read(path: Path) -> QuestionFile:
        """Read the file; raises UserError if it is missing or damaged."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            config = SearchConfig(**{**found["config"], "include": tuple(found["config"]["include"])})
            sides = {k: Budget(**found["budgets"][k]) if found["budgets"][k] else None for k in ("weights", "kv", "memory")}
            names, own = found["candidates"], {n: FormatEntry(**e) for n, e in found.get("own_formats", {}).items()}
            for name in own:
                define(format_of(name, own) if name in names["weights"] else kv_format_of(name, own))
            candidates = Candidates(
                tuple(map(weight_format, names["weights"])),
                tuple(map(kv_format, names["keys"])),
                tuple(map(kv_format, names["values"])),
            )
            return QuestionFile(
                config, found["table"], torch.tensor(found["ids"]), found["model"], found["dtype"],
                Budgets(**{**found["budgets"], **sides}), candidates,
            )  # fmt: skip
        except FileNotFoundError:
            raise UserError(
                f"{str(path.parent)!r} has no {path.name}: copy the run folder of the search that began the study"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{str(path)!r} cannot be read: {error}") from error


def question_path(run: Path, study: str) -> Path:
    """Return where the question of a study is kept."""
    return run / f"study-{study}.json"


def make_question(plan: Plan, table: DamageTable, profile: Profile) -> Question:
    """Return the question of a plan: its problem, what is traded off, and what to measure first."""
    problem = plan.problem(table)
    sides = tuple(Side(name, *side, is_traded=plan.config.front) for name, side in plan.sides().items())
    if plan.config.front:
        return Question(problem, plan.units, plan.engine, sides, corners=corners(plan, problem))
    uniforms = fair_uniforms(plan.units, plan.candidates, table, profile.calibration, plan.budgets, plan.engine, UNIFORM_STARTS)
    return Question(
        problem,
        plan.units,
        plan.engine,
        sides,
        start_recipes(problem, {u.name: u.formats for u in uniforms}, nearby(plan, problem)),
    )


def corners(plan: Plan, problem: Problem) -> tuple[dict[str, float], ...]:
    """Return the bits of each side of exact solutions along the front of everything that is searched together."""
    sides = plan.sides()
    units = frozenset().union(*(side for side, _ in sides.values()))
    values = sum(count for _, count in sides.values())
    floor = sum(min(o.bits for o in problem.options[u]) for u in units)
    most = min(MOST_BITS * values, sum(max(o.bits for o in problem.options[u]) for u in units))
    found = []
    for i in range(CORNERS):
        limit = Limit("front", units, int(floor + (most - floor) * ((i + 0.5) / CORNERS) ** 1.5))
        try:
            choice = solve_for_engine(replace(problem, limits=(*problem.limits, limit)), plan.units, plan.engine)
        except AutoqError:  # the engine or the other limits leave nothing there
            continue
        found.append(
            {f"{name}/bits": min(MOST_BITS, (total_bits(choice, side) + 0.5) / count) for name, (side, count) in sides.items()}
        )
    return tuple(found)


def nearby(plan: Plan, problem: Problem) -> dict[str, Choice]:
    """Return the exact solutions for a little less than each limit, where they exist."""
    found = {}
    for share in NEARBY:
        limits = tuple(Limit(limit.name, limit.units, int(limit.bits * share)) for limit in problem.limits)
        floors = {limit.name: sum(min(o.bits for o in problem.options[u]) for u in limit.units) for limit in limits}
        if all(limit.bits >= floors[limit.name] for limit in limits):
            try:
                found[f"{100 * share:.0f} % of the budget"] = solve_for_engine(
                    replace(problem, limits=limits), plan.units, plan.engine
                )
            except UserError:  # an engine's limits leave nothing there
                continue
    return found
