"""Loaded models that are not what a search takes, or are in the middle of something."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    BertModel,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedModel,
)

import autoq
from autoq.model.units import find_units
from tests.conftest import build, llama_config
from tests.test_verbs import BATCHES, OTHERS, QUICK, state


def bert(is_decoder: bool = True) -> BertConfig:
    return BertConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, max_position_embeddings=64, is_decoder=is_decoder
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: LlamaModel(llama_config()), "LlamaModel has no output embedding"),
        (lambda: LlamaForSequenceClassification(llama_config()), "LlamaForSequenceClassification has no output embedding"),
        (lambda: BertForMaskedLM(bert(False)), "BertForMaskedLM is not a causal language model"),
        (lambda: BertModel(bert(False)), "BertModel has no output embedding"),
    ],
)
def test_models_that_predict_no_next_token(model: Callable[[], PreTrainedModel], says: str, here: Path) -> None:
    with pytest.raises(autoq.UserError, match=says):
        autoq.search(model(), BATCHES, eval=OTHERS, budget=4)
    with pytest.raises(autoq.UserError, match=says):
        autoq.memory(model(), context=32)


def test_a_decoder_whose_projections_are_called_as_its_caches_are(here: Path) -> None:
    """BERT's attention has layers `query`, `key` and `value`: engines fuse them, and their unit is none of the cache's."""
    model = BertLMHeadModel(bert())
    units = find_units(model)
    assert len({u.name for u in units.units}) == len(units.units)
    assert [len(u.tensors) for u in units.weights if u.role == "qkv"] == [3, 3]
    with pytest.raises(autoq.AutoqError, match="changes its logits in a way autoq does not know"):
        autoq.search(model, BATCHES, budget=6, **QUICK)


def test_a_layer_whose_weight_is_computed_stays_as_it_is(llama: PreTrainedModel, here: Path) -> None:
    torch.nn.utils.parametrizations.weight_norm(llama.model.layers[0].mlp.down_proj)
    before = state(llama)
    result = autoq.search(llama, BATCHES, budget=6, **QUICK)
    assert not any("layers.0.mlp.down" in name for name in result.recipe.weights)
    assert result.recipe.left_out["parametrized layers"] >= llama.model.layers[1].mlp.down_proj.weight.numel()
    assert state(llama) == before


def test_inference_mode(llama: PreTrainedModel, here: Path) -> None:
    with torch.inference_mode():
        inside = autoq.search(llama, BATCHES.clone(), budget=5, **QUICK)
        made_inside = build(llama_config())
    assert inside.divergence.mean_kl == autoq.search(llama, BATCHES, budget=5, **QUICK).divergence.mean_kl
    with pytest.raises(autoq.UserError, match=r"made within torch.inference_mode"):
        autoq.search(made_inside, BATCHES, budget=5, **QUICK)


def test_a_model_that_a_recipe_is_applied_to_is_not_searched(llama: PreTrainedModel, here: Path) -> None:
    before = state(llama)
    options: list[dict[str, Any]] = [{"budget": 5}, {"kv_budget": 5}]
    for asked in options:
        result = autoq.search(llama, BATCHES, **asked, **QUICK)
        with autoq.quantized(llama, result) as changed:
            with pytest.raises(autoq.UserError, match="leave the block first"):
                autoq.search(changed, BATCHES, budget=5, **QUICK)
            with pytest.raises(autoq.UserError, match="leave the block first"), autoq.quantized(changed, result):
                pass
        assert state(llama) == before
    assert autoq.search(llama, BATCHES, budget=5, **QUICK).recipe.totals.bits <= 5.001


def test_a_setting_that_is_not_there_is_not_there_afterwards(llama: PreTrainedModel, here: Path) -> None:
    del llama.config.use_cache
    autoq.profile(llama, BATCHES)
    assert "use_cache" not in vars(llama.config)
