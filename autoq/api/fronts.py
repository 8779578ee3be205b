"""The fronts of a finished profile: damage against memory, predicted without reading any weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoq.allocation.engine import solve_for_engine
from autoq.allocation.exchange import Solver
from autoq.allocation.front import FrontPoint, TotalPoint, knees, sweep, sweep_total
from autoq.allocation.problem import make_problem
from autoq.allocation.solver import solve
from autoq.api.plan import make_plan
from autoq.budget import Budgets, parse_budget
from autoq.config import SearchConfig
from autoq.cost.engines import engine_of
from autoq.cost.kv_memory import cache_values, context_of
from autoq.cost.targets import target_of
from autoq.display.html import front_html
from autoq.errors import UserError
from autoq.exporters.consumers import consumer_of
from autoq.measure.damage import Candidates
from autoq.measure.estimate import DamageTable, Predictor, correction_factors
from autoq.measure.profile import Profile
from autoq.model import load
from autoq.model.given import Given
from autoq.model.text import GIVEN, STDLIB
from autoq.model.unit import ModelUnits
from autoq.recipe import read_recipe
from autoq.run_folder import RECIPE, RunFolder

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from autoq.api.trialling import TrialsReport


@dataclass(frozen=True)
class MeasuredPoint:
    """A recipe of the front that was measured on the untouched text.

    Attributes:
        label: "weights 4bits", "cache 4.5bits", "trial 7".
        bits: per searched weight.
        kv_bits: per cached value.
        total_bytes: of all weights and the cache.
        predicted_kl: nats per token.
        measured_kl: nats per token.
        stderr: of measured_kl, over windows.
        recipe: its file, or None.
    """

    label: str
    bits: float
    kv_bits: float
    total_bytes: int
    predicted_kl: float
    measured_kl: float
    stderr: float
    recipe: Path | None = None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "recipe": None if self.recipe is None else str(self.recipe)}


@dataclass(frozen=True, repr=False)
class FrontResult:
    """The fronts of a run: weights and caches apart, and both together in bytes; and what of them was measured.

    Attributes:
        run: the run folder.
        weights: the least predicted damage by bits per weight.
        kv: the same by bits per cached value.
        total: the same by bytes of both together.
        context: tokens at which the cache is counted.
        measured: points that were measured, by bytes.
        trials: of a study with several objectives, or None.
        notes: what to know of the prediction, in words.
        chosen: bits per weight and per cached value of the run's recipe, or None.
    """

    run: Path
    weights: tuple[FrontPoint, ...]
    kv: tuple[FrontPoint, ...]
    total: tuple[TotalPoint, ...] = ()
    context: int = 0
    measured: tuple[MeasuredPoint, ...] = ()
    trials: TrialsReport | None = None
    notes: tuple[str, ...] = ()
    chosen: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "run": str(self.run),
            "context": self.context,
            "weights": [{**point_json(p), "is_knee": i in bits_knees(self.weights)} for i, p in enumerate(self.weights)],
            "kv": [{**point_json(p), "is_knee": i in bits_knees(self.kv)} for i, p in enumerate(self.kv)],
            "total": [{**asdict(p), "is_knee": i in total_knees(self.total)} for i, p in enumerate(self.total)],
            "measured": [{**p.to_json(), "is_knee": i in measured_knees(self.measured)} for i, p in enumerate(self.measured)],
            "trials": None if self.trials is None else self.trials.to_json(),
            "notes": list(self.notes),
        }

    def plot(self) -> Figure:
        """Return damage against bits, with its error band and what was measured."""
        from autoq.display import plots

        return plots.front(self)

    def __repr__(self) -> str:
        from autoq.display.fronts import fronts
        from autoq.display.text import as_text

        return as_text(fronts(self))

    def _repr_html_(self) -> str:
        return front_html(self)


def bits_knees(points: Sequence[FrontPoint]) -> list[int]:
    """Return the indices of the knees of one side's front."""
    return knees([p.bits for p in points], [p.predicted_kl for p in points])


def total_knees(points: Sequence[TotalPoint]) -> list[int]:
    """Return the indices of the knees of the front in bytes."""
    return knees([p.total_bytes for p in points], [p.predicted_kl for p in points])


def measured_knees(points: Sequence[MeasuredPoint]) -> list[int]:
    """Return the indices of the knees of what was measured, which is ordered by bytes."""
    return knees([p.total_bytes for p in points], [p.measured_kl for p in points])


def point_json(point: FrontPoint) -> dict[str, Any]:
    """Return a point of a front as the commands' --json print it."""
    return {
        "bits": point.bits, "bytes": point.bytes, "predicted_kl": point.predicted_kl, "predicted_kl_stderr": finite(point.stderr),
        "formats": point.formats,
    }  # fmt: skip


def finite(value: float | None) -> float | None:
    """Return a number that JSON has, or None."""
    return value if value is not None and math.isfinite(value) else None


def described(run: Path, given: Given | None = None) -> SearchConfig:
    """Return the options behind a run folder's profile; raises UserError if its run.json is damaged.

    Args:
        given: with the model, where it is in memory already.
    """
    description = RunFolder(run).description()
    try:
        model, space, include = description["model"], description["space"], description["include"]
        context = int(description["context"])
        limits = {name: description[name] for name in ("engine", "consumer", "target") if name in description}
        for name, value in (("model", model), ("space", space), *limits.items()):
            if not isinstance(value, str):
                raise TypeError(f"{name} {value!r}")
        if not isinstance(include, list):
            raise TypeError(f"include {include!r}")
        if context < 1:
            raise ValueError(f"context {context}")
        if given is None or given.model is None:
            context_of(load.load_config(load.model_source(model)).get_text_config(decoder=True), context)
        return _checked(run, model=model, space=space, include=tuple(include), context=context, **limits)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the run.json in {str(run)!r} lacks or garbles {error}: search or profile there again") from error


