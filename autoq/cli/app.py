"""The command line: parses, calls the api, prints. One sentence for a mistake, an exit code for scripts."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from autoq import __version__
from autoq.cli.output import complain, write_any_encoding
from autoq.errors import AutoqError

INTERRUPTED = 130  # what typer returns after Ctrl-C

app = typer.Typer(
    no_args_is_help=True,
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


def main() -> None:
    """Run the command line; one sentence and exit code 2 for a user's mistake, 1 for a failure."""
    debug = "--debug" in sys.argv
    write_any_encoding()
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
        what = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        complain(f"{what} (--debug shows where)")
        sys.exit(1)
    if code == INTERRUPTED:
        complain("stopped; --resume goes on from the last finished batch")
    if isinstance(code, int):
        sys.exit(code)
