"""llm-compressor runs what autoq exports: the saved checkpoint says the same, holds the same weights, and measures the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from autoq import api
from autoq.recipe import read_recipe
from tests.consumers.conftest import Bench, Driver, apart, exported, formats_of

pytestmark = [pytest.mark.consumers, pytest.mark.parametrize("bench", ["bfloat16"], indirect=True)]


# It divides by scales in bfloat16, whose 8 bits are few beside those of a code: about 3 % of E4M3 codes and a quarter of the int8 codes come
# out one off, and int8's error doubles. Limits of `apart`.
IN_BFLOAT16 = {"fp8": 0.5, "fp8_w8a8": 0.5, "int8_half": 1.5, "int8_w8a8_half": 1.5}


def test_oneshot_saves_what_autoq_means(bench: Bench, drive: Driver, tmp_path: Path) -> None:
    layers = dict.fromkeys(range(6), ("fp8", "fp8"))
    path = bench.recipe([*formats_of("llm-compressor"), "bf16"], layers)
    recipe, report = exported(bench, path, "llm-compressor")
    names = [t for e in recipe.weights.values() for t in e.tensors]
    found = drive("llm-compressor", "llm_compressor", report.files[0], names=names)

    imported = api.import_recipe(tmp_path / "checkpoint", "demo", out=tmp_path / "imported.yaml").recipe
    assert {n: f.name for n, f in imported.weight_formats().items()} == {n: f.name for n, f in recipe.weight_formats().items()}
    assert imported.cache_formats() == recipe.cache_formats()

    assert set(found["scales"]) == {layer.module for layer in recipe.kv}
    formats = {t: e.format for e in recipe.weights.values() for t in e.tensors}
    for name, weight in bench.weights(recipe, share_tensor_scales=True).items():
        original, written = bench.original(name), found["weights"][name]
        assert apart(written, weight, original) < IN_BFLOAT16.get(formats[name], 0.3), name
        assert 0.7 < float((written - original).square().sum() / (weight - original).square().sum()) < 2.5, name
    mine = bench.kl(recipe)
    assert sum(found["kl"]) == pytest.approx(sum(mine), rel=0.05)


def test_the_cache_is_calibrated_as_autoq_does(bench: Bench, drive: Driver) -> None:
    path = bench.recipe(["bf16"], dict.fromkeys(range(6), ("fp8", "fp8")))
    recipe, report = exported(bench, path, "llm-compressor")
    found = drive("llm-compressor", "llm_compressor", report.files[0], names=[])
    for layer in recipe.kv:
        k_scale, v_scale = found["scales"][layer.module]
        assert k_scale * 448 == pytest.approx(layer.key.absmax, rel=0.01)
        assert v_scale * 448 == pytest.approx(layer.value.absmax, rel=0.01)
    assert sum(found["kl"]) == pytest.approx(sum(bench.kl(recipe)), rel=0.1)


def test_nothing_is_quantized_in_the_cache_unless_asked(bench: Bench, drive: Driver) -> None:
    path = bench.recipe(["fp8", "bf16"])
    recipe, report = exported(bench, path, "llm-compressor")
    found = drive(
        "llm-compressor", "llm_compressor", report.files[0], names=[t for e in recipe.weights.values() for t in e.tensors]
    )
    assert found["scales"] == {}
    assert found["config"]["kv_cache_scheme"] is None
    assert read_recipe(path) == recipe


@pytest.mark.xfail(
    strict=True,
    reason="compressed-tensors 0.19: the attention of vllm-project/compressed-tensors#436 is hooked in for the whole model, and modules without a scheme fail",
)
def test_some_layers_of_the_cache_alone(bench: Bench, drive: Driver, tmp_path: Path) -> None:
    """Why autoq exports one cache format for all layers: a group that targets some attention modules is a correct recipe, and fails."""
    path = bench.recipe(["bf16"])
    _, report = exported(bench, path, "llm-compressor")
    data = yaml.safe_load(report.files[0].read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    group = {"targets": ["model.layers.1.self_attn"], "input_activations": scheme}
    data["autoq_stage"]["autoq_modifiers"]["QuantizationModifier"]["config_groups"] = {"cache": group}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(data))
    found = drive("llm-compressor", "llm_compressor", tmp_path / "recipe.yaml", names=[])
    assert set(found["scales"]) == {"model.layers.1.self_attn"}
