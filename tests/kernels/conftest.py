"""Kernel tests run in Triton's interpreter; where there is a GPU they run on it, and carry the marker `gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoq.kernels.launch import interpreted


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).parent == Path(__file__).parent and not interpreted():
            item.add_marker(pytest.mark.gpu)
