"""Profile a model: load it, score every unit and candidate format, keep the samples in the run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autoq import __version__
from autoq.api.plan import Plan, make_plan, refusals
from autoq.config import SearchConfig
from autoq.display.damage_map import DamageMap
from autoq.display.html import profile_html
from autoq.display.progress import Clock, Reporter, Silent
from autoq.errors import AutoqError, UserError
from autoq.formats.catalog import is_own
from autoq.formats.format import Format, KVFormat
from autoq.measure.damage import check_finite
from autoq.measure.estimate import DamageTable, damage_table
from autoq.measure.profile import FILE, Fingerprint, Profile, model_fingerprint, text_fingerprint
from autoq.measure.profiling import existing, make_profile
from autoq.model import load
from autoq.model.given import Given, borrowed
from autoq.model.text import GIVEN, STDLIB, own_bos, sequences, text_sources
from autoq.model.units import find_units
from autoq.process_memory import peak_bytes
from autoq.recipe_formats import describe
from autoq.run_folder import RunFolder, make_folder

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Profiled:
    """A loaded model with its profile.

    Attributes:
        ids, eval_ids: [sequences, tokens] to profile and to measure on; trial_ids: for trials, text that neither sees, or None.
        bos: the token each sequence starts with, or None.
    """

    plan: Plan
    model: PreTrainedModel
    ids: torch.Tensor
    eval_ids: torch.Tensor
    trial_ids: torch.Tensor | None
    bos: int | None
    profile: Profile
    run: RunFolder
    clock: Clock


@dataclass(frozen=True, repr=False)
class ProfileResult:
    """What every format costs every unit, in nats of KL per token; any budget can be searched from it.

    Attributes:
        plan: the model's units, the candidate formats, the options.
        profile: the samples behind the damage.
        run: the folder that holds it: `search(run=...)` goes on from there.
        seconds: by stage.
    """

    plan: Plan
    profile: Profile
    run: Path
    seconds: dict[str, float]

    @property
    def damage(self) -> DamageTable:
        """Unit -> format -> predicted damage in nats per token, not corrected yet."""
        return damage_table(self.profile, self.plan.units)

    @property
    def damage_map(self) -> DamageMap:
        """The same with each unit's role and layer, for tables and plots."""
        return DamageMap(tuple((u.name, u.role, u.layer) for u in self.plan.units.units), self.damage)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `autoq profile --json` prints."""
        return {
            "run": str(self.run), "model": self.plan.config.model, "sequences": self.profile.done,
            "tokens": self.profile.fingerprint.tokens, "units": len(self.plan.units.units),
            "formats": sorted({f for by_format in self.profile.samples.values() for f in by_format}),
            "coverage": self.plan.units.coverage(), "heavy_sequences": self.profile.heavy_sequences(), "seconds": self.seconds,
        }  # fmt: skip

    def plot(self) -> Figure:
        """Return the damage as a heat map by layer and role, one format at a time."""
        from autoq.display import plots

        return plots.sensitivity(self)

    def __repr__(self) -> str:
        facts = self.to_json()
        return f"<ProfileResult of {facts['model']}: {facts['units']} units x {len(facts['formats'])} formats, {facts['sequences']} sequences, in {self.run}>"

    def _repr_html_(self) -> str:
        return profile_html(self.damage_map, self.to_json())


def profile(config: SearchConfig, reporter: Reporter | None = None, given: Given | None = None) -> ProfileResult:
    """Score every unit and candidate format, or finish or reuse the profile in the run folder.

    Args:
        given: what is in memory already; a given model is as before afterwards.
    """
    clock, given = Clock(reporter or Silent()), given or Given()
    with borrowed(given.model):
        with clock.stage("prepare", "reading the model's shapes"):
            plan = make_plan(config, budgets_needed=False, given=given)
        done = profile_plan(plan, clock)
    return ProfileResult(plan, done.profile, done.run.path, clock.seconds)


def profile_plan(plan: Plan, clock: Clock) -> Profiled:
    """Load the plan's model and text, and score what the profile in its run folder lacks."""
    config, say, run = plan.config, clock.reporter.say, plan.run
    say(plan.units.coverage())
    for reason in (*plan.notes, *refusals(plan)):
        say(reason)
    with clock.stage("load", "loading the model") as progress:
        texts = read_texts(plan)
        ids, eval_ids = texts.ids, texts.eval_ids
        model = plan.given.load_model(plan.source, config.device, config.dtype)
        units = plan.units
        if [u.name for u in find_units(model, config.include).weights] != [u.name for u in units.weights]:
            raise AutoqError("the loaded model has other layers than its config says")
        progress(1, 1)
    if kind := load.gguf_type(plan.source):
        say(f"warning: the weights of this GGUF are {kind} already; another format of as few bits may look better than it is")
    largest, rows = int(max(ids.max(), eval_ids.max())), loaded_vocabulary(model)
    if largest >= rows:
        raise UserError(
            f"{texts.origin} has token ids up to {largest}, but the model's embedding has {rows} rows: they do not belong together"
        )
    check_finite(model)
    known = "run folder" if (run.path / FILE).is_file() else "new run folder"
    say(f"computing in {load.dtype_name(config.dtype, config.device)} on {config.device}; {known} {run.path}")
    fingerprint = Fingerprint(
        model_fingerprint(model), text_fingerprint(ids), config.seed, len(ids), ids.shape[1],
        load.dtype_name(config.dtype, config.device), config.include,
    )  # fmt: skip
    existing(run.path, fingerprint)
    _check_own_formats(plan)
    make_folder(run.path)
    run.describe(_description(plan))
    with clock.stage("profile", "profiling") as progress:
        profile = make_profile(model, units, plan.candidates, ids, fingerprint, run.path, config.profile_batch, progress, say)
    if peak := peak_bytes():
        held = sum(p.numel() * p.element_size() for p in model.parameters())
        say(f"peak memory of the process {peak / 2**30:.2f} GiB, of which the model is {held / 2**30:.2f} GiB")
    return Profiled(plan, model, ids, eval_ids, texts.trial_ids, texts.bos, profile, run, clock)


