"""Options that several commands share, each defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoq.cli import completion
from autoq.errors import UserError

TRIALS = "Trials"


def _folder(text: str) -> Path:
    if not text:
        raise UserError("--run is empty: give a folder, or leave the option out")
    return Path(text)


Model = Annotated[
    str, typer.Option("--model", help="demo, a Hub name, a model folder, or a .gguf file.", autocompletion=completion.models)
]
Space = Annotated[
    str,
    typer.Option(help="A bundled search space (default, plain, int, blackwell) or a YAML file.", autocompletion=completion.spaces),
]
Calib = Annotated[
    str | None,
    typer.Option(
        help="Text to profile on: .txt, .jsonl, .parquet or a dataset name\\[:config]\\[@split]. Default: Python's own documentation.",
        show_default=False,
    ),
]
Eval = Annotated[
    str | None,
    typer.Option(
        "--eval",
        help="Text to measure on, never the text that was profiled. Default: a part of --calib that is kept apart.",
        show_default=False,
    ),
]
Samples = Annotated[int, typer.Option(help="Sequences to profile.")]
SeqLen = Annotated[
    int,
    typer.Option(
        "--seq-len", "--calib-len", help="Tokens of a profiled sequence; damage to a cache grows with the context it is scored in."
    ),
]
Run = Annotated[
    Path | None,
    typer.Option(
        "--run",
        parser=_folder,
        metavar="DIR",
        help="Run folder. Default: runs/<model>-<time>.",
        show_default=False,
        autocompletion=completion.runs,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on in --run, or in this model's newest run.")]
Include = Annotated[
    list[str] | None,
    typer.Option(help="Search this too: lm_head.", show_default=False, autocompletion=completion.among(["lm_head"])),
]
Seed = Annotated[int, typer.Option(help="Seed of the drawn labels.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...", autocompletion=completion.among(["auto", "cpu", "cuda"]))]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.", autocompletion=completion.among(completion.DTYPES))]
ProfileBatch = Annotated[int, typer.Option(help="Sequences scored together.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
RecipeFile = Annotated[
    Path | None,
    typer.Argument(
        help="A recipe file or a run folder. Default: the newest run.", show_default=False, autocompletion=completion.runs
    ),
]
ItsModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="The model it is for. Default: the one the recipe names.",
        show_default=False,
        autocompletion=completion.models,
    ),
]
Trials = Annotated[
    int,
    typer.Option(help="Recipes near the exact solution that Optuna measures; 0: only the solution itself.", rich_help_panel=TRIALS),
]
Sampler = Annotated[
    str,
    typer.Option(
        help="Optuna's sampler: tpe, gp, nsga3, cmaes, random.",
        rich_help_panel=TRIALS,
        autocompletion=completion.among(completion.SAMPLERS),
    ),
]
TrialSamples = Annotated[
    int, typer.Option(help="Windows that trials are measured on, kept apart from all other text.", rich_help_panel=TRIALS)
]
Storage = Annotated[
    str | None,
    typer.Option(
        envvar="AUTOQ_STORAGE",
        help="Where trials are kept: sqlite:///trials.db, postgresql://user:password@host/name, grpc://host:port. Default: a journal in the run folder.",
        show_default=False,
        rich_help_panel=TRIALS,
    ),
]
Timeout = Annotated[
    str | None, typer.Option(help="Begin no trial after so long: 90s, 15m, 2h.", show_default=False, rich_help_panel=TRIALS)
]
