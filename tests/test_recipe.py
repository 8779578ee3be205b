"""recipe.yaml: stands alone, reads back strictly, and its schema is current."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from autoq import api, recipe_schema
from autoq.errors import UserError
from autoq.formats.catalog import KV_FORMATS, WEIGHT_FORMATS, kv_format, weight_format
from autoq.formats.format import KVFormat
from autoq.model.load import load_config, model_source
from autoq.model.units import find_units
from autoq.recipe import Recipe, json_schema, read_recipe, to_yaml
from autoq.recipe_formats import decode_mean, describe, encode_mean, format_of, kv_format_of


@pytest.fixture
def recipe_path(demo_search: dict[str, Any]) -> Path:
    return Path(demo_search["cwd"], demo_search["json"]["recipe"])


def changed(path: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    data = yaml.safe_load(path.read_text())
    change(data)
    out = tmp_path / "changed.yaml"
    out.write_text(yaml.safe_dump(data, sort_keys=False))
    return out


def nameless(fmt: KVFormat) -> KVFormat:
    """The block format inside a KV format has a name of its own, which the file does not repeat."""
    return replace(fmt, values=replace(fmt.values, name=""))


def test_a_recipe_reads_back_as_it_was_written(recipe_path: Path) -> None:
    recipe = read_recipe(recipe_path)
    assert to_yaml(recipe) == recipe_path.read_text()
    assert recipe.weight_formats() == {u: weight_format(e.format) for u, e in recipe.weights.items()}
    for unit, fmt in recipe.cache_formats().items():
        assert nameless(fmt) == nameless(kv_format(fmt.name)), unit


def test_every_format_is_written_out_in_full() -> None:
    for name, fmt in WEIGHT_FORMATS.items():
        assert format_of(name, {name: describe(fmt)}) == fmt
    for name in [*KV_FORMATS, "int2_channel+residual128+sink32", "nvfp4+refresh256"]:
        assert nameless(kv_format_of(name, {name: describe(kv_format(name))})) == nameless(kv_format(name))
    tiers = kv_format("nvfp4_rotate+sink4+tier512>int8_token+tier64>int4_token")
    entries = {one.name: describe(one) for one in tiers.chain}
    found = kv_format_of(tiers.name, entries)
    assert [nameless(replace(a, older=None)) for a in found.chain] == [nameless(replace(b, older=None)) for b in tiers.chain]
    assert found.packed_tokens(10_000) == tiers.packed_tokens(10_000) == (512, 64, 9420)


def test_a_format_that_leads_back_to_itself_is_refused() -> None:
    entry = describe(kv_format("int8_token")).model_copy(update={"tier": 8, "older": "b"})
    with pytest.raises(UserError, match="unknown older format of b: 'a'"):
        kv_format_of("a", {"a": entry, "b": entry.model_copy(update={"older": "a"})})


def test_a_mean_reads_back_and_a_wrong_one_is_named() -> None:
    mean = torch.randn(3, 8).half().float()
    text = encode_mean(mean)
    assert text is not None
    assert torch.equal(decode_mean(text, 24, "layer.key").view(3, 8), mean)
    for wrong, says in (
        (text, "must be 25 finite"),
        ("###", "not base64"),
        ("AA==", "not base64 of float16"),
        (encode_mean(mean / 0), "must be 24 finite"),
    ):
        with pytest.raises(UserError, match=f"mean of layer.key.*{says}"):
            decode_mean(str(wrong), 25 if "25" in says else 24, "layer.key")


def test_the_schema_is_current_and_holds_for_the_recipe(recipe_path: Path) -> None:
    assert recipe_schema.PATH.read_text() == recipe_schema.text(), "run `make schema`"
    jsonschema.validate(yaml.safe_load(recipe_path.read_text()), json_schema())


def test_every_tensor_is_named_and_the_totals_add_up(recipe_path: Path, demo_search: dict[str, Any]) -> None:
    recipe = read_recipe(recipe_path)
    model = AutoModelForCausalLM.from_config(load_config(model_source("demo")))
    units = find_units(model)
    api.check_names(recipe, units)
    assert {t for e in recipe.weights.values() for t in e.tensors} == {t.name for u in units.weights for t in u.tensors}
    bits = sum(e.bits * e.numel for e in recipe.weights.values()) / sum(e.numel for e in recipe.weights.values())
    assert bits == pytest.approx(recipe.totals.bits, rel=1e-4)
    assert recipe.totals.bits == demo_search["json"]["bits"] <= 4.501
    caches = [entry for layer in recipe.kv for entry in (layer.key, layer.value)]
    predicted = sum(e.predicted_kl or 0.0 for e in recipe.weights.values()) + sum(e.predicted_kl or 0.0 for e in caches)
    assert recipe.predicted is not None
    assert predicted == pytest.approx(recipe.predicted.kl, rel=1e-3)


def own_format(**changes: Any) -> dict[str, Any]:
    plain = {"element": "INT8", "block": None, "scale": "fp32", "rule": "absmax", "axis": "token", "static_scale": "none"}
    return {"own": {**plain, **changes}}


def use(data: dict[str, Any], entry: dict[str, Any]) -> None:
    data["kv_formats"].update(entry)
    data["kv"][0]["key"]["format"] = "own"


def rename_unit(data: dict[str, Any]) -> None:
    data["weights"]["model.layers.0.self_attn.qvk"] = data["weights"].pop("model.layers.0.self_attn.qkv")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(colour="red"), "unknown key at colour"),
        (lambda d: d["totals"].update(bit=4), r"unknown key at totals\.bit: 'bit'\. Did you mean 'bits'"),
        (lambda d: d.pop("weights"), "weights: Field required"),
        (lambda d: next(iter(d["weights"].values())).update(format="nvfp5"), "unknown format .* 'nvfp5'"),
        (lambda d: next(iter(d["formats"].values())).update(element="E9M9"), "unknown element"),
        (lambda d: next(iter(d["formats"].values())).update(scale="fp12"), r"formats\..*\.scale: Input should be"),
        (lambda d: next(iter(d["formats"].values())).update(rule="magic"), r"formats\..*\.rule: Input should be"),
        (lambda d: d.update(schema_version=2), "schema_version 2, this autoq reads 1"),
        (lambda d: d["totals"].update(bits="many"), r"totals\.bits"),
        (lambda d: d["totals"].update(bits=-1.0), r"totals\.bits"),
        (lambda d: d["totals"].update(kv_bits=float("nan")), r"totals\.kv_bits"),
        (lambda d: d["totals"].update(weight_bytes=-1), r"totals\.weight_bytes"),
        (lambda d: d["kv_formats"].update(own_format(scale="none")), "has a scale in none, but INT8 takes fp16, fp32"),
        (lambda d: d["kv_formats"].update(own_format(tier=16)), "has a tier without what follows it"),
        (
            lambda d: d["kv_formats"].update(own_format(element="E4M3", scale="none", static_scale=0.0)),
            "static scale that covers 0",
        ),
        (lambda d: d["kv_formats"].update(own_format(element="E2M1", scale="e4m3", tensor_range=0.0)), r"tensor_range"),
        (
            lambda d: use(d, own_format(element="E2M1", scale="e4m3", block=16, static_scale="absmax", rotate=True)),
            "has no absmax_rotated",
        ),
        (lambda d: use(d, own_format(element="E4M3", scale="none", static_scale=1.0, center=True)), "has no mean"),
        (lambda d: d["kv"].append(d["kv"][0]), "has layer 0 twice"),
    ],
    ids=[
        "key",
        "nested-key",
        "missing",
        "format",
        "element",
        "scale",
        "rule",
        "version",
        "type",
        "negative",
        "nan",
        "bytes",
        "int-scale",
        "tier",
        "static-0",
        "range-0",
        "no-rotated",
        "no-mean",
        "twice",
    ],
)
def test_what_is_wrong_is_named(recipe_path: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_recipe(changed(recipe_path, tmp_path, change))


def test_names_that_the_model_lacks_are_named_with_the_nearest(recipe_path: Path, tmp_path: Path) -> None:
    recipe = read_recipe(changed(recipe_path, tmp_path, rename_unit))
    units = find_units(AutoModelForCausalLM.from_config(load_config(model_source("demo"))))
    with pytest.raises(UserError, match=r"Did you mean 'model\.layers\.0\.self_attn\.qkv'"):
        api.recipe_assignment(recipe, units)


@pytest.mark.parametrize("content", ["a: [", "- 1\n- 2", "", "\x00", "schema_version: 1\nschema_version: 1", "? [a]\n: 1"])
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(content)
    with pytest.raises(UserError):
        read_recipe(path)


def test_the_json_of_show_has_every_unit(recipe_path: Path) -> None:
    recipe: Recipe = read_recipe(recipe_path)
    view = api.show(recipe)
    assert len(view["units"]) == len(recipe.weights) + 2 * len(recipe.kv)
    assert set(view["units"][0]) == {"unit", "kind", "role", "layer", "format", "bits", "numel", "predicted_kl", "tensors"}
    json.dumps(view, allow_nan=False)
