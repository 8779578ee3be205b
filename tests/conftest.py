"""Tiny models from their config classes, and one run of the command line on the demo model shared by many tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

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


def pytest_configure() -> None:
    """Fail loudly when the run on the oldest transformers does not run on it."""
    import transformers

    expected = os.environ.get("AUTOQ_EXPECT_TRANSFORMERS")
    if expected and transformers.__version__ != expected:
        raise pytest.UsageError(f"expected transformers {expected}, found {transformers.__version__}")


@pytest.fixture
def llama() -> PreTrainedModel:
    return build(llama_config())


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 128, (3, 40), generator=torch.Generator().manual_seed(7))


def run_autoq(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "autoq", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False)


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
