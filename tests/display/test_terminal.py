"""What is printed is readable at 80 and at 200 columns, without colour, in a dumb terminal, and piped to a file."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autoq.display.units import MOST_ROWS, UnitTable, grouped
from tests.conftest import run_autoq

ESCAPE = "\x1b"


def in_terminal(arguments: list[str], columns: int, cwd: Path, term: str = "xterm-256color", **more: str) -> str:
    """Run autoq in a real pseudo-terminal of that width; return what it wrote there."""
    environ = {**os.environ, "TERM": term, "COLUMNS": str(columns), **more}
    environ.pop("NO_COLOR", None) if "NO_COLOR" not in more else None
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "autoq", *arguments], stdout=follower, stderr=subprocess.DEVNULL, env=environ, cwd=cwd
    ) as done:
        os.close(follower)
        found = b""
        while True:
            ready, _, _ = select.select([leader], [], [], 120)
            try:
                part = os.read(leader, 65536) if ready else b""
            except OSError:  # closed by the other side
                part = b""
            if not part:
                break
            found += part
    os.close(leader)
    assert done.returncode == 0
    return found.decode().replace("\r\n", "\n")


def plain(text: str) -> str:
    """Return the text without a terminal's codes."""
    return re.sub(ESCAPE + r"\[[0-9;]*m", "", text)


def longest(text: str) -> int:
    """Return the columns that the longest line takes."""
    return max(len(line.rstrip()) for line in text.splitlines())


def units(layers: int, formats: list[str]) -> list[dict[str, Any]]:
    parts = {"qkv": "self_attn.qkv", "o": "self_attn.o_proj", "down": "mlp.down_proj"}
    return [
        {"unit": f"model.layers.{i}.{part}", "role": role, "layer": i, "format": formats[(i * 7 + len(role)) % len(formats)], "bits": 4.25,
         "numel": 100, "predicted_kl": 1e-3}
        for role, part in parts.items() for i in range(layers)
    ]  # fmt: skip


