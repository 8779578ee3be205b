"""KV bytes by layer: the published sizes, windows, residual and sink tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig

from autoq import api
from autoq.errors import UserError
from autoq.formats.catalog import kv_format
from tests.conftest import SMALL

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
    rows = api.memory(str(eight_heads), [32768], [1])
    assert next(r for r in rows if r["kv_format"] == name)["kv_bytes"] == gib * GIB


def test_rows_are_formats_by_contexts_by_batches(eight_heads: Path) -> None:
    rows = api.memory(str(eight_heads), [1024, 2048], [1, 8])
    assert len({(r["context"], r["batch"]) for r in rows}) == 4
    by = {(r["kv_format"], r["context"], r["batch"]): r for r in rows}
    assert by["nvfp4", 2048, 8]["kv_bytes"] == 16 * by["nvfp4", 1024, 1]["kv_bytes"]
    for row in rows:
        assert row["total_bytes"] == row["kv_bytes"] + row["weight_bytes"]


def test_a_window_caps_the_layers_that_have_one(model_folder: Any) -> None:
    types = ["sliding_attention", "full_attention"]
    sizes = {**SMALL, "max_position_embeddings": 4096}
    folder = model_folder(Gemma3TextConfig(num_key_value_heads=1, head_dim=16, sliding_window=64, layer_types=types, **sizes))
    rows = api.memory(str(folder), [1024], [1])
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
