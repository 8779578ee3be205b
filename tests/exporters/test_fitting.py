"""Rounding to what a consumer has: only as far as asked, never to something worse, and counted as it is stored."""

from __future__ import annotations

import pytest

from autoq.cost.engines import ENGINES
from autoq.exporters.consumer import same_numbers
from autoq.exporters.consumers import CONSUMERS
from autoq.exporters.fitting import fit, gaussian_error, next_better
from autoq.exporters.limits import computed, serving
from autoq.formats.catalog import KV_FORMATS, WEIGHT_FORMATS, kv_format, weight_format
from tests.exporters.conftest import subject_for


@pytest.mark.parametrize("name", [n for n, c in CONSUMERS.items() if c.weights is not None])
@pytest.mark.parametrize("wanted", WEIGHT_FORMATS)
def test_the_next_format_is_never_worse(name: str, wanted: str) -> None:
    shapes: list[tuple[int, ...]] = [(64, 256), (128, 256)]
    fmt = weight_format(wanted)
    got = next_better(fmt, CONSUMERS[name].formats(), shapes)
    assert gaussian_error(got) <= gaussian_error(fmt)
    assert got.storage_bits((4096, 4096)) >= fmt.storage_bits((4096, 4096))
    assert got.activation is None or fmt.activation is not None


def test_the_same_bytes_under_other_scales_are_told_apart_from_other_formats() -> None:
    subject = subject_for()
    units = [u.name for u in subject.units.weights]
    formats = {units[0]: "int4_g64_lsq", units[1]: "mxfp6_e2m3", units[2]: "int4_g64"}
    subject = subject.with_formats({la.name: weight_format(formats[la.unit]) for la in subject.layers if la.unit in formats}, {})
    fitted, losses = fit(subject, CONSUMERS["modelopt"])
    assert [(loss.what, loss.wanted, loss.got, loss.needs) for loss in losses] == [
        (units[0], "int4_g64_lsq", "int4_g64", "scales"), (units[1], "mxfp6_e2m3", "int8", "up"),
    ]  # fmt: skip
    assert fitted.weight_cost().searched_bits > subject.weight_cost().searched_bits


def test_a_layer_that_the_groups_do_not_divide_is_refused_by_name() -> None:
    from tests.conftest import llama_config

    subject = subject_for(llama_config(hidden_size=96, intermediate_size=160, num_attention_heads=2))
    subject = subject.with_formats({la.name: weight_format("int4_g64_half") for la in subject.layers if la.unit}, {})
    _, losses = fit(subject, CONSUMERS["llm-compressor"])
    assert {loss.why for loss in losses} == {
        "llm-compressor cannot: a width of 96 is no multiple of the group size 64",
        "llm-compressor cannot: a width of 160 is no multiple of the group size 64",
    }
    assert {loss.got for loss in losses} == {"nvfp4"}


def test_bits_are_counted_as_the_consumer_stores_them() -> None:
    """torchao keeps 4-bit integers unpacked: a byte a value, a zero point of a byte and a scale of 16 bits for every 64."""
    subject = subject_for()
    subject = subject.with_formats({la.name: weight_format("int4_g64_half") for la in subject.layers if la.unit}, {})
    assert subject.weight_cost().effective == 4.25
    assert subject.weight_cost(CONSUMERS["torchao"].overhead).effective == 8 + (16 + 8) / 64
    g_idx = sum(32 * la.width for la in subject.quantized) / subject.units.searched
    assert subject.weight_cost(CONSUMERS["gptqmodel"].overhead).effective == pytest.approx(4.25 + 4 / 64 + g_idx)
    subject = subject.with_formats({la.name: weight_format("int4_g64_asym") for la in subject.layers if la.unit}, {})
    assert subject.weight_cost().effective == 4 + (16 + 4) / 64
    assert subject.weight_cost(CONSUMERS["mlx"].overhead).effective == 4 + (16 + 16) / 64


def cache(subject_caches: list[tuple[str, str]], consumer: str) -> tuple[list[tuple[str, str]], list[str]]:
    subject = subject_for()
    pairs = {a.name: (kv_format(k), kv_format(v)) for a, (k, v) in zip(subject.attentions, subject_caches, strict=True)}
    fitted, losses = fit(subject.with_formats({}, pairs), CONSUMERS[consumer])
    return [(a.key.name, a.value.name) for a in fitted.attentions], [loss.why for loss in losses]


def test_k_apart_from_v_and_layers_apart_are_not_lost_in_silence() -> None:
    mixed = [("fp8", "fp8"), ("fp8", "nvfp4"), ("bf16", "fp8"), ("bf16", "bf16"), ("fp8", "fp8"), ("fp8", "fp8")]
    assert cache(mixed, "modelopt") == (mixed, [])
    got, why = cache(mixed, "vllm")  # one dtype, and layers in 16 bit: K in 16 bit takes the whole layer along
    assert got == [("fp8", "fp8"), ("fp8", "fp8"), ("bf16", "bf16"), ("bf16", "bf16"), ("fp8", "fp8"), ("fp8", "fp8")]
    assert len(why) == 2
    got, why = cache(mixed, "sglang")
    assert got == [("bf16", "bf16")] * 6
    assert set(why) == {"sglang takes one format for K and V of all layers", "sglang has no nvfp4 cache"}
    got, _ = cache([("int4_token", "int4_token")] * 6, "llama.cpp")
    assert got == [("q4_0", "q4_0")] * 6
    got, _ = cache([("nvfp4_rotate", "nvfp4")] * 6, "llama.cpp")  # what rotation is worth is not known: elements of more bits
    assert got == [("q8_0", "q4_0")] * 6
    got, _ = cache([("int8_token+residual64", "q4_0")] * 6, "llama.cpp")
    assert got == [("bf16", "q4_0")] * 6


def test_a_search_for_a_consumer_takes_the_rounding_that_it_computes() -> None:
    wanted = [weight_format(n) for n in ("fp8", "int8", "int4_g64_lsq", "nvfp4_4over6", "mxfp6_e2m3", "int3_g64_asym_lsq")]
    assert [f.name for f in computed(CONSUMERS["llm-compressor"], wanted)] == [
        "fp8",
        "int8_half",
        "int4_g64_half",
        "int3_g64_asym",
        "nvfp4",
    ]
    assert {f.name for f in computed(CONSUMERS["llama.cpp"], wanted)} == {"q8_0", "q5_0", "q4_0", "mxfp4"}
    engine = serving(CONSUMERS["modelopt"], ENGINES["vllm"])
    assert set(engine.kv_formats or ()) == {"fp8", "fp8_cast", "int8_head", "nvfp4"}
    assert engine.mixing == "one and skipped"


def test_every_name_in_every_consumer_is_a_format() -> None:
    for consumer in CONSUMERS.values():
        assert all(name in WEIGHT_FORMATS for name in consumer.weights or ())
        assert all(name in KV_FORMATS for name in consumer.caches or ())
        formats = consumer.formats() if consumer.weights is not None else ()
        assert not [(a.name, b.name) for i, a in enumerate(formats) for b in formats[:i] if same_numbers(a, b)]