def drawn(table: UnitTable, width: int) -> list[str]:
    console = Console(width=width, no_color=True, force_terminal=False, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.capture() as found:
        console.print(table)
    return found.get().splitlines()


@pytest.fixture(scope="module")
def run(demo_search: dict[str, Any]) -> Path:
    return Path(demo_search["cwd"])


@pytest.mark.parametrize("columns", [80, 200])
def test_show_fits_and_every_unit_is_on_one_line(columns: int, run: Path) -> None:
    raw = in_terminal(["show", "run"], columns, run, NO_COLOR="1")
    text = plain(raw)
    lines = text.splitlines()
    assert longest(text) <= columns
    rows = [line for line in lines if re.match(r"layers? \d", line)]
    assert rows
    for row in rows:
        assert re.search(r"(self_attn|mlp)\.\w+ .*\w+ +\d+\.\d{3}", row), row
    (head,) = [line.split() for line in lines if line.startswith("unit ")]
    assert ("role" in head) == (columns == 200)  # told where there is room
    assert not re.search(ESCAPE + r"\[[0-9;]*3[0-7]m", raw)


def test_a_dumb_terminal_gets_no_codes(run: Path) -> None:
    text = in_terminal(["show", "run"], 80, run, term="dumb")
    assert ESCAPE not in text
    assert "predicted KL" in text


def test_a_terminal_gets_emphasis_and_a_pipe_does_not(run: Path) -> None:
    assert ESCAPE in in_terminal(["show", "run"], 100, run)
    piped = subprocess.run(
        [sys.executable, "-m", "autoq", "show", "run"], cwd=run, capture_output=True, text=True, check=True
    ).stdout
    assert ESCAPE not in piped
    assert "layers" in piped


@pytest.mark.parametrize("columns", [80, 200])
def test_the_final_table_of_a_search_loses_nothing(columns: int, run: Path) -> None:
    raw = in_terminal(
        ["search", "--budget", "4.25bits", "--kv-budget", "5bits", "--samples", "6", "--seq-len", "64", "--eval-samples", "4", "--eval-len", "128",
         "--correct", "2", "--run", "run"], columns, run, NO_COLOR="1",
    )  # fmt: skip
    text = plain(raw)
    assert "…" not in text
    tables, _, copied = text.partition("written\n")
    assert longest(tables) <= columns
    for command in ("report run", "validate run/recipe.yaml", "show run/recipe.yaml", "export run --to all", "front run"):
        assert re.search(rf"autoq {command}\b", copied), command
    (another,) = [line for line in copied.splitlines() if "# another budget" in line]
    assert re.search(r"--samples 6 --seq-len 64 --run run --budget 4\.\dbits --kv-budget 5\.\d+bits", another)
    before = (
        run / "run" / "recipe-4.5bits-and-kv-5bits.yaml"
    ).read_bytes()  # what was there is kept; put it back for the other tests
    (run / "run" / "recipe.yaml").write_bytes(before)


def test_layers_are_joined_over_gaps_where_there_are_many() -> None:
    few, many = units(8, ["nvfp4", "int8"]), units(64, ["nvfp4", "int8", "int4_g64"])
    assert len(grouped(few)) <= MOST_ROWS
    rows = grouped(many)
    assert len(rows) == 9
    assert sum("layers 0, 3, 6" in row["name"] for row in rows) == 3
    uniform = units(18, ["nvfp4"])
    assert [row["name"] for row in grouped(uniform)] == [
        "layers 0-17 self_attn.qkv",
        "layers 0-17 self_attn.o_proj",
        "layers 0-17 mlp.down_proj",
    ]


def test_narrow_terminals_get_fewer_columns_and_no_cut_format() -> None:
    table = UnitTable(units(4, ["int4_g32_asym_lsq", "nvfp4_4over6"]), 0.1)
    heads = {width: drawn(table, width)[1].split() for width in (200, 76, 64)}
    assert "role" in heads[200]
    assert "role" not in heads[76]
    assert "share" in heads[76]
    assert "share" not in heads[64]
    for width in (200, 76, 64, 50):
        lines = drawn(table, width)
        assert max(map(len, lines)) <= width
        assert any("int4_g32_asym_lsq" in line for line in lines)


def test_an_encoding_without_the_characters_gets_plain_ones(demo_search: dict[str, Any]) -> None:
    """LC_ALL=C and old consoles: after the work it is too late to fail."""
    done = subprocess.run(
        [sys.executable, "-m", "autoq", "front", "run"], env={**os.environ, "PYTHONIOENCODING": "ascii"}, cwd=demo_search["cwd"], capture_output=True, check=True
    )  # fmt: skip
    text = done.stdout.decode("ascii")
    assert "####" in text
    assert "* knee" in text
    assert "?" not in text


@pytest.mark.parametrize("limits", [(), ("--engine", "vllm"), ("--consumer", "mlx")])
def test_the_commands_that_a_search_suggests_run(limits: tuple[str, ...], tmp_path: Path) -> None:
    few = ("--samples", "4", "--seq-len", "64", "--eval-samples", "2", "--eval-len", "64", "--correct", "2", "--weak", "0")
    done = run_autoq("search", "--budget", "4.6bits", *limits, "--run", "run", *few, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    suggested = [line.split("  #")[0].split() for line in done.stdout.split("\nnext\n")[1].splitlines()]
    assert len(suggested) >= 6
    for command in suggested:
        assert command[0] == "autoq"
        short = ["--trials", "2"] if "--trials" in command else []  # the last of an option counts
        more = few[4:] if command[1] == "search" else ["--sample", "1"] if command[1] == "validate" else []
        again = run_autoq(*command[1:], *more, *short, cwd=tmp_path)
        assert again.returncode == 0, (command, again.stderr)


def test_what_cannot_be_printed_is_told_without_class_names(demo_search: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "autoq", "formats"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("autoq: No space left on device")
    done = subprocess.run(["sh", "-c", f"{shlex.join(command)} >&-"], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
