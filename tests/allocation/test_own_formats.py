"""Formats that a search space defines: refused in one sentence, or equal in kernel and reference, whatever the width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autoq.allocation.space import OWN_ASYMMETRIC, OWN_BLOCKS, OWN_SYMMETRIC, load_space
from autoq.errors import UserError
from autoq.formats import reference
from autoq.formats.catalog import is_own, weight_format
from autoq.kernels.decode import decode
from autoq.kernels.encode import encode
from autoq.kernels.launch import interpreted

DEVICE = torch.device("cpu" if interpreted() else "cuda")
COMBINATIONS = [
    *((f"INT{bits}", "fp16", rule, 32) for bits in OWN_SYMMETRIC for rule in ("absmax", "full_range", "half_step")),
    *((f"INT{bits} asym", "fp16", rule, 16) for bits in OWN_ASYMMETRIC for rule in ("minmax", "least_squares")),
    *(("INT6", "fp16", "least_squares", block) for block in OWN_BLOCKS),
    *((element, "e8m0", rule, 64) for element in ("E2M1", "E2M3", "E3M2", "E4M3", "E5M2") for rule in ("floor", "ceil", "even")),
    *((element, "e4m3", rule, 32) for element in ("E2M1", "E2M3", "E3M2") for rule in ("absmax", "least_squares")),
]  # fmt: skip


def space(folder: Path, entry: str, name: str = "mine", kind: str = "formats") -> str:
    path = folder / "space.yaml"
    side = "weights" if kind == "formats" else "keys"
    path.write_text(f"{side}: [{name}]\n{kind}:\n  {name}: {entry}\n")
    return str(path)


@pytest.mark.parametrize(("element", "scale", "rule", "block"), COMBINATIONS)
def test_what_can_be_defined_is_the_same_in_kernel_and_reference(
    element: str, scale: str, rule: str, block: int, tmp_path: Path
) -> None:
    name = f"own_{element.lower().replace(' ', '')}_{scale}_{rule}_{block}"
    entry = f"{{element: {element}, block: {block}, scale: {scale}, rule: {rule}, tensor_scale: {str(scale == 'e4m3').lower()}}}"
    (fmt,) = load_space(space(tmp_path, entry, name)).weights
    assert is_own(fmt)
    assert weight_format(name) == fmt
    x = torch.randn(6, 301, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected, found = reference.encode(fmt, x), encode(fmt, x)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(decode(found), reference.decode(expected))
    assert float((decode(found) - x).norm() / x.norm()) < 0.6


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("{element: INT9, block: 32, scale: fp16, rule: absmax}", "unknown element of format mine: 'INT9'"),
        ("{element: INT7, block: 32, scale: fp16, rule: absmax}", "INT7 is not supported, choose 4 bits, 5 bits, 6 bits, 8 bits"),
        ("{element: INT2, block: 32, scale: fp16, rule: absmax}", "INT2 is not supported"),
        ("{element: INT6, block: 33, scale: fp16, rule: absmax}", "a block of 33 is not supported, choose 16, 32"),
        ("{element: INT6, block: null, scale: fp16, rule: absmax}", "a block of the whole row (null) is not supported"),
        ("{element: INT6, block: 32, scale: fp32, rule: absmax}", "take a scale in fp16, not fp32"),
        ("{element: INT6, block: 32, scale: fp16, rule: minmax}", "the rule minmax does not go with INT6, choose absmax"),
        ("{element: E2M1, block: 32, scale: none, rule: absmax}", "take a scale in e8m0 or e4m3, not none"),
        (
            "{element: INT6, blok: 32, scale: fp16, rule: absmax}",
            "unknown key in formats.mine of space.yaml: 'blok'. Did you mean 'block'",
        ),
        ("{element: BF16, block: null, scale: none, rule: absmax}", "give an element such as INT6"),
        ("{element: INT6, block: 32, scale: fp16, rule: absmax, tensor_scale: true}", "a tensor scale goes with e4m3 scales"),
        ("[1]", "must map names to element, block, scale and rule"),
    ],
)
def test_what_cannot_be_is_refused(entry: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        load_space(space(tmp_path, entry))
    assert says in str(error.value)


@pytest.mark.parametrize(("name", "says"), [("nvfp4", "means another one"), ("My", "lower-case"), ("a+b", "lower-case")])
def test_names_that_cannot_be(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        load_space(space(tmp_path, "{element: INT6, block: 32, scale: fp16, rule: absmax}", f'"{name}"'))


def test_a_cache_takes_zero_points_that_fill_bytes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="choose 2 bits, 4 bits, 8 bits"):
        load_space(space(tmp_path, "{element: INT6 asym, block: 32, scale: fp16, rule: minmax, axis: token}", kind="kv_formats"))


def test_a_search_with_a_format_of_its_own(tmp_path: Path, demo_search: dict[str, Any]) -> None:
    """Profiled beside the others, chosen, written out in the recipe, read again, and searched by another process's worker."""
    import autoq
    from autoq.api.question import QuestionFile
    from autoq.recipe import read_recipe

    path = tmp_path / "space.yaml"
    path.write_text(
        "weights: [nvfp4, searched_g64]\nkeys: [int4_channel, searched_token]\nvalues: [int4_token]\n"
        "formats:\n  searched_g64: {element: INT6, block: 64, scale: fp16, rule: least_squares}\n"
        "kv_formats:\n  searched_token: {element: INT8 asym, block: 32, scale: fp16, rule: minmax, axis: token}\n"
    )
    result = autoq.search(
        "demo", space=path, budget="5.5bits", kv_budget="7bits", samples=4, seq_len=64, eval_samples=2, eval_len=64, correct=2,
        run=tmp_path / "run", trials=3, trial_samples=4, dtype="float32",
    )  # fmt: skip
    chosen = {e.format for e in result.recipe.weights.values()}
    assert "searched_g64" in chosen
    assert "searched_token" in {layer.key.format for layer in result.recipe.kv}
    again = read_recipe(tmp_path / "run" / "recipe.yaml")
    assert again.weight_formats() == {u: weight_format(e.format) for u, e in again.weights.items()}
    (question,) = (tmp_path / "run").glob("study-*.json")
    assert "own_formats" in question.read_text()
    assert weight_format("searched_g64") in QuestionFile.read(question).candidates.weights
    assert autoq.validate(result, sample=2).entry.passed


