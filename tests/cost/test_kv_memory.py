"""KV bytes by layer: the published sizes, windows, residual and sink tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    DeepseekV3Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    MiniMaxConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3NextConfig,
)

from autoq import api
from autoq.errors import UserError
from autoq.formats.catalog import kv_format
from tests.conftest import SMALL, run_autoq

GIB = 2**30


@pytest.fixture
def eight_heads(model_folder: Any) -> Path:
    config = LlamaConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128, intermediate_size=256,
        vocab_size=64, max_position_embeddings=2**18,
    )  # fmt: skip
    folder: Path = model_folder(config)
    assert [p.name for p in folder.iterdir()] == ["config.json"]
    return folder


@pytest.mark.parametrize(
    ("name", "gib"), [("bf16", 4.0), ("fp8", 2.0), ("fp8_cast", 2.0), ("nvfp4", 1.125), ("mxfp4", 1.0625), ("mxfp8", 2.0625)]
)
def test_a_32_layer_model_with_8_heads_of_128_at_32k(eight_heads: Path, name: str, gib: float) -> None:
    rows = api.memory(str(eight_heads), [32768], [1]).rows
    assert next(r for r in rows if r["kv_format"] == name)["kv_bytes"] == gib * GIB


def test_rows_are_formats_by_contexts_by_batches(eight_heads: Path) -> None:
    rows = api.memory(str(eight_heads), [1024, 2048], [1, 8]).rows
    assert len({(r["context"], r["batch"]) for r in rows}) == 4
    by = {(r["kv_format"], r["context"], r["batch"]): r for r in rows}
    assert by["nvfp4", 2048, 8]["kv_bytes"] == 16 * by["nvfp4", 1024, 1]["kv_bytes"]
    for row in rows:
        assert row["total_bytes"] == row["kv_bytes"] + row["weight_bytes"]


def test_a_window_caps_the_layers_that_have_one(model_folder: Any) -> None:
    types = ["sliding_attention", "full_attention"]
    sizes = {**SMALL, "max_position_embeddings": 4096}
    folder = model_folder(Gemma3TextConfig(num_key_value_heads=1, head_dim=16, sliding_window=64, layer_types=types, **sizes))
    rows = api.memory(str(folder), [1024], [1]).rows
    assert next(r for r in rows if r["kv_format"] == "bf16")["kv_bytes"] == 2 * 2 * 16 * (64 + 1024)


def test_residual_sink_and_the_incomplete_group_stay_in_16_bit() -> None:
    token, channel = kv_format("int4_token+residual8+sink2"), kv_format("int4_channel")
    assert token.storage_bits(100, 1, 64) == 16 * 64 * 10 + 90 * (4 * 64 + 20)
    assert channel.storage_bits(70, 1, 64) == 16 * 64 * 6 + 64 * 64 * 4 + 64 * 2 * 20
    assert token.storage_bits(5, 1, 64) == 16 * 64 * 5


@pytest.mark.parametrize(("contexts", "batches", "says"), [([2**19], [1], "maximum of 262,144"), ([1024], [0], "batch of 0")])
def test_what_cannot_be_is_refused(eight_heads: Path, contexts: list[int], batches: list[int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        api.memory(str(eight_heads), contexts, batches)


LAYERS = {**SMALL, "num_hidden_layers": 4}
TWO_KINDS = ["sliding_attention", "full_attention"] * 2
SHAPES: dict[str, tuple[Any, int]] = {
    # bytes of 100 tokens in 16 bit, counted by hand
    "latent": (
        DeepseekV3Config(
            **LAYERS, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, kv_lora_rank=32, q_lora_rank=None,
            qk_rope_head_dim=8, v_head_dim=16, qk_nope_head_dim=16, first_k_dense_replace=2, moe_intermediate_size=32,
        ),
        2 * 4 * 100 * (32 + 8),
    ),
    "shared caches": (
        Gemma3nTextConfig(
            **{**LAYERS, "intermediate_size": 96}, num_key_value_heads=2, head_dim=16, num_kv_shared_layers=2, layer_types=TWO_KINDS,
            vocab_size_per_layer_input=128, hidden_size_per_layer_input=16, sliding_window=20, laurel_rank=8,
            activation_sparsity_pattern=[0.0] * 4,
        ),
        2 * 2 * 2 * 16 * (20 + 100),
    ),
    "linear attention": (
        Qwen3NextConfig(
            **LAYERS, num_key_value_heads=2, head_dim=16, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32,
            linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
        ),
        2 * 2 * 2 * 16 * 100,
    ),
    "linear by another name": (
        MiniMaxConfig(**LAYERS, num_key_value_heads=2, head_dim=16, num_local_experts=2),
        2 * 2 * 2 * 2 * 16 * 100,
    ),
    "mamba": (
        GraniteMoeHybridConfig(
            **LAYERS, num_key_value_heads=2, layer_types=["mamba", "attention"] * 2, mamba_n_heads=4, mamba_d_head=32, mamba_expand=2,
            shared_intermediate_size=64, num_local_experts=0,
        ),
        2 * 2 * 2 * 2 * 16 * 100,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_what_an_engine_keeps_is_counted(name: str, model_folder: Any) -> None:
    config, expected = SHAPES[name]
    rows = api.memory(str(model_folder(config)), [100], [1]).rows
    assert next(r for r in rows if r["kv_format"] == "bf16")["kv_bytes"] == expected


@pytest.mark.parametrize("config", [MistralConfig(**LAYERS, num_key_value_heads=2, sliding_window=20),
                                    Qwen2Config(**LAYERS, num_key_value_heads=2, sliding_window=20, use_sliding_window=True, max_window_layers=0),
                                    Gemma3TextConfig(**LAYERS, num_key_value_heads=2, head_dim=16, sliding_window=20, layer_types=["sliding_attention"] * 4)],
                         ids=["mistral", "qwen2", "gemma3"])  # fmt: skip
def test_windows_are_those_of_transformers_own_cache(config: Any, model_folder: Any) -> None:
    rows = {r["kv_format"]: r["kv_bytes"] for r in api.memory(str(model_folder(config)), [100], [1]).rows}
    assert rows["bf16"] == 2 * 2 * 4 * 2 * 16 * 20
    channel = kv_format("int4_channel").storage_bits(20 + 31, 2, 16) // 8
    assert rows["int4_channel"] == 2 * 4 * channel


def test_a_window_that_is_not_used_is_none(model_folder: Any) -> None:
    config = Qwen2Config(**LAYERS, num_key_value_heads=2, sliding_window=20, use_sliding_window=False)
    assert api.memory(str(model_folder(config)), [100], [1]).rows[0]["kv_bytes"] == 2 * 2 * 4 * 2 * 16 * 100


@pytest.mark.parametrize(("name", "says"), [("latent", "caches a latent"), ("shared caches", "share another layer's cache")])
def test_a_cache_that_is_priced_but_out_of_reach_is_not_searched(name: str, says: str, model_folder: Any) -> None:
    done = run_autoq("search", "--model", str(model_folder(SHAPES[name][0])), "--kv-budget", "6bits")
    assert done.returncode == 2
    assert says in done.stderr


def test_what_fits_into_a_device(eight_heads: Path) -> None:
    weights = api.memory(str(eight_heads), [1024], [1]).rows[0]["weight_bytes"]
    found = api.memory(str(eight_heads), [32768], [1, 2], available=weights + 4 * GIB)
    assert [r["fits"] for r in found.rows if r["kv_format"] == "bf16"] == [True, False]
    plain = next(r for r in found.largest if r["kv_format"] == "bf16")
    assert plain["context_by_batch"] == {1: 32768, 2: 16384}
    assert plain["batch_by_context"] == {32768: 1}
    halved = next(r for r in found.largest if r["kv_format"] == "fp8")
    assert halved["context_by_batch"] == {1: 65536, 2: 32768}
    grouped = next(r for r in found.largest if r["kv_format"] == "int4_channel")
    for batch, context in grouped["context_by_batch"].items():
        priced = api.memory(str(eight_heads), [context, context + 1], [batch], available=weights + 4 * GIB)
        assert [r["fits"] for r in priced.rows if r["kv_format"] == "int4_channel"] == [True, False]
    nothing = api.memory(str(eight_heads), [1024], [1], available=weights)
    assert nothing.largest[0]["context_by_batch"] == {1: 0}


def test_an_engine_counts_whole_pages_and_its_own_formats(eight_heads: Path) -> None:
    rows = api.memory(str(eight_heads), [33], [2], engine="vllm").rows
    assert {r["kv_format"] for r in rows} == {"bf16", "fp8", "fp8_cast", "fp8_e5m2", "nvfp4", "int8_head"}
    assert next(r for r in rows if r["kv_format"] == "bf16")["kv_bytes"] == 2 * 2 * 2 * 32 * 8 * 128 * 48
    on_a100 = {r["kv_format"] for r in api.memory(str(eight_heads), [33], [2], target="a100").rows}
    assert {"int4_token", "int8_head", "bf16"} <= on_a100
    assert not {"fp8", "nvfp4", "mxfp4"} & on_a100
    assert kv_format("int8_head").storage_bits(10, 8, 128) == 10 * 8 * (8 * 128 + 32)
    assert kv_format("q8_0").storage_bits(10, 8, 128) == 10 * 8 * 128 * 8.5
    assert kv_format("nvfp4_affine").storage_bits(10, 8, 128, batch=3) == 3 * 10 * 8 * 128 * 4.5 + 16 * 8 * 128
