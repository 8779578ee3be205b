"""The command line: parses, calls the api, prints. Words and progress go to stderr, results to stdout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from autoq import __version__
from autoq.cli_options import (
    Batch,
    Calib,
    Debug,
    Device,
    Dtype,
    Eval,
    Include,
    Json,
    Model,
    Resume,
    Run,
    Samples,
    Seed,
    SeqLen,
    Space,
)
from autoq.cli_output import complain, fail, print_json, reporter, stdout
from autoq.config import SearchConfig
from autoq.errors import AutoqError, UserError

D = SearchConfig()
INTERRUPTED = 130
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Search the number format of every weight, key and value of a language model under a memory budget.",
    epilog="Start with [bold]autoq search --budget 4.5bits[/bold]: it runs on the bundled demo model.",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"autoq {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Search the number format of every weight, key and value of a language model under a memory budget."""


@app.command(
    epilog="Examples:\n\n"
    "autoq search --budget 4.5bits\n\n"
    "autoq search --model HuggingFaceTB/SmolLM2-135M --budget 60MiB --calib my.txt\n\n"
    "autoq search --model model.gguf --budget 5bits --kv-budget 6bits\n\n"
    "autoq search --run runs/demo --budget 5bits --json   (the same profile, another budget)"
)
def search(
    model: Model = D.model,
    budget: Annotated[
        str | None,
        typer.Option(
            help="For the weights: 4.5bits (or 4.5) per searched weight, 60MiB or 35% for all weights.", show_default=False
        ),
    ] = None,
    kv_budget: Annotated[str | None, typer.Option(help="For the KV cache: 6bits per cached value.", show_default=False)] = None,
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
    batch: Batch = D.batch,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find the recipe that costs the least quality within a budget, and measure it."""
    from autoq.budget import parse_size

    config = SearchConfig(
        model=model, budget=budget, kv_budget=kv_budget, space=space, calib=calib, eval=eval_, samples=samples, seq_len=seq_len,
        eval_samples=eval_samples, eval_len=eval_len, context=None if context is None else parse_size(context), correct=correct, validate=validate, run=run,
        resume=resume, include=tuple(include or ()), seed=seed, device=device, dtype=dtype, batch=batch,
    )  # fmt: skip
    progress = reporter()
    if config.validate:
        import autoq.kernels.launch  # noqa: F401  without a GPU this turns Triton's interpreter on, before anything imports triton
    from autoq import api
    from autoq.run_folder import RESULT, write_atomically

    result = api.search(config, progress)
    data = result.to_json()
    write_atomically(result.run / RESULT, json.dumps(data, indent=1) + "\n")
    if as_json:
        print_json(data)
    else:
        from autoq.report.terminal import search_result

        stdout().print(search_result(result, api.show(result.recipe)["units"]))
    fail(result.validation.problems if result.validation else ())


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
    batch: Batch = D.batch,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Score what every format would cost every unit; any budget can be searched from the result."""
    config = SearchConfig(
        model=model, space=space, calib=calib, eval=eval_, samples=samples, seq_len=seq_len, run=run, resume=resume,
        include=tuple(include or ()), seed=seed, device=device, dtype=dtype, batch=batch,
    )  # fmt: skip
    progress = reporter()
    from autoq import api

    done = api.profile(config, progress)
    facts: dict[str, Any] = {
        "run": str(done.run.path),
        "model": model,
        "sequences": done.profile.done,
        "tokens": done.profile.fingerprint.tokens,
        "units": len(done.plan.units.units),
        "formats": sorted({f for by_format in done.profile.samples.values() for f in by_format}),
        "coverage": done.plan.units.coverage(),
        "heavy_sequences": done.profile.heavy_sequences(),
        "seconds": done.clock.seconds,
    }
    if as_json:
        print_json(facts)
        return
    out = stdout()
    out.print(
        f"{facts['units']} units x {len(facts['formats'])} formats on {facts['sequences']} sequences of {facts['tokens']} tokens, in {facts['run']}"
    )
    budget = "--budget 4.5bits" if done.plan.candidates.weights else "--kv-budget 6bits"
    out.print(" ".join(f"next: autoq search {config.options()} --run {facts['run']} {budget}".split()), soft_wrap=True)


@app.command(epilog="Examples:\n\nautoq front runs/mine\n\nautoq front runs/mine --budgets 3,3.5,4,4.5 --json")
def front(
    run: Annotated[Path, typer.Argument(help="A run folder with a finished profile.")],
    budgets: Annotated[
        str | None, typer.Option(help="Bits to solve at, separated by commas. Default: 2 to 9 in quarters.", show_default=False)
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print the least predicted damage at every budget, from a finished profile."""
    asked = None
    if budgets is not None:
        from autoq.budget import parse_budget

        parsed = [parse_budget(b, "--budgets") for b in budgets.split(",")]
        if wrong := next((b for b in parsed if b.unit != "bits"), None):
            raise UserError(f"--budgets {wrong.text!r}: the front is drawn over bits, such as 3,3.5,4")
        asked = [b.value for b in parsed]
    from autoq import api

    result = api.front(run, asked)
    if as_json:
        print_json(result.to_json())
    else:
        from autoq.report.terminal import fronts

        stdout().print(fronts(result))


@app.command(epilog="Examples:\n\nautoq show\n\nautoq show runs/mine\n\nautoq show recipe.yaml --json")
def show(
    recipe: Annotated[
        Path | None, typer.Argument(help="A recipe file or a run folder. Default: the newest run.", show_default=False)
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print a recipe as a table."""
    from autoq import api
    from autoq.recipe import read_recipe

    view = api.show(read_recipe(api.find_recipe(recipe)))
    if as_json:
        print_json(view)
    else:
        from autoq.report.terminal import recipe_view

        stdout().print(recipe_view(view))


@app.command(
    epilog="Examples:\n\nautoq validate\n\nautoq validate runs/mine --sample 5\n\nautoq validate recipe.yaml --model ./my-model --json"
)
def validate(
    recipe: Annotated[
        Path | None, typer.Argument(help="A recipe file or a run folder. Default: the newest run.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The model it is for. Default: the one the recipe names.", show_default=False)
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(help="Pack only so many units with the kernels, drawn at random. Default: all.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of --sample.")] = D.seed,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Pack a recipe with the real kernels, check every byte, and measure the model that runs on them."""
    import autoq.kernels.launch  # noqa: F401  without a GPU this turns Triton's interpreter on, before anything imports triton
    from autoq import api

    result = api.validate(api.find_recipe(recipe), model, sample, seed, reporter())
    if as_json:
        print_json(result.to_json())
    else:
        from autoq.report.terminal import validation

        stdout().print(validation(result))
    fail(result.problems)


@app.command(epilog="Examples:\n\nautoq formats")
def formats(as_json: Json = False, debug: Debug = False) -> None:
    """List every number format with its element, block, scale and bits."""
    from autoq.report.formats import format_rows, format_table

    if as_json:
        print_json({"formats": format_rows()})
    else:
        stdout().print(format_table())


@app.command(
    epilog="Examples:\n\nautoq memory --model my-folder --context 32k,128k --batch 1,8\n\nautoq memory --recipe runs/mine/recipe.yaml --context 1k"
)
def memory(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="demo, a Hub name, or a folder (its config.json is enough). Default: the recipe's, else demo.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[str, typer.Option(help="Tokens of context, separated by commas: 4096,32k,128k.")] = "1k",
    batch: Annotated[str, typer.Option(help="Sequences at a time, separated by commas.")] = "1",
    recipe: Annotated[
        Path | None, typer.Option(help="Count weights and cache as this recipe stores them.", show_default=False)
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Price weights and KV cache: a row per KV format, context and batch."""
    from autoq.budget import parse_count, parse_size

    contexts = [parse_size(c) for c in context.split(",")]
    batches = [parse_count(b, "--batch") for b in batch.split(",")]
    from autoq import api
    from autoq.recipe import read_recipe

    loaded = read_recipe(api.find_recipe(recipe)) if recipe else None
    rows = api.memory(model or (loaded.model.id if loaded else D.model), contexts, batches, loaded)
    if as_json:
        print_json({"rows": rows})
    else:
        from autoq.report.terminal import memory_table

        of = (
            f"{recipe}: weights as it stores them"
            if recipe
            else f"{model or D.model}: weights in 16 bit (--recipe prices a recipe)"
        )
        stdout().print(memory_table(rows, of))


def main() -> None:
    """Run the command line; one sentence and exit code 2 for a user's mistake, 1 for a failure."""
    debug = "--debug" in sys.argv
    try:
        code = app(standalone_mode=False)
    except AutoqError as error:
        if debug:
            raise
        complain(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # a usage error: an unknown option, a value of the wrong type
            error.show()
            sys.exit(error.exit_code)
        if debug:
            raise
        complain(f"{type(error).__name__}: {error} (--debug shows where)")
        sys.exit(1)
    if code == INTERRUPTED:
        complain("stopped; --resume goes on from the last finished batch")
    if isinstance(code, int):
        sys.exit(code)
