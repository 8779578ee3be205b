"""Commands between autoq and other tools: export, import, check."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoq.cli.app import app
from autoq.cli.completion import CONSUMERS, ENGINES, KINDS, ROUNDS, TARGETS, among, models
from autoq.cli.options import Debug, ItsModel, Json, RecipeFile
from autoq.cli.output import fail, found_recipe, print_json, printed, reporter, stdout
from autoq.config import SearchConfig

D = SearchConfig()


@app.command(
    epilog="Examples:\n\nautoq export --to modelopt\n\nautoq export runs/mine --to vllm --round scales --out for-vllm\n\nautoq export recipe.yaml --to all --round up"
)
def export(
    recipe: RecipeFile = None,
    to: Annotated[str, typer.Option(help=f"{', '.join(CONSUMERS)}; or all.", autocompletion=among((*CONSUMERS, "all")))] = ...,  # type: ignore[assignment]
    out: Annotated[
        Path | None, typer.Option(help="Folder. Default: export/CONSUMER beside the recipe.", show_default=False)
    ] = None,
    rounding: Annotated[
        str,
        typer.Option(
            "--round",
            help="What the consumer lacks: none refuses; scales lets it pick its own scales for the same bytes; up also takes its next better format.",
            autocompletion=among(ROUNDS),
        ),
    ] = "none",
    model: ItsModel = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a recipe as a PTQ tool or a serving engine takes it, and say what it cannot say."""
    from autoq import api

    path = found_recipe(recipe)
    if to == "all":
        reports = api.export_all(path, out, rounding, model)
        if as_json:
            print_json({"exports": [r.to_json() for r in reports]})
        else:
            from autoq.display.exports import export_table

            printed(export_table(reports))
        if all(r.refused for r in reports):
            raise typer.Exit(1)
        return
    try:
        report = api.export(path, to, out, rounding, model)
    except api.ExportRefusedError as refused:
        if as_json:
            print_json(refused.report.to_json())
        raise
    if as_json:
        print_json(report.to_json())
    else:
        from autoq.display.exports import export_view

        printed(export_view(report))


@app.command(
    "import",
    epilog="Examples:\n\nautoq import recipe.yaml --model my-folder --out theirs.yaml\n\nautoq import Published-Model-NVFP4 --model my-folder\n\nautoq import tensor-types.txt --from gguf --model my-folder",
)
def import_(
    file: Annotated[Path, typer.Argument(help="A recipe, a config.json, a GGUF file, or a checkpoint folder.", show_default=False)],
    model: Annotated[
        str, typer.Option(help="The 16-bit model it is for: demo, a Hub name, or a folder.", autocompletion=models)
    ] = D.model,
    kind: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="modelopt, hf_quant_config, llm-compressor, compressed-tensors, auto-round, gptqmodel, torchao, mlx, gguf. Default: by its looks.",
            show_default=False,
            autocompletion=among(KINDS),
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The recipe to write; nothing may be there yet.")] = Path("imported.yaml"),
    calib: Annotated[
        str | None,
        typer.Option(
            help="Text that caches with static scales are calibrated on. Default: Python's own documentation.", show_default=False
        ),
    ] = None,
    context: Annotated[str | None, typer.Option(help="Tokens at which the cache is priced.", show_default=False)] = None,
    batch: Annotated[int, typer.Option(help="Sequences for which the cache is priced.")] = D.batch,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Make a recipe of what another tool wrote, to show, price, check and measure it."""
    from autoq.budget import parse_size

    tokens = None if context is None else parse_size(context)
    from autoq import api

    found = api.import_recipe(file, model, kind, out, calib, tokens, batch, reporter())
    if as_json:
        print_json(found.to_json())
    else:
        from autoq.display.exports import import_view

        printed(import_view(found))


@app.command(
    epilog="Examples:\n\nautoq check\n\nautoq check recipe.yaml --model my-folder --engine vllm\n\nautoq check recipe.yaml --consumer llm-compressor --target h100"
)
def check(
    recipe: RecipeFile = None,
    model: ItsModel = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="The engine that is to serve it. Default: the recipe's.", show_default=False, autocompletion=among(ENGINES)
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="The device that is to run it. Default: the recipe's.", show_default=False, autocompletion=among(TARGETS)
        ),
    ] = None,
    consumer: Annotated[
        str | None, typer.Option(help="A tool that it is to be exported to.", show_default=False, autocompletion=among(CONSUMERS))
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check a recipe against its model, an engine, a device and a tool; exit code 1 if something is wrong."""
    from autoq import api

    found = api.check(found_recipe(recipe), model, engine, target, consumer)
    if as_json:
        print_json(found.to_json())
    elif not found.problems:
        stdout().print(f"passed: {', '.join(found.checks)}", style="green", highlight=False)
    fail(found.problems)
