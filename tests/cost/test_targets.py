"""What devices can run, and what engines can serve."""

from __future__ import annotations

import pytest

from autoq.cost.engines import ENGINES, engine_of, loads
from autoq.cost.targets import TARGETS, target_of
from autoq.errors import UserError
from autoq.formats.catalog import KV_FORMATS, WEIGHT_FORMATS, kv_format, weight_format


@pytest.mark.parametrize(
    ("target", "fmt", "runs"),
    [
        ("a100", "fp8_cast", False), ("l40s", "fp8_cast", True), ("h100", "nvfp4", False), ("b200", "nvfp4", True), ("rtx5090", "mxfp4", True),
        ("a100", "int4_token", True), ("h100", "mxfp8", True), ("any", "nvfp4", True), ("cpu", "nvfp4", True),
    ],
)  # fmt: skip
def test_caches(target: str, fmt: str, runs: bool) -> None:
    assert (target_of(target).refusal(kv_format(fmt)) is None) == runs


@pytest.mark.parametrize(
    ("target", "fmt", "runs"),
    [("a100", "nvfp4", True), ("a100", "fp8", True), ("a100", "fp8_w8a8", False), ("h100", "fp8_w8a8", True), ("h100", "nvfp4_w4a4", False),
     ("b200", "nvfp4_w4a4", True), ("h100", "mxfp8_w8a8", False), ("a100", "int8_w8a8", True), ("a100", "mxfp6_e2m3", True), ("h100", "mxfp4", True)],
)  # fmt: skip
def test_weights_alone_decode_anywhere_and_products_need_the_numbers(target: str, fmt: str, runs: bool) -> None:
    reason = target_of(target).refusal(weight_format(fmt))
    assert (reason is None) == runs
    assert runs or "compute capability" in str(reason)


def test_every_tier_must_run_and_variants_load_as_their_format_does() -> None:
    reason = target_of("a100").refusal(kv_format("int8_token+tier8>nvfp4"))
    assert reason is not None
    assert "E2M1" in reason
    vllm, llama_cpp = engine_of("vllm"), engine_of("llama.cpp")
    known = WEIGHT_FORMATS
    assert {n for n, f in known.items() if loads(vllm, f, known)} >= {"nvfp4", "nvfp4_lsq", "int4_g64_full", "fp8_w8a8", "int8"}
    assert not any(loads(vllm, known[n], known) for n in ("mxfp6_e2m3", "int3_g64_asym", "int2_g32_asym_lsq"))
    assert {n for n, f in known.items() if loads(llama_cpp, f, known)} >= {"q8_0", "q5_0", "q4_0", "mxfp4", "mxfp4_even"}
    assert not any(loads(llama_cpp, known[n], known) for n in ("nvfp4", "int8", "int4_g64", "fp8"))
    assert all(loads(engine_of("none"), f, known) for f in known.values())


def test_names() -> None:
    with pytest.raises(UserError, match="h100"):
        target_of("h10")
    with pytest.raises(UserError, match="vllm"):
        engine_of("vlm")
    assert all(name == target.name for name, target in TARGETS.items())
    for engine in ENGINES.values():
        assert engine.kv_formats is None or engine.kv_formats <= set(KV_FORMATS)
