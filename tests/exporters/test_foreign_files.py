"""Files that are damaged, of another tool, or of a shape that no tool writes: one sentence, exit code 2, and nothing written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from autoq.errors import UserError
from autoq.exporters.importers import read
from tests.conftest import run_autoq
from tests.exporters.conftest import subject_for

Q = "model.layers.0.mlp.up_proj"
INT4 = {"bits": 4, "group_size": 64, "sym": True, "data_type": "int", "act_bits": 16}


def groups(**weights: Any) -> dict[str, Any]:
    return {
        "config_groups": {
            "g": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 64, **weights}}
        }
    }


def quantizer(config: Any) -> dict[str, Any]:
    return {"metadata": {}, "quantize": {"quant_cfg": [{"quantizer_name": f"{Q}.weight_quantizer", "cfg": config}]}}


DYNAMIC: tuple[Any, ...] = ([], {"+:(": {}}, {"+:.*": 4}, {"+:.*": {"bits": "4"}})
GARBAGE: list[tuple[str, Any]] = [
    *(("auto-round", {Q: {**INT4, "bits": bits}}) for bits in (None, "4", 4.5, 0, 1, 9, [4], True)),
    *(("auto-round", {Q: {**INT4, "group_size": group}}) for group in ("64", [64], -2, 0, 7, 64.5, True, 10**9)),
    *(("auto-round", {Q: {**INT4, "sym": sym}}) for sym in ("false", 1)),
    ("auto-round", {Q: 4}), ("auto-round", []), ("auto-round", {}),
    *(("compressed-tensors", groups(num_bits=bits)) for bits in (None, "four", 4.7, 0, float("nan"), float("inf"), [4])),
    *(("compressed-tensors", groups(group_size=group)) for group in (None, 0, -3, "64", True, 12)),
    *(("compressed-tensors", groups(symmetric=value)) for value in ("false", 2)),
    ("compressed-tensors", {"config_groups": []}), ("compressed-tensors", {"config_groups": {"g": {"targets": None, "weights": {}}}}),
    ("compressed-tensors", {"config_groups": {"g": {"targets": ["re:("], "weights": {"num_bits": 4}}}}), ("compressed-tensors", {"quantization_config": []}),
    ("compressed-tensors", {**groups(), "kv_cache_scheme": "fp8"}), ("compressed-tensors", {**groups(), "ignore": 5}), ("compressed-tensors", {}),
    ("llm-compressor", {"s": {"m": {"QuantizationModifier": {"scheme": "W3A16", "targets": ["Linear"]}}}}), ("llm-compressor", {"a": 1}),
    *(("modelopt", quantizer(config)) for config in ("x", {"num_bits": [[4], 3]}, {"num_bits": 4, "block_sizes": "64"}, {"num_bits": 4, "block_sizes": {"--1": 64}}, {"num_bits": 4.5, "block_sizes": {-1: 64}})),
    ("modelopt", {"quantize": {"quant_cfg": []}}), ("modelopt", {"quantize": {"quant_cfg": [5]}}), ("modelopt", {"quantize": {"quant_cfg": [{"$import": "x"}]}}),
    *(("gptqmodel", {"bits": 4, "group_size": 64, "sym": True, "dynamic": dynamic}) for dynamic in DYNAMIC),
    ("gptqmodel", {}), ("gptqmodel", {"bits": 4, "group_size": True, "sym": True}),
    ("torchao", {"_type": "FqnToConfig"}), ("torchao", {"_data": {"fqn_to_config": {Q: "x"}}}), ("torchao", {"_data": {"fqn_to_config": {"re:(": None}}}),
    ("hf_quant_config", {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": []}}), ("hf_quant_config", {"quantization": {}}),
    ("hf_quant_config", {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": 5}}),
    ("mlx", {}), ("mlx", {"quantization": True}), ("mlx", {"quantization": {"bits": 4.5, "group_size": 64}}), ("mlx", {"quantization": {"bits": 4, "group_size": 0}}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "data"), GARBAGE, ids=[f"{i}-{kind}" for i, (kind, _) in enumerate(GARBAGE)])
def test_garbage_is_refused_or_told(tmp_path: Path, kind: str, data: Any) -> None:
    """A list is what JSON may hold beside a mapping; `problems` end as a refusal too (api.import_recipe)."""
    path = tmp_path / "file.json"
    path.write_text(json.dumps(data))
    try:
        _, found = read(path, kind, subject_for())
        sentence = "".join(found.problems[:1])
    except UserError as error:
        sentence = str(error)
    assert sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    "text", ["", "[1, 2]", "{", '{"a": 1, "a": 2}', "\x00\x01", "a: &a {b: *a}", "? [1]: 2", "!!python/object:os.system x"]
)
def test_files_that_hold_no_mapping_are_refused(tmp_path: Path, text: str) -> None:
    for name in ("file.json", "file.yaml", "file.txt"):
        (tmp_path / name).write_text(text)
        for kind in (None, "modelopt", "llm-compressor"):
            with pytest.raises(UserError):
                read(tmp_path / name, kind, subject_for())


def test_nothing_that_is_there_is_overwritten(demo_search: dict[str, Any], tmp_path: Path) -> None:
    recipe = Path(shutil.copy(Path(demo_search["cwd"], demo_search["json"]["recipe"]), tmp_path / "recipe.yaml"))
    before = recipe.read_bytes()
    done = run_autoq("export", str(recipe), "--to", "llm-compressor", "--round", "up", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "holds a recipe.yaml that no export wrote" in done.stderr
    (tmp_path / "own.json").write_text(json.dumps({Q: INT4}))
    for out in ("own.json", "recipe.yaml", "."):
        assert run_autoq("import", "own.json", "--from", "auto-round", "--out", out, cwd=tmp_path).returncode == 2
    assert recipe.read_bytes() == before
    assert json.loads((tmp_path / "own.json").read_text()) == {Q: INT4}


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    from autoq.run_folder import write_atomically

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="no regular file"):
        write_atomically(pipe, "text")
    assert pipe.is_fifo()


def test_a_recipe_cannot_put_code_into_the_file_for_transformers(demo_search: dict[str, Any], tmp_path: Path) -> None:
    recipe = Path(shutil.copy(Path(demo_search["cwd"], demo_search["json"]["recipe"]), tmp_path / "recipe.yaml"))
    recipe.write_text(recipe.read_text().replace("dtype: float32", "dtype: float32, trust_remote_code=print(1)"))
    done = run_autoq("export", str(recipe), "--to", "transformers")
    assert done.returncode == 2
    assert "provenance.dtype" in done.stderr
