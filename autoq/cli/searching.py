"""Commands that make a recipe: search, worker, profile, front."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoq.cli.app import app
from autoq.cli.completion import CONSUMERS, ENGINES, TARGETS, among, runs
from autoq.cli.options import (
    TRIALS,
    Calib,
    Debug,
    Device,
    Dtype,
    Eval,
    Include,
    Json,
    Model,
    ProfileBatch,
    Resume,
    Run,
    Sampler,
    Samples,
    Seed,
    SeqLen,
    Space,
    Storage,
    Timeout,
    Trials,
    TrialSamples,
)
from autoq.cli.output import fail, newest, print_json, printed, reporter, stdout
from autoq.config import SIDES, SearchConfig
from autoq.errors import UserError

if TYPE_CHECKING:
    from autoq.api import FrontResult

D = SearchConfig()


@app.command(
    epilog="Examples:\n\n"
    "autoq search --budget 4.5bits\n\n"
    "autoq search --model HuggingFaceTB/SmolLM2-135M --budget 60MiB --calib my.txt\n\n"
    "autoq search --model model.gguf --budget 5bits --kv-budget 6bits\n\n"
    "autoq search --model my-folder --memory 24GiB --context 32k --batch 4 --engine vllm\n\n"
    "autoq search --model my-folder --max-kl 0.05   (the smallest recipe within a damage)\n\n"
    "autoq search --model my-folder --front --sides both --trials 60 --sampler nsga3   (the measured front)\n\n"
    "autoq search --model my-folder --budget 3bits --trials 60 --workers 4 --timeout 2h\n\n"
    "autoq search --run runs/demo --budget 5bits --json   (the same profile, another budget)"
)
def search(
    context_: typer.Context,
    model: Model = D.model,
    budget: Annotated[
        str | None,
        typer.Option(
            help="For the weights: 4.5bits (or 4.5) per searched weight, 60MiB or 35% for all weights.", show_default=False
        ),
    ] = None,
    kv_budget: Annotated[
        str | None,
        typer.Option(
            help="For the KV cache: 6bits per cached value, or 2GiB for --batch sequences of --context.", show_default=False
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="For all weights and the cache together: 24GiB. Finds the split that costs least.", show_default=False),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences for which the cache is priced.")] = D.batch,
    target: Annotated[
        str,
        typer.Option(
            help="Leave out formats this device cannot run: any, cpu, a100, l40s, h100, h200, b200, rtx4090, rtx5090.",
            autocompletion=among(TARGETS),
        ),
    ] = D.target,
    engine: Annotated[
        str,
        typer.Option(
            help="Mix cache formats as this engine can: none, transformers, vllm, sglang, tensorrt-llm, llama.cpp.",
            autocompletion=among(ENGINES),
        ),
    ] = D.engine,
    consumer: Annotated[
        str,
        typer.Option(
            help=f"Only formats and rounding that this tool computes, so that `autoq export --to` it loses nothing: none, {', '.join(CONSUMERS)}.",
            autocompletion=among(("none", *CONSUMERS)),
        ),
    ] = D.consumer,
    space: Space = D.space,
    calib: Calib = None,
    eval_: Eval = None,
    samples: Samples = D.samples,
    seq_len: SeqLen = D.seq_len,
    eval_samples: Annotated[int, typer.Option(help="Windows to measure on.")] = D.eval_samples,
    eval_len: Annotated[int, typer.Option(help="Tokens of a window (capped by the model's maximum).")] = D.eval_len,
    context: Annotated[
        str | None,
        typer.Option(
            help="Tokens at which the cache is priced: 8192, 32k. Default: 8k or the model's maximum.", show_default=False
        ),
    ] = None,
    correct: Annotated[
        int, typer.Option(help="Profiled sequences on which uniform formats are measured to correct the prediction; 0: leave out.")
    ] = D.correct,
    weak: Annotated[
        int,
        typer.Option(help="Cells outside the trusted range (below 3 bits) to measure alone when they are wanted; 0: leave out."),
    ] = D.weak,
    max_kl: Annotated[
        float | None,
        typer.Option(help="Instead of a budget: the smallest recipe that costs no more nats per token.", show_default=False),
    ] = None,
    front_: Annotated[
        bool, typer.Option("--front", help="Instead of one recipe: damage against memory; with --trials it is measured.")
    ] = False,
    sides: Annotated[
        str,
        typer.Option(
            help="What --max-kl and --front make smaller without a budget: weights, cache, both.", autocompletion=among(SIDES)
        ),
    ] = D.sides,
    trials: Trials = D.trials,
    sampler: Sampler = D.sampler,
    trial_samples: TrialSamples = D.trial_samples,
    workers: Annotated[
        int, typer.Option(help="Processes on the trials; with several GPUs each takes its own.", rich_help_panel=TRIALS)
    ] = D.workers,
    storage: Storage = None,
    study: Annotated[
        str | None,
        typer.Option(help="Name of the study. Default: made from what is asked.", show_default=False, rich_help_panel=TRIALS),
    ] = None,
    timeout: Timeout = None,
    validate: Annotated[
        int,
        typer.Option(
            help="Then pack so many units with the kernels and measure on packed bytes, as `autoq validate` does; 0: leave out."
        ),
    ] = D.validate,
    run: Run = None,
    resume: Resume = False,
    include: Include = None,
    seed: Seed = D.seed,
    device: Device = D.device,
    dtype: Dtype = D.dtype,
    profile_batch: ProfileBatch = D.profile_batch,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find the recipe that costs the least quality within a budget, and measure it."""
    from autoq.budget import parse_duration, parse_size

    config = SearchConfig(
        model=model, budget=budget, kv_budget=kv_budget, memory=memory, batch=batch, target=target, engine=engine, consumer=consumer, space=space, calib=calib, eval=eval_, samples=samples, seq_len=seq_len,
        eval_samples=eval_samples, eval_len=eval_len, context=None if context is None else parse_size(context), correct=correct, validate=validate, run=run,
        resume=resume, include=tuple(include or ()), seed=seed, device=device, dtype=dtype, profile_batch=profile_batch,
        weak=weak, max_kl=max_kl, front=front_, sides=sides, trials=trials, sampler=sampler, trial_samples=trial_samples, workers=workers,
        storage=storage if trials or _is_typed(context_, "storage") else None, study=study, timeout=None if timeout is None else parse_duration(timeout),
    )  # fmt: skip
    progress = reporter()
    if config.validate:
        import autoq.kernels.launch  # noqa: F401  without a GPU this turns Triton's interpreter on, before anything imports triton
    from autoq import api

    if config.front:
        _print_front(api.search_front(config, progress), as_json)
        return
    result = api.search(config, progress)
    data = result.to_json()
    if as_json:
        print_json(data)
    else:
        from autoq.display.terminal import search_result

        printed(search_result(result, api.show(result.recipe)["units"]))
    fail(result.validation.problems if result.validation else ())


