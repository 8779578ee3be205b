"""`autoq validate`: the real kernels, every byte, a packed cache, and what it says when something is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from autoq.api import validating
from autoq.formats.format import KVFormat
from autoq.model import packed as packing
from autoq.recipe import read_recipe
from tests.conftest import SEARCH_ARGUMENTS, run_autoq


@pytest.fixture
def recipe_copy(demo_search: dict[str, Any], tmp_path: Path) -> Path:
    return Path(shutil.copy(Path(demo_search["cwd"], demo_search["json"]["recipe"]), tmp_path / "recipe.yaml"))


def test_the_demo_recipe_passes_and_says_so_in_the_recipe(recipe_copy: Path) -> None:
    before = read_recipe(recipe_copy)
    done = run_autoq("validate", str(recipe_copy), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"]
    assert found["differing"] == 0
    assert found["units"] == sum(e.format != "bf16" for e in before.weights.values())
    assert found["weight_bytes"] == before.totals.weight_bytes
    assert found["cache_bytes"] < 0.4 * found["cache_bytes_original"]
    assert found["kl"] == pytest.approx(found["measured_kl"], rel=0.02)
    assert 0 <= found["greedy_agreement"] <= 1
    after = read_recipe(recipe_copy)
    assert after.validation is not None
    assert after.validation.kl == found["kl"]
    assert after.model_copy(update={"validation": None}) == before


def test_a_sample_packs_only_some_units_and_measures_all(recipe_copy: Path) -> None:
    done = run_autoq("validate", str(recipe_copy), "--sample", "2")
    assert done.returncode == 0, done.stderr
    assert "of 2 units by the kernels; 0 differ" in done.stdout
    units = sum(e.format != "bf16" for e in read_recipe(recipe_copy).weights.values())
    assert f"passed: every byte of 2 drawn units (of {units}) is right, and" in done.stdout


def test_a_kernel_that_differs_fails_and_names_the_unit(recipe_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autoq.kernels.encode import encode

    def wrong(*arguments: Any) -> Any:
        found = encode(*arguments)
        found.codes[0, 0] ^= 1
        return found

    monkeypatch.setattr(packing, "encode", wrong)
    done = run_autoq("validate", str(recipe_copy), "--sample", "1")
    assert done.returncode == 1
    assert "kernel and reference differ in codes, values" in done.stderr
    assert "model.layers." in done.stderr
    entry = read_recipe(recipe_copy).validation
    assert entry is not None
    assert not entry.passed


def test_a_kl_that_the_search_did_not_measure_fails(recipe_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = validating._PackedRun.__call__

    def noisy(self: Any, model: Any, ids: torch.Tensor) -> torch.Tensor:
        return run(self, model, ids) * 1.05

    monkeypatch.setattr(validating._PackedRun, "__call__", noisy)
    done = run_autoq("validate", str(recipe_copy), "--sample", "1")
    assert done.returncode == 1
    assert "but the search measured" in done.stderr


def test_a_cache_that_packs_wrong_bytes_fails_and_names_the_layer(recipe_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autoq.kernels import encode as kernel

    run = kernel.encode

    def wrong(fmt: Any, x: torch.Tensor, absmax: Any = None) -> Any:
        found = run(fmt, x, absmax)
        found.codes[-1, -1] ^= 1
        return found

    monkeypatch.setattr(kernel, "encode", wrong)
    done = run_autoq("validate", str(recipe_copy), "--sample", "1")
    assert done.returncode == 1
    assert "layer 0 key: kernel and reference differ in codes" in done.stderr


def test_a_cache_of_other_bytes_than_the_cost_models_fails(recipe_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    price = KVFormat.storage_bits

    def more(self: KVFormat, tokens: int, *shape: int) -> int:
        return price(self, tokens, *shape) + 8

    monkeypatch.setattr(KVFormat, "storage_bits", more)
    done = run_autoq("validate", str(recipe_copy), "--sample", "1")
    assert done.returncode == 1
    assert "layer 0 key: it takes" in done.stderr


def test_bytes_that_the_cost_model_does_not_count_fail(recipe_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = packing.pack_tensor

    def longer(*arguments: Any) -> Any:
        weight, bits, differs = pack(*arguments)
        return weight, bits + 8, differs

    monkeypatch.setattr(packing, "pack_tensor", longer)
    done = run_autoq("validate", str(recipe_copy), "--sample", "1")
    assert done.returncode == 1
    assert "the cost model counts" in done.stderr


def test_attention_over_bytes_that_differs_fails(recipe_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autoq.kernels import attention as kernel

    run = kernel.attention
    monkeypatch.setattr(kernel, "attention", lambda *given, **options: run(*given, **options) * 1.5)
    done = run_autoq("validate", str(recipe_copy), "--sample", "1")
    assert done.returncode == 1
    assert "attention over packed bytes and over decoded tokens differ" in done.stderr


def test_a_search_can_end_with_a_validation(demo_search: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(Path(demo_search["cwd"], "run"), tmp_path / "run")
    done = run_autoq(*SEARCH_ARGUMENTS, "--run", "run", "--validate", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["validation"]["passed"]
    assert found["validation"]["units"] == 2
    assert 0 < found["validation"]["attention_difference"] < 0.03
    recipe = read_recipe(tmp_path / found["recipe"])
    assert recipe.validation is not None
    assert recipe.validation.kl == found["validation"]["kl"]
    assert found["measured_kl"] == demo_search["json"]["measured_kl"]


def test_every_kind_of_cache_format_is_searched_packed_and_validated(tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(
        "keys: [nvfp4_rotate, nvfp4_affine, 'int8_token+tier16>int4_channel']\nvalues: [fp8_affine, 'int8_token+sink4+tier16>int4_token']\n"
    )
    done = run_autoq("search", "--space", "space.yaml", "--kv-budget", "4.8bits", "--samples", "4", "--seq-len", "64", "--eval-samples", "2",
                     "--eval-len", "48", "--correct", "0", "--context", "256", "--run", "run", "--json", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    recipe = read_recipe(tmp_path / found["recipe"])
    used = {e.format for layer in recipe.kv for e in (layer.key, layer.value)}
    assert any(">" in name for name in used)
    assert used & {"nvfp4_rotate", "nvfp4_affine", "fp8_affine"}
    done = run_autoq("validate", "run", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kl"] == pytest.approx(found["measured_kl"], rel=0.02)


@pytest.mark.parametrize(("arguments", "says"), [(["--sample", "0"], "--sample is 0"), (["--model", "nowhere/x"], "nowhere/x")])
def test_mistakes(recipe_copy: Path, arguments: list[str], says: str) -> None:
    done = run_autoq("validate", str(recipe_copy), *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stdout == ""