def _checked(run: Path, **options: Any) -> SearchConfig:
    try:
        engine_of(options.get("engine", SearchConfig.engine))
        target_of(options.get("target", SearchConfig.target))
        if options.get("consumer", SearchConfig.consumer) != SearchConfig.consumer:
            consumer_of(options["consumer"])
        return SearchConfig(**options)
    except UserError as error:
        raise UserError(f"the run.json in {str(run)!r} is garbled ({error}): search or profile there again") from error


def front(run: Path, budgets: Sequence[float] | None = None) -> FrontResult:
    """Return the predicted fronts of a finished profile; no model weights are read.

    Weak cells (below 3 bits) are priced as predicted here; `measure_front` and a search measure them.

    Args:
        budgets: bits per value to solve each side at.
    """
    config, profile = described(run), Profile.load(run)
    assert config.context is not None
    if not profile.complete:
        raise UserError(
            f"the profile in {str(run)!r} has {profile.done} of {profile.fingerprint.sequences} sequences: finish it with --resume"
        )
    plan = make_plan(replace(config, run=run, resume=True), budgets_needed=False)
    units = plan.units
    measured_on = max((found.sequences for found in profile.uniform_kl.values()), default=0)
    factors = correction_factors(profile, units, measured_on) if measured_on else {}
    predictor = Predictor(profile, units, factors=factors)
    found = predicted_fronts(
        run, units, plan.candidates, predictor.whole, config.context, budgets, plan.budgets.batch,
        lambda problem: solve_for_engine(problem, units, plan.engine), predictor.error,
    )  # fmt: skip
    return replace(found, notes=_uncorrected(found, factors, config), chosen=_chosen(run))


def _uncorrected(front: FrontResult, factors: Mapping[str, float], config: SearchConfig) -> tuple[str, ...]:
    """Say which side's formats are predicted alone: no search has measured them uniformly in this run."""
    kinds = {key.split("/")[0] for key in factors}
    sides = (("weights", "--budget 4.5bits", "weight", front.weights), ("cache", "--kv-budget 6bits", "key", front.kv))
    again = _options(front.run, config)
    notes = []
    for name, option, kind, points in sides:
        if points and kind not in kinds:
            how = f": `autoq search {again} {option}` does that" if again else ""
            notes.append(f"no uniform format was measured to correct the prediction of the {name}{how}")
    return tuple(notes)


def _options(run: Path, config: SearchConfig) -> str:
    """Return the options of a search that goes on in a run folder, or "" where its text was given in memory."""
    found = RunFolder(run).description()
    try:
        its = replace(
            config, samples=int(found["samples"]), seq_len=int(found["seq_len"]), seed=int(found["seed"]),
            calib=None if found["calib"] == STDLIB else str(found["calib"]), eval=found["eval"],
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, UserError):
        return ""
    if GIVEN in (its.calib, its.eval):
        return ""
    limits = [
        f"--{name} {getattr(config, name)}"
        for name in ("engine", "consumer", "target")
        if getattr(config, name) != getattr(SearchConfig, name)
    ]
    return " ".join([its.options(), f"--run {run}", *limits]).strip()


def _chosen(run: Path) -> tuple[float, float] | None:
    try:
        totals = read_recipe(run / RECIPE).totals
    except UserError:  # none yet
        return None
    return totals.bits, totals.kv_bits


def predicted_fronts(
    run: Path, units: ModelUnits, candidates: Candidates, table: DamageTable, context: int, budgets: Sequence[float] | None = None,
    batch: int = 1, solver: Solver = solve, error: Callable[[dict[str, str]], float] | None = None,
) -> FrontResult:  # fmt: skip
    """Return the fronts of damage over bits of the weights, bits of the cache, and bytes of both.

    Args:
        context, batch: tokens and sequences that the cache is counted for. solver: keeps an engine's limits. error: tells the standard error of a predicted choice.
    """
    everything = parse_budget("16bits")
    kv = everything if candidates.keys and candidates.values else None
    problem = make_problem(units, candidates, Budgets(everything if candidates.weights else None, kv, None, context, batch), table)
    asked = [float(b) for b in budgets] if budgets is not None and len(budgets) else [2 + 0.25 * i for i in range(29)]
    if wrong := [b for b in asked if not 0 < b <= 1000]:
        raise UserError(f"a budget of {wrong[0]:g} bits per value is none: give numbers such as 4.5, above 0 and at most 1000")
    weights = frozenset(u.name for u in units.weights), units.searched
    caches = frozenset(u.name for u in units.caches), sum(cache_values(u, context, batch) for u in units.caches)
    sides = [
        tuple(sweep(problem, names, values, asked, by, error)) if names else ()
        for (names, values), by in ((weights, solve), (caches, solver))
    ]
    if not sides[0] and not sides[1]:
        raise UserError(f"no budget of {', '.join(f'{b:g}' for b in asked)} bits can be met with this space: ask for more bits")
    total: tuple[TotalPoint, ...] = ()
    if weights[0] and caches[0] and kv is not None and candidates.weights:
        values = weights[1] + caches[1]
        total = tuple(
            sweep_total(
                problem, weights, caches, 16 * (units.parameters - units.searched), [int(b * values) for b in asked], solver
            )
        )
    return FrontResult(run, sides[0], sides[1], total, context)
