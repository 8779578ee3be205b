"""The fronts of a finished profile, without reading any weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoq.api.plan import searchable
from autoq.budget import Budgets, parse_budget
from autoq.config import SearchConfig
from autoq.cost.kv_memory import cache_values, context_of
from autoq.errors import UserError
from autoq.measure.estimate import correction_factors, damage_table
from autoq.measure.profile import Profile
from autoq.model import load
from autoq.model.units import find_units
from autoq.run_folder import RunFolder
from autoq.search.front import FrontPoint, sweep
from autoq.search.problem import make_problem
from autoq.search.space import load_space


@dataclass(frozen=True)
class FrontResult:
    """The fronts of a run, weights and caches apart."""

    run: Path
    weights: tuple[FrontPoint, ...]
    kv: tuple[FrontPoint, ...]

    def to_json(self) -> dict[str, Any]:
        return {"run": str(self.run), "weights": [point_json(p) for p in self.weights], "kv": [point_json(p) for p in self.kv]}


def point_json(point: FrontPoint) -> dict[str, Any]:
    """Return a point of a front as the commands' --json print it."""
    return {"bits": point.bits, "predicted_kl": point.predicted_kl, "formats": point.formats}


def front(run: Path, budgets: Sequence[float] | None = None) -> FrontResult:
    """Return the predicted fronts of a finished profile; no model weights are read."""
    folder = RunFolder(run)
    description = folder.description()
    profile = Profile.load(run)
    if not profile.complete:
        raise UserError(
            f"the profile in {str(run)!r} has {profile.done} of {profile.fingerprint.sequences} sequences: finish it with --resume"
        )
    try:
        model, space = str(description["model"]), description["space"]
        if not isinstance(space, str):
            raise TypeError(f"space {space!r}")
        config = SearchConfig(model=model, space=space, include=tuple(description["include"]))
        context = int(description["context"])
        if context < 1:
            raise ValueError(f"context {context}")
        context_of(load.load_config(load.model_source(config.model)).get_text_config(decoder=True), context)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the run.json in {str(run)!r} lacks or garbles {error}: search or profile there again") from error
    empty = load.empty_model(load.load_config(load.model_source(config.model)))
    units, candidates, _ = searchable(find_units(empty, config.include), empty, load_space(config.space), kv_wanted=False)
    measured_on = max((found.sequences for found in profile.uniform_kl.values()), default=0)
    factors = correction_factors(profile, units, measured_on) if measured_on else {}
    table = damage_table(profile, units, factors=factors)
    everything = parse_budget("16bits")
    kv = everything if candidates.keys and candidates.values else None
    problem = make_problem(units, candidates, Budgets(everything if candidates.weights else None, kv, None, context), table)
    asked = list(budgets) if budgets else [2 + 0.25 * i for i in range(29)]
    sides = []
    for members, values in ((units.weights, units.searched), (units.caches, sum(cache_values(u, context) for u in units.caches))):
        sides.append(tuple(sweep(problem, frozenset(u.name for u in members), values, asked)) if members else ())
    if not sides[0] and not sides[1]:
        raise UserError(f"no budget of {', '.join(f'{b:g}' for b in asked)} bits can be met with this space: ask for more bits")
    return FrontResult(run, sides[0], sides[1])
