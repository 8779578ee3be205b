"""Which tensors are found, how they are grouped, what is left out: the model shapes that broke other tools."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    JambaConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3MoeConfig,
)

from autoq.model.unit import ModelUnits, Unit
from autoq.model.units import find_units
from tests.conftest import SMALL, llama_config


def units_of(config: Any, include: tuple[str, ...] = ()) -> ModelUnits:
    with torch.device("meta"):
        return find_units(AutoModelForCausalLM.from_config(config), include)


def unit(units: ModelUnits, ending: str) -> Unit:
    return next(u for u in units.units if u.name.endswith(ending))


def searched_share(units: ModelUnits, excluded: tuple[str, ...]) -> bool:
    """Everything that is not left out for one of these reasons is searched."""
    rest = sum(e.numel for e in units.left_out if not e.reason.startswith(excluded))
    return rest == 0 and units.searched + sum(e.numel for e in units.left_out) == units.parameters


ORDINARY = ("embeddings", "lm_head", "norms", "biases", "position embeddings", "router")


def test_case_1_qkv_and_gate_up_are_one_unit_each() -> None:
    units = units_of(llama_config())
    assert [t.name.split(".")[-1] for t in unit(units, "layers.0.self_attn.qkv").tensors] == ["q_proj", "k_proj", "v_proj"]
    assert [t.name.split(".")[-1] for t in unit(units, "layers.1.mlp.gate_up").tensors] == ["gate_proj", "up_proj"]
    assert [u.role for u in units.weights] == ["qkv", "o", "gate_up", "down"] * 2
    assert searched_share(units, ORDINARY)


def test_case_2_fused_projections_are_one_tensor_and_have_a_cache() -> None:
    units = units_of(Phi3Config(num_key_value_heads=2, pad_token_id=0, **SMALL))
    assert unit(units, "0.self_attn.qkv_proj").tensors[0].shape == (128, 64)
    assert unit(units, "0.self_attn.key").numel == 2 * 16
    assert searched_share(units, ORDINARY)


def test_case_3_conv1d_is_found_and_its_blocks_run_along_the_inputs() -> None:
    units = units_of(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64))
    tensor = unit(units, "h.0.mlp.c_proj").tensors[0]
    assert tensor.layout == "conv1d"
    assert tensor.shape == (256, 64)
    assert tensor.matrix_shape == (64, 256)
    assert [u.role for u in units.weights[:4]] == ["qkv", "o", "gate_up", "down"]
    assert searched_share(units, ORDINARY)


@pytest.mark.parametrize(
    ("config", "layout", "shape"),
    [
        (MixtralConfig(num_key_value_heads=2, num_local_experts=4, **SMALL), "experts", (4, 192, 64)),
        (
            Qwen3MoeConfig(num_key_value_heads=2, num_experts=4, moe_intermediate_size=32, head_dim=16, **SMALL),
            "experts",
            (4, 64, 64),
        ),
        (GptOssConfig(num_key_value_heads=2, num_local_experts=4, head_dim=16, **SMALL), "experts_transposed", (4, 192, 64)),
    ],
    ids=["mixtral", "qwen3_moe", "gpt_oss"],
)
def test_case_4_all_experts_of_a_layer_are_one_unit_and_routers_are_left(config: Any, layout: str, shape: tuple[int, ...]) -> None:
    units = units_of(config)
    experts = unit(units, "layers.0.mlp.experts")
    assert experts.role == "experts"
    assert {t.layout for t in experts.tensors} == {layout}
    assert experts.tensors[0].matrix_shape == shape
    assert len(experts.tensors) == 2
    assert any(e.reason == "router" for e in units.left_out)
    assert searched_share(units, ORDINARY)


def test_case_6_tied_embeddings_count_once() -> None:
    units = units_of(llama_config(), include=("lm_head",))
    head = unit(units, "lm_head")
    assert head.numel == 128 * 64
    assert head.tensors[0].also == ("model.embed_tokens.weight",)
    assert units.searched == sum(u.numel for u in units.weights)
    assert units.searched + sum(e.numel for e in units.left_out) == units.parameters
    without = units_of(llama_config())
    assert without.searched == units.searched - head.numel
    assert "lm_head" in without.coverage()


def test_case_7_windows_are_those_of_the_layer() -> None:
    types = ["sliding_attention", "full_attention"]
    units = units_of(Gemma3TextConfig(num_key_value_heads=1, head_dim=16, sliding_window=24, layer_types=types, **SMALL))
    assert [u.window for u in units.caches] == [24, 24, None, None]


def test_case_10_only_attention_layers_have_a_cache_and_convolutions_are_left() -> None:
    config = JambaConfig(
        num_key_value_heads=2, num_experts=2, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, use_mamba_kernels=False,
        mamba_dt_rank=4, **SMALL,
    )  # fmt: skip
    units = units_of(config)
    assert {u.layer for u in units.caches} == {1}
    assert not any("conv1d" in t.name for u in units.weights for t in u.tensors)
    assert all(t.width >= 16 for u in units.weights for t in u.tensors)


def test_case_11_odd_head_dims_are_taken_as_they_are() -> None:
    units = units_of(
        LlamaConfig(**{**SMALL, "hidden_size": 80, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 80})
    )
    assert unit(units, "0.self_attn.value").head_dim == 80


def test_case_13_biases_are_kept_and_counted_apart() -> None:
    units = units_of(Qwen2Config(num_key_value_heads=2, **SMALL))
    biases = next(e for e in units.left_out if e.reason == "biases")
    assert biases.numel == 2 * (64 + 32 + 32)
    assert searched_share(units, ORDINARY)


def test_coverage_says_what_is_searched_and_what_is_left_out() -> None:
    text = units_of(llama_config()).coverage()
    assert "parameters are searched" in text
    assert "norms" in text
