"""A model that decodes straight from packed bytes, against the same cache decoded first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma3TextConfig, MistralConfig, PreTrainedModel, Qwen2Config

from autoq.errors import AutoqError
from autoq.formats.calibration import Calibration
from autoq.formats.catalog import kv_format
from autoq.kernels import attention as kernel
from autoq.model.packed_attention import Undecoded, packed_attention
from autoq.model.packed_cache import QuantizedKVCache
from autoq.model.packed_tokens import Backend, kernels
from tests.conftest import SMALL, build, llama_config

LAYER_TYPES = ["sliding_attention", "full_attention"]
MODELS: dict[str, Any] = {
    "llama": llama_config(),
    "biases": Qwen2Config(num_key_value_heads=1, **SMALL),
    "sliding": MistralConfig(num_key_value_heads=2, sliding_window=20, **SMALL),
    "softcap": Gemma2Config(num_key_value_heads=2, head_dim=20, sliding_window=20, attn_logit_softcapping=5.0, layer_types=LAYER_TYPES, **SMALL),
    "mixed": Gemma3TextConfig(num_key_value_heads=1, head_dim=16, sliding_window=20, layer_types=LAYER_TYPES, **SMALL),
}  # fmt: skip


def cache_for(model: PreTrainedModel, key: str, value: str, backend: Backend) -> QuantizedKVCache:
    layers = range(model.config.num_hidden_layers)
    formats = kv_format(key), kv_format(value)
    return QuantizedKVCache.from_formats(
        dict.fromkeys(layers, formats),
        dict.fromkeys(layers, (Calibration(9.0, 9.0, 9.0), Calibration(7.0, 7.0, 7.0))),
        model.config,
        backend,
    )


def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the tokens that each call of the kernel reads."""
    seen: list[int] = []
    run = kernel.attention

    def counted(query: torch.Tensor, key: Any, value: Any, scaling: float, **options: Any) -> torch.Tensor:
        seen.append(key.tokens)
        return run(query, key, value, scaling, **options)

    monkeypatch.setattr(kernel, "attention", counted)
    return seen


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("key", "value"),
    [("nvfp4", "int4_token"), ("int8_channel+residual8", "fp8_cast+sink3"), ("nvfp4_rotate+residual3", "nvfp4_affine")],
)
def test_generation_from_bytes_equals_generation_from_decoded_tokens(
    name: str, key: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(MODELS[name])
    model.set_attn_implementation("eager")  # sdpa leaves the softcap out in older releases
    ids = torch.randint(2, 128, (2, 30), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0  # left padding
    given: dict[str, Any] = {
        "attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None,
        "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    seen = calls(monkeypatch)
    plain = model.generate(ids, past_key_values=cache_for(model, key, value, Backend()), **given)
    assert not seen
    with packed_attention(model):
        found = model.generate(ids, past_key_values=cache_for(model, key, value, kernels()), **given)
    assert len(seen) == 2 * 4
    assert torch.equal(found.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(plain.logits), rtol=1e-3, atol=1e-3)


def test_beams_are_reordered_in_packed_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(MODELS["llama"])
    ids = torch.randint(2, 128, (2, 20), generator=torch.Generator().manual_seed(3))
    given: dict[str, Any] = {"max_new_tokens": 4, "num_beams": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    seen = calls(monkeypatch)
    plain = model.generate(ids, past_key_values=cache_for(model, "nvfp4", "int4_token", Backend()), **given)
    with packed_attention(model):
        found = model.generate(ids, past_key_values=cache_for(model, "nvfp4", "int4_token", kernels()), **given)
    assert seen
    assert torch.equal(found, plain)


def test_a_layer_with_tiers_is_decoded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(MODELS["llama"])
    ids = torch.randint(2, 128, (2, 24), generator=torch.Generator().manual_seed(3))
    given: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    seen = calls(monkeypatch)
    tiers = ("nvfp4", "int8_token+tier8>int4_token")
    plain = model.generate(ids, past_key_values=cache_for(model, *tiers, Backend()), **given)
    with packed_attention(model):
        found = model.generate(ids, past_key_values=cache_for(model, *tiers, kernels()), **given)
    assert not seen
    assert torch.equal(found, plain)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_without_the_block_any_attention_decodes_first(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(MODELS["llama"])
    model.set_attn_implementation(implementation)
    ids = torch.randint(2, 128, (2, 12), generator=torch.Generator().manual_seed(3))
    seen = calls(monkeypatch)
    outputs = []
    for backend in (kernels(), Backend()):
        cache = cache_for(model, "nvfp4", "int8_token", backend)
        with torch.no_grad():
            outputs.append([model(part, past_key_values=cache).logits for part in ids.split([10, 1, 1], dim=1)][-1])
    assert not seen
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)


def test_undecoded_tokens_know_their_shape_and_their_moment() -> None:
    model = build(MODELS["llama"])
    cache = cache_for(model, "nvfp4", "nvfp4", kernels())
    with torch.no_grad():
        model(torch.ones(1, 9, dtype=torch.int64), past_key_values=cache)
    layer = cache.packed_layers[0]
    new = torch.ones(1, 2, 1, 16)
    early, _ = layer.update(new, new)
    assert isinstance(early, Undecoded)
    assert early.shape == (1, 2, 10, 16)
    assert early.dtype == torch.float32
    assert torch.equal(early * 1, layer.key.read())
    layer.update(new, new)
    with pytest.raises(AutoqError, match="held 10 tokens when these were taken from it, and holds 11 now"):
        early.sum()
