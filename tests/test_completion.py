"""A shell completes commands, options and values, and the lists it offers are those that are there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoq.allocation.space import space_names
from autoq.cli import completion
from autoq.cost.engines import ENGINES
from autoq.cost.targets import TARGETS
from autoq.exporters.consumer import ROUNDS
from autoq.exporters.consumers import CONSUMERS
from autoq.exporters.importers import READERS
from autoq.trials.samplers import SAMPLERS


def completed(words: str, cwd: Path) -> list[str]:
    """Return what bash gets offered at the end of these words, asked as its completion script asks."""
    environ = {**os.environ, "_AUTOQ_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    code = "import sys; sys.argv = ['autoq']; from autoq.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environ, cwd=cwd, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.stdout.split()


def test_lists_are_those_that_are_there() -> None:
    assert tuple(CONSUMERS) == completion.CONSUMERS
    assert set(completion.ENGINES) == set(ENGINES)
    assert set(completion.TARGETS) == set(TARGETS)
    assert set(completion.SAMPLERS) == set(SAMPLERS)
    assert tuple(ROUNDS) == completion.ROUNDS
    assert set(completion.KINDS) == set(READERS)
    assert completion.spaces("")[: len(space_names())] == space_names()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("autoq ex", ["export"]),
        ("autoq export --to mo", ["modelopt"]),
        ("autoq search --engine v", ["vllm"]),
        ("autoq search --target rtx", ["rtx4090", "rtx5090"]),
        ("autoq search --space bl", ["blackwell"]),
        ("autoq search --model de", ["demo"]),
        ("autoq show runs/m", ["runs/mine"]),
        ("autoq report ", ["runs/mine"]),
        ("autoq search --kv-b", ["--kv-budget"]),
    ],
)  # fmt: skip
def test_bash_is_offered(words: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "run.json").write_text("{}")
    assert [found for found in completed(words, tmp_path) if found in expected or not expected] == expected
    assert len(completed(words, tmp_path)) <= len(expected) + 1


def test_completion_does_not_load_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['autoq']\nfrom autoq.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\nprint('torch' in sys.modules)"
    )
    environ = {**os.environ, "_AUTOQ_COMPLETE": "complete_bash", "COMP_WORDS": "autoq export --to m", "COMP_CWORD": "3"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_the_shell_is_printed(shell: str, tmp_path: Path) -> None:
    environ = {**os.environ, "_AUTOQ_COMPLETE": f"source_{shell}"}
    code = "import sys; sys.argv = ['autoq']; from autoq.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "_AUTOQ_COMPLETE" in done.stdout
