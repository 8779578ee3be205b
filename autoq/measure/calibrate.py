"""Calibrate static scales and means of caches: one pass over a text, without scoring anything."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from autoq.formats.calibration import Calibration
from autoq.measure.cache_statistics import CacheStatistics
from autoq.model.attention import AttentionFunction, intercepted
from autoq.model.head import hidden_states
from autoq.model.unit import ModelUnits


def calibrate(model: PreTrainedModel, units: ModelUnits, ids: torch.Tensor, batch: int = 4) -> dict[str, Calibration]:
    """Return cache unit -> what its static scale and mean come from, over token ids [sequences, tokens]."""
    by_module = {model.get_submodule(u.module): u.module for u in units.caches}
    kept: dict[str, CacheStatistics] = {u.name: CacheStatistics() for u in units.caches}

    def watch(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
        attend: AttentionFunction, **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        if (name := by_module.get(module)) is not None:
            for kind, x in (("key", key), ("value", value)):
                unit = f"{name}.{kind}"
                kept[unit] = kept[unit].with_values(x.float())
        return attend(module, query, key, value, mask, **options)

    with torch.no_grad(), intercepted(model, watch):
        for part in ids.split(batch):
            hidden_states(model, part.to(model.device))
    return {unit: statistics.calibration() for unit, statistics in kept.items()}
