"""The verbs as a notebook calls them, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config, Gemma3nTextConfig, GPT2Config

from autoq import api, cli
from autoq.config import SearchConfig
from autoq.errors import UserError
from autoq.model.load import load_model, model_source
from autoq.recipe import read_recipe
from tests.conftest import SMALL, llama_config, run_autoq

MLA = DeepseekV2Config(**{**SMALL, "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                          "v_head_dim": 16, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4,
                          "num_experts_per_tok": 2, "first_k_dense_replace": 2})  # fmt: skip


@pytest.fixture
def recipe_path(demo_search: dict[str, Any]) -> Path:
    return Path(demo_search["cwd"], demo_search["json"]["recipe"])


def test_quantized_applies_weights_and_caches_and_restores(recipe_path: Path) -> None:
    model = load_model(model_source("demo"), "cpu", "float32")
    ids = torch.randint(0, 1000, (1, 96), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(ids).logits
        with api.quantized(model, recipe_path) as changed:
            inside = changed(ids).logits
        recipe = read_recipe(recipe_path)
        with api.quantized(model, recipe.model_copy(update={"kv": ()})):
            weights_only = model(ids).logits
        after = model(ids).logits
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert not torch.equal(inside, before)
    assert not torch.equal(weights_only, inside)
    assert not torch.equal(weights_only, before)


def test_a_recipe_for_other_weights_is_refused(recipe_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(llama_config())
    with pytest.raises(UserError, match="made for a model with other weights"), api.quantized(model, recipe_path):
        pass


def test_a_latent_cache_is_refused_and_its_weights_are_not(tmp_path: Path) -> None:
    MLA.save_pretrained(tmp_path / "mla")
    mla = str(tmp_path / "mla")
    done = run_autoq("search", "--kv-budget", "6", "--model", mla, cwd=tmp_path)
    assert done.returncode == 2
    assert "caches a latent (MLA)" in done.stderr
    plan = api.make_plan(SearchConfig(model=mla, budget="4.5bits", seq_len=64))
    assert not plan.units.caches
    assert plan.units.weights
    assert any("MLA" in note for note in plan.notes)


def test_a_head_dim_that_no_format_fits_is_named(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=142, n_head=2, n_layer=2, vocab_size=128, n_positions=512)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    (tmp_path / "space.yaml").write_text("keys: [int4_token, nvfp4_rotate]\nvalues: [int4_token]\n")
    done = run_autoq("search", "--kv-budget", "6", "--model", str(tmp_path), "--space", str(tmp_path / "space.yaml"))
    assert done.returncode == 2
    assert "no group of int4_token fits a head_dim of 71" in done.stderr


def test_layers_that_share_a_cache_are_refused(tmp_path: Path) -> None:
    config = Gemma3nTextConfig(**{**SMALL, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 128,
                                  "num_key_value_heads": 2, "intermediate_size": [96] * 5, "activation_sparsity_pattern": [0.0] * 5,
                                  "layer_types": [f"{t}_attention" for t in ("sliding", "sliding", "full", "sliding", "full")], "head_dim": 16})  # fmt: skip
    config.architectures = ["Gemma3nForCausalLM"]
    config.save_pretrained(tmp_path)
    done = run_autoq("search", "--kv-budget", "6", "--model", str(tmp_path))
    assert done.returncode == 2
    assert "share another layer's cache" in done.stderr


@pytest.mark.parametrize("option", ["budget", "kv-budget", "calib", "eval", "space", "model"])
def test_an_empty_option_is_named(option: str, tmp_path: Path) -> None:
    done = run_autoq("search", "--budget", "4", f"--{option}", "", cwd=tmp_path)
    assert done.returncode == 2
    assert f"--{option} is empty" in done.stderr


def test_a_refused_run_leaves_the_folder_as_it_was(demo_search: dict[str, Any]) -> None:
    run = Path(demo_search["cwd"]) / "run"
    before = {p.name: p.read_bytes() for p in run.iterdir()}
    done = run_autoq("search", "--budget", "4.5", "--samples", "7", "--seq-len", "64", "--run", str(run))
    assert done.returncode == 2
    assert "holds a profile of another" in done.stderr
    assert {p.name: p.read_bytes() for p in run.iterdir()} == before


@pytest.mark.parametrize(
    ("content", "says"),
    [("{", "cannot be read"), ("[]", "not a JSON object"), ("{}", "lacks or garbles"), ('{"model": "demo"}', "lacks or garbles")],
)
def test_a_garbled_run_json_is_named(demo_search: dict[str, Any], tmp_path: Path, content: str, says: str) -> None:
    source = Path(demo_search["cwd"]) / "run"
    for name in ("profile.safetensors", "profile.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    (tmp_path / "run.json").write_text(content)
    done = run_autoq("front", str(tmp_path))
    assert done.returncode == 2
    assert says in done.stderr
    assert json.loads((source / "run.json").read_text())["model"] == "demo"


def test_ctrl_c_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "search", stopped)
    done = run_autoq("search", "--budget", "4", cwd=tmp_path)
    assert done.returncode == cli.INTERRUPTED
    assert "--resume goes on from the last finished batch" in done.stderr
    assert "Traceback" not in done.stderr