@app.command(
    epilog="Examples:\n\n"
    "autoq worker --run runs/mine --study demo-1a2b3c4d   (a journal in a shared folder)\n\n"
    "autoq worker --run copy-of-run --study demo-1a2b3c4d --storage postgresql://user@host/trials --device cuda:1"
)
def worker(
    run: Annotated[
        Path, typer.Option("--run", help="The run folder of the search that began the study, or a copy.", autocompletion=runs)
    ],
    study: Annotated[str, typer.Option(help="Name of the study; `autoq search --trials` prints it.")],
    storage: Storage = None,
    model: Annotated[
        str | None, typer.Option(help="Where the model is on this machine. Default: as there.", show_default=False)
    ] = None,
    device: Device = D.device,
    timeout: Timeout = None,
    processes: Annotated[int, typer.Option(help="Workers that share this machine's memory.")] = 1,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure trials of a search that runs elsewhere, until there are none left."""
    from autoq.budget import parse_duration

    limit = None if timeout is None else parse_duration(timeout)
    if processes < 1:
        raise UserError(f"--processes is {processes}, but must be at least 1")
    progress = reporter()
    from autoq import api

    done = api.worker(run, study, storage, model, device, limit, processes, progress)
    if as_json:
        print_json(done.to_json())
    else:
        stdout().print(f"{len(done.trials)} trials measured in {done.seconds:.0f} s")


@app.command(
    epilog="Examples:\n\nautoq profile --run runs/mine\n\nautoq profile --model my-folder --samples 64 --calib my.txt --run runs/mine\n\n"
    "autoq profile --run runs/mine --resume   (after a kill)"
)
def profile(
    model: Model = D.model,
    space: Space = D.space,
    calib: Calib = None,
    eval_: Eval = None,
    samples: Samples = D.samples,
    seq_len: SeqLen = D.seq_len,
    run: Run = None,
    resume: Resume = False,
    include: Include = None,
    seed: Seed = D.seed,
    device: Device = D.device,
    dtype: Dtype = D.dtype,
    profile_batch: ProfileBatch = D.profile_batch,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Score what every format would cost every unit; any budget can be searched from the result."""
    config = SearchConfig(
        model=model, space=space, calib=calib, eval=eval_, samples=samples, seq_len=seq_len, run=run, resume=resume,
        include=tuple(include or ()), seed=seed, device=device, dtype=dtype, profile_batch=profile_batch,
    )  # fmt: skip
    progress = reporter()
    from autoq import api

    done = api.profile(config, progress)
    facts = done.to_json()
    if as_json:
        print_json(facts)
        return
    out = stdout()
    out.print(
        f"{facts['units']} units x {len(facts['formats'])} formats on {facts['sequences']} sequences of {facts['tokens']} tokens, in {facts['run']}"
    )
    budget = "--budget 4.5bits" if done.plan.candidates.weights else "--kv-budget 6bits"
    out.print(" ".join(f"next: autoq search {config.options()} --run {facts['run']} {budget}".split()), soft_wrap=True)


@app.command(
    epilog="Examples:\n\nautoq front\n\nautoq front runs/mine\n\nautoq front runs/mine --budgets 3,3.5,4,4.5 --json\n\nautoq front runs/mine --measure 3.5,4.5 --measure-kv 4"
)
def front(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="A run folder with a finished profile. Default: the newest run.", show_default=False, autocompletion=runs
        ),
    ] = None,
    budgets: Annotated[
        str | None, typer.Option(help="Bits to solve at, separated by commas. Default: 2 to 9 in quarters.", show_default=False)
    ] = None,
    measure: Annotated[
        str | None, typer.Option(help="Bits per weight at which to measure the recipe too: 3.5,4.5.", show_default=False)
    ] = None,
    measure_kv: Annotated[str | None, typer.Option(help="The same for bits per cached value.", show_default=False)] = None,
    eval_: Eval = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print the least predicted damage at every budget, from a finished profile; measure it where asked."""
    asked, weights, caches = (
        _bits(text, option) for text, option in ((budgets, "--budgets"), (measure, "--measure"), (measure_kv, "--measure-kv"))
    )
    from autoq import api

    folder = newest(api.find_profile(None)) if run is None else run
    if weights or caches:
        result = api.measure_front(folder, asked, weights or [], caches or [], eval_, reporter())
    elif eval_ is not None:
        raise UserError("--eval is the text to measure on: say where with --measure or --measure-kv")
    else:
        result = api.front(folder, asked)
    _print_front(result, as_json)


def _is_typed(context: typer.Context, option: str) -> bool:
    """Return True if an option comes from the command line, not from the environment."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def _bits(text: str | None, option: str) -> list[float] | None:
    """Read bits per value separated by commas."""
    if text is None:
        return None
    from autoq.budget import parse_budget

    parsed = [parse_budget(b, option) for b in text.split(",")]
    if wrong := next((b for b in parsed if b.unit != "bits"), None):
        raise UserError(f"{option} {wrong.text!r}: the front is drawn over bits, such as 3,3.5,4")
    return [b.value for b in parsed]


def _print_front(result: FrontResult, as_json: bool) -> None:
    if as_json:
        print_json(result.to_json())
    else:
        from autoq.display.fronts import fronts

        printed(fronts(result))
