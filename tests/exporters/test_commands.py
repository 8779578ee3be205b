"""`autoq export`, `autoq import`, `autoq check`, `autoq search --consumer`: what they print, write and refuse."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import autoq
from autoq.exporters.consumers import CONSUMERS
from autoq.exporters.importers import READERS
from autoq.recipe import read_recipe
from tests.conftest import run_autoq


@pytest.fixture
def recipe(demo_search: dict[str, Any], tmp_path: Path) -> Path:
    return Path(shutil.copy(Path(demo_search["cwd"], demo_search["json"]["recipe"]), tmp_path / "recipe.yaml"))


def test_what_a_consumer_lacks_is_refused_by_default(recipe: Path) -> None:
    done = run_autoq("export", str(recipe), "--to", "modelopt")
    assert done.returncode == 2
    assert re.search(
        r"autoq: modelopt has no .* and \d+ more; .*: --round up .*or search for it with --consumer modelopt", done.stderr
    )
    with pytest.raises(autoq.ExportRefusedError, match=r'rounding="up" takes .* search for it with consumer="modelopt"'):
        autoq.export(recipe, "modelopt")
    assert done.stdout == ""
    assert not (recipe.parent / "export").exists()


def test_rounding_up_writes_prints_and_returns_what_was_done(recipe: Path) -> None:
    done = run_autoq("export", str(recipe), "--to", "modelopt", "--round", "up", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert Path(found["files"][0]).name == "recipe.yaml"
    assert all(Path(f).is_file() for f in found["files"])
    assert found["losses"]
    assert all({"what", "wanted", "got", "why"} <= set(loss) for loss in found["losses"])
    assert found["bits"] > found["recipe_bits"] - 0.01
    assert json.loads((recipe.parent / "export" / "modelopt" / "export.json").read_text()) == found
    shown = run_autoq("export", str(recipe), "--to", "modelopt", "--round", "up").stdout
    assert f"(the recipe: {found['recipe_bits']:.4f})" in shown
    assert "changed: " in shown
    assert "measure again" in shown


def test_all_writes_what_can_be_written_and_says_what_cannot(recipe: Path, tmp_path: Path) -> None:
    done = run_autoq("export", str(recipe), "--to", "all", "--out", str(tmp_path / "out"), "--json")
    assert done.returncode == 0, done.stderr
    found = {e["consumer"]: e for e in json.loads(done.stdout)["exports"]}
    assert set(found) == set(CONSUMERS)
    assert found["transformers"]["refused"] is None
    assert found["modelopt"]["refused"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(n for n, e in found.items() if e["refused"] is None)
    done = run_autoq("export", str(recipe), "--to", "all", "--out", str(tmp_path / "up"), "--round", "up")
    assert done.returncode == 0
    assert sorted(p.name for p in (tmp_path / "up").iterdir()) == sorted(CONSUMERS)
    assert all(name in done.stdout for name in CONSUMERS)


def test_files_of_an_earlier_export_do_not_stay(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_autoq("export", str(recipe), "--to", "tensorrt-llm", "--round", "up", "--out", str(out))
    assert (out / "hf_quant_config.json").exists()
    (out / "mine.txt").write_text("kept")
    run_autoq("export", str(recipe), "--to", "mlx", "--round", "up", "--out", str(out))
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "export.json", "mine.txt"]


def test_the_file_for_transformers_generates(recipe: Path) -> None:
    done = run_autoq("export", str(recipe), "--to", "transformers", "--json")
    found = json.loads(done.stdout)
    assert (found["losses"], found["bits"], found["kv_bits"]) == ([], found["recipe_bits"], found["recipe_kv_bits"])
    module = runpy.run_path(found["files"][0])
    text = module["generate"]("Return the list of", new_tokens=8)
    assert text.startswith("Return the list of")
    assert len(text) > len("Return the list of")


@pytest.mark.parametrize("kind", [n for n in READERS if n not in ("hf_quant_config", "gguf")])
def test_an_export_is_recognized_and_imported(recipe: Path, tmp_path: Path, kind: str) -> None:
    exported = json.loads(run_autoq("export", str(recipe), "--to", kind, "--round", "up", "--json").stdout)
    done = run_autoq("import", exported["files"][0], "--out", str(tmp_path / "again.yaml"), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["from"] == kind
    assert found["bits"] == pytest.approx(read_recipe(tmp_path / "again.yaml").totals.bits)
    again = run_autoq("export", str(tmp_path / "again.yaml"), "--to", kind, "--out", str(tmp_path / "out"), "--json")
    assert json.loads(again.stdout)["losses"] == []
    assert (tmp_path / "out" / Path(exported["files"][0]).name).read_text() == Path(exported["files"][0]).read_text()


def test_an_imported_recipe_can_be_shown_checked_and_measured(recipe: Path, tmp_path: Path) -> None:
    exported = json.loads(run_autoq("export", str(recipe), "--to", "modelopt", "--round", "up", "--json").stdout)
    mine = tmp_path / "mine.yaml"
    assert run_autoq("import", exported["files"][0], "--out", str(mine)).returncode == 0
    shown = run_autoq("show", str(mine))
    assert "not measured: `autoq validate` does" in shown.stdout
    assert json.loads(run_autoq("show", str(mine), "--json").stdout)["predicted_kl"] is None
    assert run_autoq("check", str(mine), "--consumer", "modelopt").returncode == 0
    done = run_autoq("validate", str(mine), "--sample", "2", "--json")
    assert done.returncode == 0, done.stderr
    measured = read_recipe(mine).measured
    assert measured is not None
    assert measured.chosen == "imported"
    assert json.loads(done.stdout)["kl"] == pytest.approx(measured.kl, rel=0.02)


def test_tied_tensors_that_differ_are_refused(recipe: Path, tmp_path: Path) -> None:
    layers = {f"model.layers.0.self_attn.{name}_proj": {"bits": bits} for name, bits in (("q", 8), ("k", 4), ("v", 4))}
    (tmp_path / "layer_config.json").write_text(json.dumps(layers))
    done = run_autoq("import", str(tmp_path / "layer_config.json"), "--from", "auto-round", "--out", str(tmp_path / "x.yaml"))
    assert done.returncode == 2
    assert "engines fuse the tensors of model.layers.0.self_attn.qkv, and they differ" in done.stderr
    assert not (tmp_path / "x.yaml").exists()


def test_the_table_says_what_each_needs(recipe: Path) -> None:
    done = run_autoq("export", str(recipe), "--to", "all")
    assert done.returncode == 0
    assert done.stdout.count("needs --round up: ") == len(CONSUMERS) - 1
    assert "units in its own scales" in done.stdout
    assert "--round scales lets a tool pick its own scales" in done.stdout
    reports = autoq.export(recipe, "all", rounding="up")
    assert repr(reports).startswith("consumer")
    assert isinstance(reports, list)
    assert f"wrote    {reports[0].files[0]}" in repr(reports[0])
    assert repr(autoq.check(recipe)).startswith("passed: names, tied tensors")


def test_formats_that_an_engine_does_not_load_are_told(recipe: Path) -> None:
    """llm-compressor computes 3-bit and 2-bit integers, which vLLM does not load."""
    data = yaml.safe_load(recipe.read_text())
    data["formats"]["int3_g64_asym"] = {"element": "INT3 asym", "block": 64, "scale": "fp16", "rule": "minmax"}
    for unit in data["weights"].values():
        unit["format"] = "int3_g64_asym"
    recipe.write_text(yaml.safe_dump(data, sort_keys=False))
    done = run_autoq("export", str(recipe), "--to", "llm-compressor", "--round", "up")
    assert done.returncode == 0, done.stderr
    assert "note: vllm loads no weights in int3_g64_asym: search with --engine vllm as well" in " ".join(done.stdout.split())


def test_what_llm_compressor_makes_for_vllm_is_loaded_by_it(tmp_path: Path) -> None:
    few = ("--samples", "4", "--seq-len", "64", "--eval-samples", "2", "--correct", "0", "--weak", "0")
    search = ("search", "--budget", "4.5bits", "--consumer", "llm-compressor", "--engine", "vllm", "--run", "run", *few)
    assert run_autoq(*search, cwd=tmp_path).returncode == 0
    for consumer in ("llm-compressor", "vllm"):
        done = run_autoq("export", "run", "--to", consumer, cwd=tmp_path)
        assert "It says all that the recipe says." in done.stdout, done.stderr
        assert "loads no weights" not in done.stdout
    assert run_autoq("check", "run", "--engine", "vllm", cwd=tmp_path).returncode == 0


def test_check_finds_what_was_edited(recipe: Path) -> None:
    assert run_autoq("check", str(recipe)).returncode == 0
    data = yaml.safe_load(recipe.read_text())
    name, unit = next((n, u) for n, u in data["weights"].items() if n.endswith("qkv"))
    other = next(f for f in data["formats"] if f != unit["format"])
    data["weights"][name]["tensors"] = unit["tensors"][:2]
    data["weights"]["mine"] = {**unit, "format": other, "tensors": unit["tensors"][2:]}
    data["kv"][0]["module"] = "model.layers.9.self_attn"
    recipe.write_text(yaml.safe_dump(data, sort_keys=False))
    done = run_autoq("check", str(recipe), "--json")
    assert done.returncode == 1
    problems = json.loads(done.stdout)["problems"]
    assert any(f"engines fuse the tensors of {name}, and they differ" in p for p in problems)
    assert any("model.layers.9.self_attn is no attention module" in p for p in problems)
    assert any("the cache of model.layers.0.self_attn is missing" in p for p in problems)


def test_check_knows_engines_targets_and_sums(recipe: Path) -> None:
    done = run_autoq("check", str(recipe), "--engine", "vllm")
    assert done.returncode == 1
    assert "vllm" in done.stderr
    data = yaml.safe_load(recipe.read_text())
    data["totals"]["bits"] = 4.0
    recipe.write_text(yaml.safe_dump(data, sort_keys=False))
    assert "totals.bits says 4, and the formats come to" in run_autoq("check", str(recipe)).stderr


def test_a_search_for_a_consumer_exports_without_a_loss(tmp_path: Path) -> None:
    few = ("--samples", "4", "--seq-len", "64", "--eval-samples", "2", "--correct", "0", "--weak", "0")
    done = run_autoq(
        "search", "--budget", "5bits", "--kv-budget", "10bits", "--consumer", "vllm", "--run", "run", *few, "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    recipe = read_recipe(tmp_path / "run" / "recipe.yaml")
    assert recipe.budget.consumer == "vllm"
    assert "--consumer vllm" in recipe.budget.options()
    report = json.loads(run_autoq("export", "run", "--to", "vllm", "--json", cwd=tmp_path).stdout)
    assert (report["losses"], report["bits"], report["kv_bits"]) == ([], report["recipe_bits"], report["recipe_kv_bits"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("export", "{recipe}", "--to", "vlm"), "unknown consumer 'vlm'. Did you mean 'vllm'?"),
        (("export", "{recipe}", "--to", "mlx", "--round", "down"), "unknown value of --round 'down'"),
        (("export", "{recipe}", "--to", "mlx", "--round", "up", "--out", "{recipe}"), "cannot be made"),
        (("export", "missing.yaml", "--to", "mlx"), "there is no recipe 'missing.yaml'"),
        (("import", "missing.json"), "there is no file 'missing.json' to import"),
        (("import", "{recipe}"), "is of no format that is known by its looks"),
        (("import", "{recipe}", "--from", "vllm"), "unknown format to import 'vllm'"),
        (("import", "{recipe}", "--from", "modelopt"), "has no 'quantize.quant_cfg'"),
        (("import", "{recipe}", "--from", "mlx", "--out", "."), "is a folder"),
        (("check", "{recipe}", "--engine", "vlm"), "unknown engine 'vlm'"),
        (("search", "--budget", "4bits", "--consumer", "modelop"), "unknown consumer 'modelop'"),
        (("search", "--budget", "4bits", "--kv-budget", "8bits", "--consumer", "mlx"), "--consumer mlx"),
    ],
)
def test_a_mistake_gets_one_sentence(recipe: Path, arguments: tuple[str, ...], words: str) -> None:
    done = run_autoq(*(a.replace("{recipe}", str(recipe)) for a in arguments), cwd=recipe.parent)
    assert done.returncode == 2, done.stderr
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
