"""Profile a model: load it, score every unit and candidate format, keep the samples in the run folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autoq import __version__
from autoq.api.plan import Plan, make_plan, refusals
from autoq.config import SearchConfig
from autoq.errors import AutoqError, UserError
from autoq.measure.damage import check_finite
from autoq.measure.profile import FILE, Fingerprint, Profile, existing, make_profile, model_fingerprint, text_fingerprint
from autoq.model import load
from autoq.model.text import STDLIB, own_bos, sequences, text_sources
from autoq.model.units import find_units
from autoq.process_memory import peak_bytes
from autoq.report.progress import Clock, Reporter, Silent
from autoq.run_folder import RunFolder, make_folder

if TYPE_CHECKING:
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


def profile(config: SearchConfig, reporter: Reporter | None = None) -> Profiled:
    """Score every unit and candidate format, or finish or reuse the profile in the run folder."""
    clock = Clock(reporter or Silent())
    with clock.stage("prepare", "reading the model's shapes"):
        plan = make_plan(config, budgets_needed=False)
    return profile_plan(plan, clock)


def profile_plan(plan: Plan, clock: Clock) -> Profiled:
    """Load the plan's model and text, and score what the profile in its run folder lacks."""
    config, say, run = plan.config, clock.reporter.say, plan.run
    say(plan.units.coverage())
    for reason in (*plan.notes, *refusals(plan)):
        say(reason)
    with clock.stage("load", "loading the model") as progress:
        tokenizer = load.load_tokenizer(plan.source)
        calib, measure = text_sources(config.calib, config.eval)
        limit = getattr(plan.model_config.get_text_config(decoder=True), "max_position_embeddings", None)
        ids = sequences(tokenizer, calib, config.samples, config.seq_len)
        eval_len = min(config.eval_len, limit or config.eval_len)
        eval_ids = sequences(tokenizer, measure, config.eval_samples, eval_len)
        trial_ids = None
        if config.needs_trial_text:
            profiled = ids.numel() - (len(ids) if own_bos(tokenizer) is not None else 0)
            trial_ids = sequences(tokenizer, calib, config.trial_samples, eval_len, skip=profiled)
        model = load.load_model(plan.source, config.device, config.dtype)
        units = plan.units
        if [u.name for u in find_units(model, config.include).weights] != [u.name for u in units.weights]:
            raise AutoqError("the loaded model has other layers than its config says")
        progress(1, 1)
    if kind := load.gguf_type(plan.source):
        say(f"warning: the weights of this GGUF are {kind} already; another format of as few bits may look better than it is")
    if int(ids.max()) >= loaded_vocabulary(model) or int(eval_ids.max()) >= loaded_vocabulary(model):
        raise UserError(
            f"the tokenizer of {config.model!r} makes token ids up to {int(max(ids.max(), eval_ids.max()))}, but the model's embedding "
            f"has {loaded_vocabulary(model)} rows: they do not belong together"
        )
    check_finite(model)
    known = "run folder" if (run.path / FILE).is_file() else "new run folder"
    say(f"computing in {load.dtype_name(config.dtype, config.device)} on {config.device}; {known} {run.path}")
    fingerprint = Fingerprint(
        model_fingerprint(model), text_fingerprint(ids), config.seed, len(ids), ids.shape[1],
        load.dtype_name(config.dtype, config.device), config.include,
    )  # fmt: skip
    existing(run.path, fingerprint)
    make_folder(run.path)
    run.describe(_description(plan))
    with clock.stage("profile", "profiling") as progress:
        profile = make_profile(model, units, plan.candidates, ids, fingerprint, run.path, config.profile_batch, progress, say)
    if peak := peak_bytes():
        held = sum(p.numel() * p.element_size() for p in model.parameters())
        say(f"peak memory of the process {peak / 2**30:.2f} GiB, of which the model is {held / 2**30:.2f} GiB")
    return Profiled(plan, model, ids, eval_ids, trial_ids, own_bos(tokenizer), profile, run, clock)


def loaded_vocabulary(model: PreTrainedModel) -> int:
    """Number of rows of the input embedding."""
    return int(model.get_input_embeddings().weight.shape[0])


def _description(plan: Plan) -> dict[str, Any]:
    config = plan.config
    return {
        "model": config.model,
        "space": config.space,
        "include": list(config.include),
        "context": plan.budgets.context,
        "calib": config.calib or STDLIB,
        "seed": config.seed,
        "samples": config.samples,
        "seq_len": config.seq_len,
        "eval": config.eval,
        "eval_samples": config.eval_samples,
        "eval_len": config.eval_len,
        "correct": config.correct,
        "weak": config.weak,
        "version": __version__,
    }
