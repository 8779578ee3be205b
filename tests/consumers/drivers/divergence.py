"""What every driver does the same: read the job, run the model on its ids, compare with the original, write the result.

Drivers run in the environment of one tool, where autoq is not installed: they import nothing of it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch


def read_job() -> dict[str, Any]:
    with open(sys.argv[1], encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


@torch.no_grad()
def log_probabilities(model: Any, ids: list[list[int]]) -> torch.Tensor:
    """Return float32 [sequences, tokens, vocabulary]."""
    rows = [model(torch.tensor([row]), use_cache=False).logits.float().log_softmax(-1)[0] for row in ids]
    return torch.stack(rows)


def kl(original: torch.Tensor, changed: torch.Tensor) -> list[float]:
    """Return KL(original || changed) in nats per token, by sequence."""
    values: list[float] = (original.exp() * (original - changed)).sum(-1).double().mean(1).tolist()
    return values


def write_result(result: dict[str, Any]) -> None:
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(result, file)