def test_a_space_of_weights_alone_is_searched_again(tmp_path: Path) -> None:
    """Nothing is known of caches then, and the profile opens all the same."""
    import autoq

    path = tmp_path / "space.yaml"
    path.write_text("weights: [int8, int4_g64]\n")
    options: dict[str, Any] = {
        "space": path,
        "samples": 2,
        "seq_len": 32,
        "eval_samples": 2,
        "eval_len": 32,
        "correct": 2,
        "run": tmp_path / "run",
    }
    first = autoq.search("demo", budget=5, **options)
    second = autoq.search("demo", budget=6, **options)
    assert second.recipe.totals.bits > first.recipe.totals.bits
    assert autoq.front(tmp_path / "run", [5]).weights
    exported = autoq.export(first, "mlx", rounding="up")  # of its own recipe, though another one is in the folder now
    assert exported.recipe_bits == pytest.approx(first.recipe.totals.bits)  # type: ignore[union-attr]
    with pytest.raises(UserError, match="the recipe of a later search"):
        autoq.validate(first)


def test_another_format_of_the_same_name_is_refused_in_a_run_folder(tmp_path: Path) -> None:
    import json

    import autoq

    path = tmp_path / "space.yaml"
    entry = "{element: INT6, block: 32, scale: fp16, rule: absmax}"
    path.write_text(f"weights: [other_g32, int4_g64]\nformats:\n  other_g32: {entry}\n")
    options: dict[str, Any] = {"space": path, "samples": 2, "seq_len": 32, "run": tmp_path / "run"}
    autoq.profile("demo", **options)
    run_json = tmp_path / "run" / "run.json"
    known = json.loads(run_json.read_text())
    known["own_formats"]["Format/other_g32"]["block"] = 64  # as if the space had said so then
    run_json.write_text(json.dumps(known))
    with pytest.raises(UserError, match="knows another format 'other_g32'"):
        autoq.profile("demo", **options)
