"""AutoRound, torchao and GPTQModel run what autoq exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from autoq.formats.catalog import WEIGHT_FORMATS
from autoq.formats.format import Format
from autoq.model import load
from tests.conftest import llama_config
from tests.consumers.conftest import Bench, Driver, apart, exported, formats_of

pytestmark = pytest.mark.consumers


def test_auto_round_rounds_every_layer_as_asked(bench: Bench, drive: Driver) -> None:
    path = bench.recipe([*formats_of("auto-round"), "bf16"])
    recipe, report = exported(bench, path, "auto-round")
    found = drive("auto-round", "auto_round", report.files[0])
    expected = bench.weights(recipe)
    assert set(found["weights"]) == set(expected)
    for name, weight in expected.items():
        # Where the largest magnitude occurs with both signs, AutoRound's full-range scale takes the positive one, autoq's the first.
        assert apart(found["weights"][name], weight, bench.original(name)) < 0.15, name
    assert sum(found["kl"]) == pytest.approx(sum(bench.kl(recipe)), rel=0.02)


def test_torchao_quantizes_every_layer_as_asked(bench: Bench, drive: Driver) -> None:
    path = bench.recipe([*formats_of("torchao"), "bf16"])
    recipe, report = exported(bench, path, "torchao")
    found = drive("auto-round", "torchao", report.files[0])
    expected = bench.weights(recipe)
    assert set(found["weights"]) == set(expected)
    for name, weight in expected.items():
        assert apart(found["weights"][name], weight, bench.original(name)) < 0.15, name
    assert sum(found["kl"]) == pytest.approx(sum(bench.kl(recipe)), rel=0.03)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_gptqmodel_saves_and_loads_every_layer_as_asked(bench: Bench, drive: Driver, method: str) -> None:
    path = bench.recipe([*formats_of("gptqmodel"), "bf16"])
    recipe, report = exported(bench, path, "gptqmodel")
    found = drive("auto-round", "gptqmodel", report.files[0], method=method, calibration=bench.long_calibration.tolist())
    wanted: dict[str, Format] = {}
    for entry in recipe.weights.values():
        fmt = WEIGHT_FORMATS[entry.format]
        if fmt.element is not None:
            wanted |= dict.fromkeys(entry.tensors, fmt)
    assert set(found["layers"]) == set(wanted)
    for name, fmt in wanted.items():
        assert fmt.element is not None
        bits, group = found["layers"][name]
        assert bits == fmt.element.bits
        assert fmt.block is None or group == fmt.block
    mine = sum(bench.kl(recipe))
    if method == "rtn":  # its codes are of float32 scales that it stores in float16
        assert sum(found["kl"]) == pytest.approx(mine, rel=0.05)
    else:
        assert sum(found["kl"]) < mine


@pytest.mark.xfail(
    strict=True,
    reason="AutoRound 0.16 drops layers whose sides are no multiple of 32 unless the general scheme is BF16 (seen in intel/auto-round#1211, decided in #911)",
)
def test_auto_round_takes_odd_layers_under_its_default_scheme(bench: Bench, drive: Driver, tmp_path: Path) -> None:
    """Why docs/export.md says scheme="BF16": listed layers are left in 16 bit without a word."""
    model = AutoModelForCausalLM.from_config(
        llama_config(hidden_size=64, intermediate_size=176, vocab_size=4096, num_hidden_layers=1)
    )
    model.save_pretrained(tmp_path / "odd")
    load.load_tokenizer(load.model_source("demo")).save_pretrained(tmp_path / "odd")
    name = "model.layers.0.mlp.down_proj"
    scheme = {"bits": 8, "group_size": -1, "sym": True, "data_type": "int", "act_bits": 16}
    (tmp_path / "layers.json").write_text(json.dumps({name: scheme}))
    assert model.get_submodule(name).weight.shape == (64, 176)
    found = drive("auto-round", "auto_round", tmp_path / "layers.json", model=str(tmp_path / "odd"), scheme="W4A16")
    assert name in found["weights"]
