"""Commands that look at a recipe, a run, a model or this machine: show, report, validate, retrieval, formats, memory, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoq.cli.app import app
from autoq.cli.completion import ENGINES, TARGETS, among, runs
from autoq.cli.options import Debug, ItsModel, Json, RecipeFile
from autoq.cli.output import fail, found_recipe, newest, print_json, printed, reporter, stdout
from autoq.config import SearchConfig
from autoq.errors import UserError

D = SearchConfig()


@app.command(epilog="Examples:\n\nautoq show\n\nautoq show runs/mine\n\nautoq show recipe.yaml --json")
def show(
    recipe: RecipeFile = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print a recipe as a table."""
    from autoq import api
    from autoq.recipe import read_recipe

    view = api.show(read_recipe(found_recipe(recipe)))
    if as_json:
        print_json(view)
    else:
        from autoq.display.units import recipe_view

        printed(recipe_view(view))


@app.command(
    epilog="Examples:\n\nautoq report\n\nautoq report runs/mine --out mine.html\n\nautoq report runs/mine --model my-folder"
)
def report(
    run: Annotated[
        Path | None, typer.Argument(help="A run folder. Default: the newest run.", show_default=False, autocompletion=runs)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The file. Default: report.html in the run folder.", show_default=False)] = None,
    model: ItsModel = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write what a search found as one HTML file with plots, which opens without a network."""
    from autoq import api

    folder = newest(api.find_recipe(None)).parent if run is None else run
    path = api.report(folder, out, model)
    if as_json:
        print_json({"report": str(path), "bytes": path.stat().st_size})
    else:
        stdout().print(f"wrote {path} ({path.stat().st_size / 2**20:.1f} MiB)", highlight=False, soft_wrap=True)


@app.command(
    epilog="Examples:\n\nautoq validate\n\nautoq validate runs/mine --sample 5\n\nautoq validate recipe.yaml --model ./my-model --json"
)
def validate(
    recipe: RecipeFile = None,
    model: ItsModel = None,
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

    result = api.validate(found_recipe(recipe), model, sample, seed, reporter())
    if as_json:
        print_json(result.to_json())
    else:
        from autoq.display.checks import validation

        printed(validation(result))
    fail(result.problems)


@app.command(epilog="Examples:\n\nautoq retrieval\n\nautoq retrieval runs/mine --lengths 1k,4k --depths 0,25,50,75,100 --samples 8")
def retrieval(
    recipe: RecipeFile = None,
    model: ItsModel = None,
    lengths: Annotated[str, typer.Option(help="Tokens of a prompt, separated by commas.")] = "256",
    depths: Annotated[str, typer.Option(help="Where the fact stands, in percent of the text.")] = "0,50,100",
    samples: Annotated[int, typer.Option(help="Prompts for every kind, length and depth.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the generated text.")] = D.seed,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Plant facts in generated text, and see whether the quantized model finds them as the original does."""
    from autoq.budget import parse_count, parse_size

    tokens = list(dict.fromkeys(parse_size(n, "--lengths") for n in lengths.split(",")))
    percents = list(dict.fromkeys(parse_count(d, "--depths") for d in depths.split(",")))
    from autoq import api

    result = api.retrieval(found_recipe(recipe), model, tokens, [p / 100 for p in percents], samples, seed, reporter())
    if as_json:
        print_json(result.to_json())
    else:
        from autoq.display.checks import retrieval_table

        printed(retrieval_table(result))


@app.command(epilog="Examples:\n\nautoq formats")
def formats(as_json: Json = False, debug: Debug = False) -> None:
    """List every number format with its element, block, scale and bits."""
    from autoq.display.formats import format_rows, format_table

    if as_json:
        print_json({"formats": format_rows()})
    else:
        printed(format_table())


@app.command(
    epilog="Examples:\n\nautoq memory --model my-folder --context 32k,128k --batch 1,8\n\nautoq memory --recipe runs/mine/recipe.yaml --context 1k\n\nautoq memory --model my-folder --context 32k --batch 1,8 --target h100 --engine vllm"
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
    target: Annotated[
        str | None,
        typer.Option(
            help="A device whose memory it has to fit: a100, h100, b200 ...", show_default=False, autocompletion=among(TARGETS)
        ),
    ] = None,
    available: Annotated[
        str | None, typer.Option("--memory", help="The same in bytes: 24GiB. What fits is printed.", show_default=False)
    ] = None,
    engine: Annotated[
        str, typer.Option(help="Count this engine's pages, and only cache formats it serves.", autocompletion=among(ENGINES))
    ] = D.engine,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Price weights and KV cache: a row per KV format, context and batch; and the largest context or batch that fits."""
    from autoq.budget import parse_bytes, parse_count, parse_size
    from autoq.cost.targets import target_of

    contexts = [parse_size(c) for c in context.split(",")]
    batches = [parse_count(b, "--batch") for b in batch.split(",")]
    from autoq import api
    from autoq.recipe import read_recipe

    loaded = read_recipe(api.find_recipe(recipe)) if recipe else None
    device = target_of("any" if target is None else target)
    room = device.memory if available is None else parse_bytes(available, "--memory")
    if target is not None and room is None:
        raise UserError(f"--target {target} says nothing of its memory: give --memory 24GiB")
    found = api.memory(model or (loaded.model.id if loaded else D.model), contexts, batches, loaded, engine, room, device.name)
    if as_json:
        print_json({"rows": found.rows, "largest": found.largest})
    else:
        from autoq.display.prices import memory_table

        of = (
            f"{recipe}: weights as it stores them"
            if recipe
            else f"{model or D.model}: weights in 16 bit (--recipe prices a recipe)"
        )
        printed(memory_table(found, of, room))


@app.command(epilog="Examples:\n\nautoq doctor\n\nautoq doctor --json")
def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """Say what is installed here, which formats run natively, whether every kernel compiles, and which PTQ tools are found.

    Exit code 1 if a package is missing or does not fit, or a kernel fails.
    """
    from autoq import api

    found = api.doctor()
    if as_json:
        print_json(found.to_json())
    else:
        from autoq.display.doctor import doctor_view

        printed(doctor_view(found))
    if found.problems:
        raise typer.Exit(1)
