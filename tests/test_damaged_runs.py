"""Run folders and files that were cut, edited or put in the wrong place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from autoq.measure.damage import DamageScorer
from autoq.model.load import DEMO_FOLDER
from tests.conftest import llama_config, run_autoq

PROFILE = ("profile", "--samples", "4", "--seq-len", "32", "--profile-batch", "2")


@pytest.fixture
def run(demo_search: dict[str, Any], tmp_path: Path) -> Path:
    return Path(shutil.copytree(Path(demo_search["cwd"], "run"), tmp_path / "run"))


def refused(*arguments: str) -> str:
    done = run_autoq(*arguments)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    return done.stderr


def test_resume_goes_on_after_a_killed_first_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score, calls = DamageScorer.score, []

    def dies(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return score(self, *arguments)

    monkeypatch.setattr(DamageScorer, "score", dies)
    run = str(tmp_path / "killed")
    stopped = run_autoq(*PROFILE, "--run", run)
    assert stopped.returncode == 130
    assert "2 of 4 sequences" in refused("front", run)
    done = run_autoq(*PROFILE, "--run", run, "--resume")
    assert done.returncode == 0, done.stderr
    assert "going on after sequence 2 of 4" in done.stderr
    assert "nothing to score" not in done.stderr
    assert len(calls) == 3


def rewritten(change: Callable[[dict[str, Any], dict[str, Any]], Any], run: Path) -> None:
    path = run / "profile.safetensors"
    with safe_open(path, framework="pt") as stored:
        meta = json.loads(stored.metadata()["autoq"])
        rows = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    meta = change(meta, rows) or meta
    save_file(rows, path, metadata={"autoq": json.dumps(meta)})


@pytest.mark.parametrize(
    "change",
    [
        lambda meta, rows: ["x"],
        lambda meta, rows: meta.pop("version") and None,
        lambda meta, rows: rows.pop(next(iter(rows))) is None or None,
        lambda meta, rows: next(iter(meta["relative_error"].values())).update(fp8="x"),
        lambda meta, rows: meta.update(done=99),
        lambda meta, rows: meta["fingerprint"].pop("text") and None,
    ],
    ids=["list", "no-version", "no-row", "text-for-a-number", "too-many-done", "no-fingerprint"],
)
def test_a_profile_that_was_edited_is_named(run: Path, change: Any) -> None:
    rewritten(change, run)
    assert "cannot be read" in refused("front", str(run))


@pytest.mark.parametrize(
    "change",
    [
        {"space": ["a"]},
        {"context": -5},
        {"context": "x"},
        {"include": 3},
        {"include": "lm_head"},
        {"engine": None},
        {"engine": "vlm"},
        {"consumer": {"a": 1}},
        {"target": "x"},
        {"model": 5},
    ],
)
def test_a_run_json_that_was_edited_is_named(run: Path, change: dict[str, Any]) -> None:
    path = run / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    said = refused("front", str(run))
    assert "run.json" in said or "context" in said
    assert "--kv-budget" not in said


@pytest.mark.parametrize("name", ["recipe.yaml", "run.json"])
def test_a_folder_in_the_place_of_a_file_leaves_no_part(run: Path, name: str) -> None:
    (run / name).unlink()
    (run / name).mkdir()
    said = run_autoq("search", "--budget", "5", "--samples", "6", "--seq-len", "64", "--eval-samples", "2", "--eval-len", "64",
                     "--correct", "0", "--run", str(run))  # fmt: skip
    assert said.returncode == 2
    assert "cannot be written" in said.stderr
    assert not list(run.glob("*.part"))


def test_a_run_folder_that_cannot_be_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place, says in (("file", "a file"), ("file/sub", "a file"), ("link", "a link that leads nowhere")):
        assert says in refused(*PROFILE, "--run", str(tmp_path / place))
    assert "--run is empty" in refused(*PROFILE, "--run", "")


def test_a_tokenizer_of_another_model_is_named(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(llama_config(vocab_size=100))
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / name, folder / name)
    done = run_autoq(*PROFILE, "--model", str(folder), "--run", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "they do not belong together" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("broken.jsonl", '{"text": "a"}\n{"text": ', "Invalid value"),
        ("empty.jsonl", "", "empty"),
        ("broken.parquet", "PAR1", "parquet"),
    ],
)
def test_text_that_datasets_cannot_read_is_one_sentence(tmp_path: Path, name: str, content: str, says: str) -> None:
    (tmp_path / name).write_text(content)
    done = run_autoq(*PROFILE, "--calib", str(tmp_path / name), "--run", str(tmp_path / "run"))
    assert done.returncode == 2
    assert says in done.stderr
    assert "Generating" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["search", "--budget", "9" * 400], "is not a budget"),
        (["search", "--budget", "4", "--context", "9" * 5000], "not a number of tokens"),
        (["search", "--budget", "4", "--context", ""], "not a number of tokens"),
        (["memory", "--context", "\u0661k"], "not a number of tokens"),
        (["memory", "--batch", "\u0661"], "not a whole number"),
        (["search", "--budget", "4", "--device", "meta"], "holds no values"),
    ],
)
def test_numbers_beyond_reason(arguments: list[str], says: str) -> None:
    assert says in refused(*arguments)
