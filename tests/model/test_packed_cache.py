"""The packed cache against transformers' own, against one teacher-forced pass, and against the cost model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, Gemma3TextConfig, MistralConfig, PreTrainedModel

from autoq.errors import UserError
from autoq.formats.calibration import Calibration
from autoq.formats.catalog import KV_FORMATS, kv_format
from autoq.formats.format import KVFormat
from autoq.measure.cache_statistics import CacheStatistics
from autoq.measure.damage import Candidates
from autoq.model.packed_cache import ORIGINAL, QuantizedKVCache
from autoq.model.packed_tokens import Backend, PackedTokens, kernels
from autoq.model.quantized import Assignment, quantized
from autoq.model.units import find_units
from tests.conftest import SMALL, build, calibrated, llama_config

FORMATS = [*KV_FORMATS, "int4_channel+residual8", "nvfp4+sink4+residual6", "int2_token+residual128", "int4_token+sink3",
           "int8_token+tier16>int4_token", "nvfp4_rotate+sink3+residual4+tier10>nvfp4_affine", "int8_channel+tier10>int2_channel",
           "int8_token+tier20>int4_channel", "fp8+tier8>int4_token+tier12>int2_token", "nvfp4+refresh16", "fp8_affine+refresh7+sink3+residual5"]  # fmt: skip
MODELS: dict[str, Any] = {
    "llama": llama_config(),
    "sliding": MistralConfig(num_key_value_heads=2, sliding_window=20, **SMALL),
    "mixed": Gemma3TextConfig(num_key_value_heads=1, head_dim=16, sliding_window=20, query_pre_attn_scalar=16, **SMALL,
                              layer_types=["sliding_attention", "full_attention"]),
}  # fmt: skip


def packed(model: PreTrainedModel, key: KVFormat, value: KVFormat, backend: Backend | None = None) -> QuantizedKVCache:
    layers = range(model.config.num_hidden_layers)
    return QuantizedKVCache.from_formats(
        dict.fromkeys(layers, (key, value)), dict.fromkeys(layers, known(model)), model.config, backend
    )


def known(model: PreTrainedModel) -> tuple[Calibration, Calibration]:
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return calibrated(9.0, config.num_key_value_heads, head_dim), calibrated(7.0, config.num_key_value_heads, head_dim)


def prompt(batch: int, tokens: int = 30) -> torch.Tensor:
    return torch.randint(2, 128, (batch, tokens), generator=torch.Generator().manual_seed(5))


def generate(model: PreTrainedModel, cache: Any, **options: Any) -> torch.Tensor:
    ids = prompt(3)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0  # left padding
    mask[2, :1] = 0
    with torch.no_grad():
        found: torch.Tensor = model.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=16,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            **options,
        )
    return found


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}], ids=["greedy", "beams", "two"]
)
@pytest.mark.parametrize("name", MODELS)
def test_in_16_bit_it_generates_what_the_dynamic_cache_does(name: str, options: dict[str, Any]) -> None:
    model = build(MODELS[name])
    expected = generate(model, DynamicCache(config=model.config), **options)
    assert torch.equal(generate(model, packed(model, ORIGINAL, ORIGINAL), **options), expected)


@pytest.mark.parametrize("name", MODELS)
def test_quantized_it_generates_with_batches_padding_and_beams(name: str) -> None:
    model = build(MODELS[name])
    key, value = kv_format("int8_channel"), kv_format("int8_token")
    for options in ({}, {"num_beams": 3}):
        found = generate(model, packed(model, key, value), **options)
        assert found.shape == generate(model, DynamicCache(config=model.config), **options).shape
    ids = prompt(2, 60)
    cache = packed(model, key, value)
    with torch.no_grad():
        expected = model(ids).logits
        close = torch.cat([model(part, past_key_values=cache).logits for part in ids.split(7, dim=1)], dim=1)
    assert cache.nbytes > 0
    assert 0 < float((close - expected).square().mean() / expected.var()) < 1e-3


@pytest.mark.parametrize("name", ["llama", "mixed"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_decoding_token_by_token_equals_one_pass(fmt: str, name: str) -> None:
    model = build(MODELS[name]).double()  # in float32 a value beside a rounding boundary may fall on either side of it
    units = find_units(model)
    ids = prompt(2, 70)
    key, value = kv_format(fmt), kv_format("int4_token" if "channel" in fmt else fmt)
    chosen = {u.name: key if u.kind == "key" else value for u in units.caches}
    of = {u.name: known(model)[u.kind == "value"] for u in units.caches}
    if name == "mixed" and (key.older or key.refresh):
        with pytest.raises(UserError, match="no tiers or refresh there"):
            packed(model, key, value)
        return
    cache = packed(model, key, value)
    with torch.no_grad():
        with quantized(model, units, Assignment({}, chosen, of)):
            expected = model(ids).logits
        steps = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(ids.shape[1])]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("heads", "dim", "tokens"), [(2, 16, 70), (3, 64, 129), (1, 80, 64), (2, 100, 33), (1, 256, 5)])
def test_it_holds_the_bytes_that_the_cost_model_counts(fmt: str, heads: int, dim: int, tokens: int) -> None:
    found = kv_format(fmt)
    side = PackedTokens(found, calibrated(5.0, heads, dim), Backend())
    x = torch.randn(1, heads, tokens, dim, generator=torch.Generator().manual_seed(0))
    for part in x.split(7, dim=2):
        side.append(part)
    assert side.tokens == tokens
    assert 8 * side.nbytes == found.storage_bits(tokens, heads, dim)
    assert side.read().shape == x.shape


@pytest.mark.parametrize(
    "fmt",
    [
        "nvfp4",
        "nvfp4_rotate",
        "nvfp4_affine",
        "fp8",
        "mxfp4",
        "int4_token",
        "int2_token",
        "int8_token",
        "int4_channel",
        "int2_channel",
    ],
)
@pytest.mark.parametrize("dim", [16, 80, 100])
def test_the_kernels_hold_the_same_bytes_as_the_reference(fmt: str, dim: int) -> None:
    x = torch.randn(2, 3, 41, dim, generator=torch.Generator().manual_seed(1))
    ours, theirs = (PackedTokens(kv_format(fmt), calibrated(3.0, 3, dim), backend) for backend in (kernels(), Backend()))
    for part in x.split([33, 1, 7], dim=2):
        ours.append(part)
        theirs.append(part)
    assert torch.equal(ours.codes.used, theirs.codes.used)
    assert torch.equal(ours.scales.used, theirs.scales.used)
    if ours.zeros is not None and theirs.zeros is not None:
        assert torch.equal(ours.zeros.used, theirs.zeros.used)
    assert torch.equal(ours.read(), theirs.read())


@pytest.mark.parametrize(
    "fmt",
    [
        "bf16",
        "nvfp4",
        "nvfp4_affine",
        "int4_token",
        "int4_channel+residual3",
        "int2_token+sink4+residual5",
        "int8_token+tier20>int4_token",
        "nvfp4+refresh16",
        "fp8_affine+refresh5",
    ],
)
def test_cropping_and_reordering_keep_what_was_read(fmt: str) -> None:
    side = PackedTokens(kv_format(fmt), calibrated(3.0, 2, 16), Backend())
    side.append(torch.randn(3, 2, 75, 16, generator=torch.Generator().manual_seed(2)))
    before = side.read()
    side.select(torch.tensor([2, 0, 0]))
    assert torch.equal(side.read(), before[[2, 0, 0]])
    for removed in (1, 4, 40, 28):
        kept = side.tokens - removed
        expected = side.read()[:, :, :kept]
        side.drop_last(removed)
        assert side.tokens == kept
        assert torch.equal(side.read(), expected)


def test_a_refreshed_scale_goes_on_after_a_crop_as_without_it() -> None:
    x = torch.randn(2, 2, 60, 16, generator=torch.Generator().manual_seed(4)) + 20
    known = CacheStatistics().with_values(x).calibration()
    for name in ("nvfp4+refresh8", "fp8_affine+refresh8"):
        whole, cropped = (PackedTokens(kv_format(name), known, Backend()) for _ in range(2))
        whole.append(x)
        for start, stop, removed in ((0, 20, 4), (16, 30, 14), (16, 16, 0), (16, 60, 0)):
            cropped.append(x[:, :, start:stop])
            cropped.drop_last(removed)
        assert cropped.tokens == 60
        error = (cropped.read() - x).square().mean() / (whole.read() - x).square().mean()
        assert 0.8 < float(error) < 1.25  # what a dropped segment's next scale covers is told from decoded tokens
        empty = PackedTokens(kv_format(name), known, Backend())
        empty.append(100 * x[:, :, :5])
        empty.drop_last(5)
        empty.append(x)
        assert torch.equal(empty.read(), whole.read())


def test_a_bf16_cache_crops_as_the_dynamic_cache_does(llama: PreTrainedModel) -> None:
    ids = prompt(2, 40)
    ours, theirs = packed(llama, ORIGINAL, ORIGINAL), DynamicCache(config=llama.config)
    logits = []
    for cache in (ours, theirs):
        with torch.no_grad():
            llama(ids, past_key_values=cache)
            cache.crop(-10)
            logits.append(llama(ids[:, 30:], past_key_values=cache).logits)
    assert torch.equal(*logits)


def test_what_a_window_forgets_is_refused() -> None:
    model = build(MODELS["sliding"])
    cache = packed(model, kv_format("nvfp4"), ORIGINAL)
    with torch.no_grad():
        model(prompt(1, 30), past_key_values=cache)
    with pytest.raises(RuntimeError, match="tokens that left the window are gone"):
        cache.crop(-1)
    for name in ("int8_token+tier8>int4_channel", "nvfp4+refresh8"):
        with pytest.raises(UserError, match="no tiers or refresh there"):
            packed(model, kv_format(name), ORIGINAL)
    units = find_units(model)
    assert all(u.window == 20 for u in units.caches)
    some = (kv_format("nvfp4"), kv_format("nvfp4+refresh8"))
    assert Candidates((), some, some).for_unit(units.caches[0]) == some[:1]


def test_a_static_scale_without_calibration_is_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(UserError, match="layer 0 has no calibration"):
        QuantizedKVCache.from_formats({0: (kv_format("fp8"), ORIGINAL)}, {}, llama.config)


def test_a_padded_batch_has_no_nan_and_is_close(llama: PreTrainedModel) -> None:
    ids = prompt(2, 50)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    units = find_units(llama)
    for name in ("int8_channel", "fp8+residual8"):
        chosen = {u.name: kv_format(name) for u in units.caches}
        of = {u.name: known(llama)[u.kind == "value"] for u in units.caches}
        with torch.no_grad():
            plain = llama(ids, attention_mask=mask).logits
            with quantized(llama, units, Assignment({}, chosen, of)):
                found = llama(ids, attention_mask=mask).logits
            stepwise = packed(llama, kv_format(name), kv_format(name))
            steps = [
                llama(part, attention_mask=mask[:, : 10 * i + 10], past_key_values=stepwise).logits
                for i, part in enumerate(ids.split(10, dim=1))
            ]
        real = mask.bool()
        assert torch.isfinite(found[real]).all()
        assert torch.isfinite(torch.cat(steps, dim=1)[real]).all()
        assert float((found[real] - plain[real]).square().mean() / plain[real].var()) < 1e-2
        assert float((torch.cat(steps, dim=1)[real] - plain[real]).square().mean() / plain[real].var()) < 1e-2


def test_a_cropped_cache_goes_on(llama: PreTrainedModel) -> None:
    ids = prompt(2, 40)
    cache = packed(llama, kv_format("nvfp4"), kv_format("int8_token"))
    with torch.no_grad():
        llama(ids, past_key_values=cache)
        cache.crop(-10)
        assert cache.get_seq_length() == 30
        again = llama(ids[:, 30:], past_key_values=cache).logits
        cache.reset()
        assert cache.get_seq_length() == 0
        whole = llama(ids, past_key_values=cache).logits
    torch.testing.assert_close(again, whole[:, 30:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "fmt",
    [
        "nvfp4",
        "int4_channel",
        "int4_channel+residual8",
        "int4_token+sink3",
        "int2_channel+sink32",
        "int8_token+tier20>int4_channel",
    ],
)
def test_prefill_in_steps_equals_one_pass(fmt: str) -> None:
    model = build(MODELS["llama"]).double()
    units = find_units(model)
    ids = prompt(2, 120)
    chosen = {u.name: kv_format(fmt) for u in units.caches}
    cache = packed(model, kv_format(fmt), kv_format(fmt))
    sizes = cache.steps(120, 50)
    assert sum(sizes) == 120
    assert len(sizes) < 12
    with torch.no_grad():
        with quantized(model, units, Assignment({}, chosen, {u.name: known(model)[u.kind == "value"] for u in units.caches})):
            expected = model(ids).logits
        parts = [model(part, past_key_values=cache).logits for part in ids.split(sizes, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-5, atol=1e-5)


def test_a_residual_by_token_is_prefilled_token_by_token(llama: PreTrainedModel) -> None:
    assert packed(llama, kv_format("nvfp4+residual8"), ORIGINAL).steps(12, 50) == [8, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "says"),
    [("int4_channel+sink4", "whole groups of 32 tokens"), ("int8_token+sink4+tier8>int4_channel", "whole groups of 32 tokens"),
     ("nvfp4+sink4+sink8", "given twice"), ("nvfp4+sink0", "no effect"), ("bf16+sink4", "no effect"),
     ("int8_token+tier8", "write a tier with what follows it"), ("int8_token>int4_token", "write a tier with what follows it"),
     ("int8_token+refresh8", "only static scales can be refreshed"), ("nvfp4+refresh8+tier8>int4_token", "do not go together"),
     ("int8_token+tier8>int4_token+sink4", "by sink and residual of the first format"), ("int8_token+tier8>bf16", "of the first format")],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        kv_format(name)