@dataclass(frozen=True)
class Texts:
    """Token ids [sequences, tokens] to profile, to measure on and for trials (or None); the BOS they start with; where ids come from."""

    ids: torch.Tensor
    eval_ids: torch.Tensor
    trial_ids: torch.Tensor | None
    bos: int | None
    origin: str


def read_texts(plan: Plan) -> Texts:
    """Tokenize the plan's text, or take the ids that the caller gave."""
    config, given, limit = plan.config, plan.given, plan.limit
    if given.ids is not None:
        eval_ids = given.ids if given.eval_ids is None else given.eval_ids
        for ids in (given.ids, eval_ids):
            if limit and ids.shape[1] > limit:
                raise UserError(f"the batches are of {ids.shape[1]} tokens, beyond this model's maximum of {limit}")
        return Texts(given.ids, eval_ids, given.trial_ids, None, "the given batch")
    tokenizer = given.load_tokenizer(plan.source)
    calib, measure = text_sources(config.calib, config.eval)
    bos = own_bos(tokenizer)
    ids = sequences(tokenizer, calib, config.samples, config.seq_len)
    eval_len, trial_ids = min(config.eval_len, limit or config.eval_len), None
    eval_ids = sequences(tokenizer, measure, config.eval_samples, eval_len) if given.eval_ids is None else given.eval_ids
    if config.needs_trial_text:
        profiled = ids.numel() - (len(ids) if bos is not None else 0)
        trial_ids = sequences(tokenizer, calib, config.trial_samples, eval_len, skip=profiled)
    return Texts(ids, eval_ids, trial_ids, bos, f"the tokenizer of {config.model!r}")


def loaded_vocabulary(model: PreTrainedModel) -> int:
    """Number of rows of the input embedding."""
    return int(model.get_input_embeddings().weight.shape[0])


def profile_text(plan: Plan) -> str:
    """Name the text that is profiled."""
    return GIVEN if plan.given.ids is not None else plan.config.calib or STDLIB


def measure_text(plan: Plan) -> str:
    """Name the text that recipes are measured on."""
    if plan.given.eval_ids is not None:
        return GIVEN
    return plan.config.eval or profile_text(plan)


def _own_formats(plan: Plan) -> dict[str, Any]:
    """Return the formats that the search space defines itself, written out."""
    candidates: list[Format | KVFormat] = [*plan.candidates.weights, *plan.candidates.keys, *plan.candidates.values]
    return {f"{type(f).__name__}/{f.name}": describe(f).model_dump() for f in candidates if is_own(f)}


def _check_own_formats(plan: Plan) -> None:
    """Raise UserError where a name stood for another format when the run folder's profile was made."""
    if not (plan.run.path / FILE).is_file():
        return
    try:
        known = plan.run.description().get("own_formats") or {}
    except UserError:  # a profile without run.json
        return
    for name, entry in _own_formats(plan).items():
        if known.get(name, entry) != entry:
            raise UserError(
                f"the profile in {str(plan.run.path)!r} knows another format {name.split('/')[1]!r}: give yours another name, or choose another --run"
            )


def _description(plan: Plan) -> dict[str, Any]:
    config = plan.config
    return {
        "model": config.model,
        "space": config.space,
        "include": list(config.include),
        "context": plan.budgets.context,
        "calib": profile_text(plan),
        "seed": config.seed,
        "samples": config.samples,
        "seq_len": config.seq_len,
        "eval": GIVEN if plan.given.eval_ids is not None else config.eval,
        "eval_samples": config.eval_samples,
        "eval_len": config.eval_len,
        "correct": config.correct,
        "weak": config.weak,
        "version": __version__,
        "engine": config.engine,
        "consumer": config.consumer,
        "target": config.target,
        "own_formats": _own_formats(plan),
    }
