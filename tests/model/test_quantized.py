"""`with quantized(...)` changes what it says and nothing else, for every layout, and everything is back afterwards."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
)

from autoq import codec
from autoq.formats import reference
from autoq.formats.calibration import Calibration
from autoq.formats.catalog import KV_FORMATS, kv_format, weight_format
from autoq.formats.format import KVFormat
from autoq.model.attention import intercepted
from autoq.model.quantized import Assignment, quantized
from autoq.model.units import find_units
from tests.conftest import SMALL, build, calibrated, llama_config

CONFIGS: dict[str, Any] = {
    "llama": llama_config(),
    "phi3": Phi3Config(num_key_value_heads=2, pad_token_id=0, **SMALL),
    "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64),
    "mixtral": MixtralConfig(num_key_value_heads=2, num_local_experts=4, **SMALL),
    "gpt_oss": GptOssConfig(num_key_value_heads=2, num_local_experts=4, head_dim=16, **SMALL),
    "qwen2": Qwen2Config(num_key_value_heads=2, **SMALL),
    "gemma3": Gemma3TextConfig(num_key_value_heads=1, head_dim=16, sliding_window=24, **SMALL),
}


def digest(model: PreTrainedModel) -> str:
    sha = hashlib.sha256()
    for name, p in model.named_parameters():
        sha.update(name.encode() + p.detach().numpy().tobytes() + str(p.requires_grad).encode())
    hooks = [(n, len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in m.__dict__) for n, m in model.named_modules()]
    sha.update(repr((hooks, model.config._attn_implementation)).encode())
    return sha.hexdigest()


@pytest.mark.parametrize("name", CONFIGS)
def test_every_layout_is_quantized_and_restored(name: str, ids: torch.Tensor) -> None:
    model = build(CONFIGS[name])
    units = find_units(model)
    before = digest(model)
    fmt = weight_format("int4_g32_asym")
    assignment = Assignment(
        dict.fromkeys([u.name for u in units.weights], fmt), dict.fromkeys([u.name for u in units.caches], kv_format("int4_token"))
    )
    tensors = [t for u in units.weights for t in u.tensors]
    kept = {t.parameter: model.get_parameter(t.parameter).detach().clone() for t in tensors}
    with torch.no_grad():
        original = model(ids).logits
        with quantized(model, units, assignment):
            changed = model(ids).logits
            for tensor in tensors:
                swapped = tensor.layout in ("conv1d", "experts_transposed")
                for now, was in zip(
                    model.get_parameter(tensor.parameter).reshape(-1, *tensor.shape[-2:]),
                    kept[tensor.parameter].reshape(-1, *tensor.shape[-2:]),
                    strict=True,
                ):
                    rows = reference.decode(reference.encode(fmt, was.T if swapped else was))
                    assert torch.equal(now, rows.T if swapped else rows)
        assert torch.equal(model(ids).logits, original)
    assert not torch.allclose(changed, original, atol=1e-4)
    assert digest(model) == before


def test_everything_is_back_after_an_exception(llama: PreTrainedModel) -> None:
    units = find_units(llama)
    before = digest(llama)
    assignment = Assignment({units.weights[0].name: weight_format("nvfp4_w4a4")}, {units.caches[0].name: kv_format("fp8_cast")})
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
        with quantized(llama, units, assignment):
            assert digest(llama) != before
            raise KeyboardInterrupt
    assert digest(llama) == before


def test_a_tied_head_is_quantized_in_both_places(ids: torch.Tensor) -> None:
    model = build(llama_config())
    units = find_units(model, ("lm_head",))
    head = next(u for u in units.weights if u.role == "head")
    with quantized(model, units, Assignment({head.name: weight_format("int4_g64")})):
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_activation_formats_round_the_input_too(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    units = find_units(llama)
    name = units.weights[0].name
    with torch.no_grad():
        with quantized(llama, units, Assignment({name: weight_format("nvfp4")})):
            weights_only = llama(ids).logits
        with quantized(llama, units, Assignment({name: weight_format("nvfp4_w4a4")})):
            both = llama(ids).logits
    assert not torch.equal(weights_only, both)


@pytest.mark.parametrize("name", [*KV_FORMATS, "int4_token+residual8", "int2_channel+residual5+sink32", "fp8_cast+sink3"])
def test_one_teacher_forced_pass_equals_decoding_token_by_token(name: str, ids: torch.Tensor) -> None:
    """A cache that packs tokens as they age, read one query at a time, gives the logits of the single pass.

    The model runs in float64: in float32 the two ways differ by 1e-7 in K, which moves a value on a rounding tie.
    """
    model = build(llama_config()).double()
    units = find_units(model)
    fmt = kv_format(name)
    known = calibrated(3.0, 2, 16)
    assignment = Assignment({}, dict.fromkeys([u.name for u in units.caches], fmt), {u.name: known for u in units.caches})
    with torch.no_grad():
        with quantized(model, units, assignment):
            at_once = model(ids, use_cache=False).logits
        stepwise = _decode_stepwise(model, ids, fmt, known)
    torch.testing.assert_close(at_once, stepwise, rtol=1e-5, atol=1e-5)


def _decode_stepwise(model: PreTrainedModel, ids: torch.Tensor, fmt: KVFormat, known: Calibration) -> torch.Tensor:
    """Feed one token at a time; each step reads a cache whose aged tokens were rounded when they aged, once."""
    stores: dict[tuple[int, str], torch.Tensor] = {}

    def aged(step: int) -> int:
        packed = step + 1 - fmt.residual
        return packed - packed % 32 if fmt.axis == "channel" else packed

    def handle(module: Any, query: Any, key: Any, value: Any, mask: Any, attend: Any, **options: Any) -> Any:
        new = []
        for kind, x in (("key", key), ("value", value)):
            step = x.shape[2] - 1
            store = stores.setdefault((module.layer_idx, kind), x[:, :, :0].clone())
            done, upto = store.shape[2], max(0, aged(step))
            if not fmt.is_original and upto > done:
                rounded = codec.fake_quantize_cache(x[:, :, done:upto], fmt, known)
                rounded = torch.where(torch.arange(done, upto).view(1, 1, -1, 1) < fmt.sink, x[:, :, done:upto], rounded)
                store = stores[module.layer_idx, kind] = torch.cat([store, rounded], dim=2)
            new.append(torch.cat([store, x[:, :, store.shape[2] :]], dim=2))
        return attend(module, query, new[0], new[1], mask, **options)

    past, rows = DynamicCache(config=model.config), []
    with intercepted(model, handle):
        for t in range(ids.shape[1]):
            rows.append(model(ids[:, t : t + 1], past_key_values=past, use_cache=True).logits)
    return torch.cat(rows, dim=1)
