"""benchmarks/kernels.py without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="it runs where there is a GPU")
def test_it_refuses_a_cpu_and_says_why(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels.py"), "--out", str(tmp_path / "kernels.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2
    assert "needs a GPU" in done.stderr
    assert not list(tmp_path.iterdir())
