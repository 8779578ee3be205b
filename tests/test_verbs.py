"""`import autoq`: loaded models and names, the same defaults as the command line, and a model that is as before whatever happens."""

from __future__ import annotations

import copy
import hashlib
import inspect
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import autoq
from autoq import api, arguments
from autoq.config import SearchConfig
from autoq.display.progress import Silent
from autoq.recipe import read_recipe
from tests.conftest import build, llama_config

QUICK: dict[str, Any] = {
    "eval": torch.randint(0, 128, (4, 32), generator=torch.Generator().manual_seed(3)),
    "correct": 2,
    "weak": 0,
}
BATCHES = torch.randint(0, 128, (6, 32), generator=torch.Generator().manual_seed(2))
OTHERS = torch.randint(0, 128, (6, 32), generator=torch.Generator().manual_seed(4))


def state(model: PreTrainedModel) -> dict[str, Any]:
    """Return everything of a model that a call might leave changed."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return {
        "weights": digest.hexdigest(),
        "where": {n: p.data_ptr() for n, p in model.named_parameters()},
        "training": {n: m.training for n, m in model.named_modules()},
        "requires_grad": {n: p.requires_grad for n, p in model.named_parameters()},
        "grads": {n: None if p.grad is None else p.grad.clone().tolist() for n, p in model.named_parameters()},
        "hooks": {n: [len(getattr(m, h)) for h in hooks] for n, m in model.named_modules()},
        "config": copy.deepcopy(model.config.to_dict()),
        "attention": model.config._attn_implementation,
        "forward": {n: "forward" in m.__dict__ for n, m in model.named_modules()},
    }


@pytest.fixture
def worn(llama: PreTrainedModel) -> PreTrainedModel:
    """A model in the middle of somebody's work: training, one frozen weight, a gradient, a setting."""
    llama.train()
    llama.model.layers[0].eval()
    llama.model.layers[1].mlp.down_proj.weight.requires_grad_(False)
    llama.model.norm.weight.grad = torch.ones_like(llama.model.norm.weight)
    llama.config.use_cache = True
    return llama


class Interrupting(Silent):
    """Raises KeyboardInterrupt at a stage."""

    def __init__(self, name: str) -> None:
        self.name = name

    def stage(self, name: str) -> Any:
        self.is_reached = self.name in name
        return self

    def update(self, done: int, total: int) -> None:
        if self.is_reached:
            raise KeyboardInterrupt


def test_a_loaded_model_is_profiled_searched_and_applied_and_left_as_it_was(worn: PreTrainedModel, here: Path) -> None:
    before = state(worn)
    profile = autoq.profile(worn, BATCHES, run="run")
    assert state(worn) == before
    assert profile.run == Path("run")
    with torch.no_grad():  # a caller may well be inside
        result = autoq.search(worn, BATCHES, budget=4.5, kv_budget="6bits", run="run", **QUICK)
    assert state(worn) == before
    assert result.recipe.totals.bits <= 4.501
    assert result.recipe.totals.kv_bits <= 6.001
    assert result.recipe.model.id == "loaded:LlamaForCausalLM"
    with autoq.quantized(worn, result.recipe) as changed, torch.no_grad():
        assert not torch.equal(changed(BATCHES).logits, build(llama_config())(BATCHES).logits)
    assert state(worn) == before
    front = result.front(budgets=[3, 4, 5], measure=[4])
    assert [round(p.bits) for p in front.weights] == [3, 4, 5]
    assert front.measured[0].measured_kl > 0
    assert state(worn) == before
    checked = autoq.validate(result, sample=1)
    assert checked.entry.passed
    assert state(worn) == before
    assert autoq.report(result).stat().st_size < 6 * 2**20
    with pytest.raises(autoq.UserError, match="the model was in memory"):  # and no hub is asked for it
        result.recipe.export("transformers", rounding="up")
    exported = result.recipe.export("transformers", rounding="up", model=worn)
    assert isinstance(exported, api.ExportReport)
    assert exported.files[0].parts[:3] == ("run", "export", "transformers")  # beside the recipe
    assert state(worn) == before


STAGES = ["profiling", "checking uniform formats", "measuring trials", "confirming the best recipes", "measuring uniform formats",
          "packing weights", "running on packed bytes"]  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupt_leaves_the_model_as_it_was(stage: str, worn: PreTrainedModel, here: Path) -> None:
    before = state(worn)
    with pytest.raises(KeyboardInterrupt):
        autoq.search(worn, BATCHES, budget="4.5bits", trials=2, validate=1, progress=Interrupting(stage), **QUICK)
    assert state(worn) == before


def test_interrupts_of_what_follows_a_search(worn: PreTrainedModel, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = autoq.search(worn, BATCHES, budget="4.5bits", **QUICK)
    before = state(worn)
    with pytest.raises(KeyboardInterrupt):
        autoq.validate(result, sample=1, progress=Interrupting("running on packed bytes"))
    assert state(worn) == before
    with pytest.raises(KeyboardInterrupt):
        autoq.search_front(worn, BATCHES, run=result.run, trials=2, progress=Interrupting("measuring the front"), **QUICK)
    assert state(worn) == before


def test_an_exception_leaves_the_model_as_it_was(worn: PreTrainedModel, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, calls = state(worn), []

    def fails(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")

    worn.model.layers[1].register_forward_hook(lambda *_: fails())
    before = state(worn)
    with pytest.raises(RuntimeError, match="out of memory"):
        autoq.search(worn, BATCHES, budget="4.5bits", **QUICK)
    assert state(worn) == before


def test_a_recipe_that_fails_inside_quantized_is_taken_off(worn: PreTrainedModel, here: Path) -> None:
    result = autoq.search(worn, BATCHES, budget="4.5bits", **QUICK)
    before = state(worn)
    with pytest.raises(KeyboardInterrupt), autoq.quantized(worn, result):
        raise KeyboardInterrupt
    assert state(worn) == before


def test_options_and_defaults_are_those_of_the_command_line() -> None:
    named = {f.name: f.default for f in fields(SearchConfig)}
    shown = inspect.signature(autoq.search).parameters
    assert set(shown) == set(named) - {"front"} | {"text", "progress"}
    for name, parameter in shown.items():
        if name not in ("text", "progress"):
            assert parameter.default == named[name], name
    assert set(arguments.SearchOptions.__annotations__) | set(arguments.ProfileOptions.__annotations__) == set(named) - {
        "model", "eval", "front"
    }  # fmt: skip
    shown = inspect.signature(autoq.profile).parameters
    assert all(shown[name].default == named[name] for name in arguments.ProfileOptions.__annotations__)


def test_a_name_gives_what_the_command_line_gives(demo_search: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(demo_search["cwd"])
    model, tokenizer = autoq.load_model("demo", dtype="float32")
    result = autoq.search(
        model, tokenizer, budget="4.5bits", kv_budget="5bits", samples=6, seq_len=64, eval_samples=4, eval_len=128, correct=2, run="again"
    )  # fmt: skip
    assert result.divergence.mean_kl == pytest.approx(demo_search["json"]["measured_kl"], rel=1e-9)
    assert result.recipe.model.id == "demo"
    kept = read_recipe(Path("run/recipe.yaml"))
    assert {u: e.format for u, e in result.recipe.weights.items()} == {u: e.format for u, e in kept.weights.items()}
    again = autoq.load_run("run")
    assert autoq.check(again).problems == ()
    assert again.front([4.5]).weights == autoq.front("run", [4.5]).weights
    exported = autoq.export(again, "vllm", "again-for-vllm", "up")
    assert isinstance(exported, api.ExportReport)
    assert exported.files[0].parts[0] == "again-for-vllm"
    with autoq.quantized(model, again):
        pass
    assert again.facts["measured_kl"] == demo_search["json"]["measured_kl"]
    assert autoq.front("again", [4.5]).weights[0].stderr is not None


def test_memory_of_a_loaded_model(llama: PreTrainedModel) -> None:
    found = autoq.memory(llama, context="64", batch=8)
    row = next(r for r in found.rows if r["kv_format"] == "bf16")
    assert row["kv_bytes"] == 2 * 8 * 64 * 2 * 16 * 2 * 2  # bytes x batch x tokens x KV heads x head_dim x (K, V) x layers
    assert "16 " in found._repr_html_() or "KiB" in found._repr_html_()
    assert autoq.memory(llama, context=64, available=2**20).rows == autoq.memory(llama, context=64, available="1MiB").rows
    fits = autoq.memory(llama, context=[32, 64], batch=[1, 2], available="1MiB")
    assert all("fits" in r for r in fits.rows)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"text": BATCHES, "budget": "4.5"}, "give eval in batches too"),
        ({"budget": "4.5"}, "give its tokenizer, or batches"),
        ({"text": [[1, 2, 3], [1, 2]], "budget": "4.5"}, "one length"),
        ({"text": torch.zeros(3, 32), "budget": "4.5"}, "whole numbers"),
        ({"text": {"input_ids": BATCHES, "attention_mask": torch.zeros_like(BATCHES)}, "budget": "4.5"}, "padding"),
        ({"text": 7, "budget": "4.5"}, "give a tokenizer"),
        ({"text": BATCHES + 100, "eval": BATCHES, "budget": "4.5"}, "the given batch has token ids up to"),
        ({"text": BATCHES, "eval": OTHERS[:3], "budget": "4.5", "trials": 2}, "give at least 4"),
        ({"text": BATCHES, "eval": OTHERS, "budget": "0.5bits"}, "budget"),
        ({"text": BATCHES, "eval": OTHERS, "budgit": 4}, "Did you mean 'budget'"),
        ({"text": BATCHES, "eval": OTHERS, "front": True}, "unknown option 'front'"),
        ({"text": BATCHES, "eval": OTHERS, "budget": 4, "dtype": "bfloat16"}, "loaded in float32 already"),
        ({"text": BATCHES, "eval": OTHERS, "budget": 4, "trials": 2, "workers": 2}, "give its name instead"),
        ({"text": BATCHES, "eval": OTHERS, "budget": 4, "samples": 1}, None),
        ({"text": BATCHES, "eval": OTHERS, "samples": 3}, "budget 4.5bits for the weights"),
        ({"text": BATCHES, "eval": OTHERS, "calib": "a.txt", "budget": 4}, "text and calib are both given"),
        ({"text": BATCHES, "eval": BATCHES[4:], "budget": 4}, "eval has 2 sequences that are profiled, whole or in part"),
        ({"text": BATCHES, "eval": BATCHES[:3, 8:24], "budget": 4}, "eval has 3 sequences that are profiled, whole or in part"),
        ({"text": BATCHES[:1], "eval": OTHERS, "budget": 4}, "text has 1 sequence"),
        ({"text": BATCHES.to("meta"), "eval": OTHERS, "budget": 4}, "on the meta device"),
        ({"text": BATCHES.to_sparse(), "eval": OTHERS, "budget": 4}, "sparse"),
        ({"text": [{"input_ids": [1, 2], "attention_mask": [[1], [1, 1]]}], "eval": OTHERS, "budget": 4}, "an attention mask that is none"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence_in_python_words(
    arguments: dict[str, Any], says: str | None, llama: PreTrainedModel, here: Path
) -> None:
    if says is None:  # what batches say themselves wins over options about text
        assert autoq.search(llama, **arguments).recipe.totals.bits <= 4.001
        return
    with pytest.raises(autoq.UserError) as error:
        autoq.search(llama, **arguments)
    assert says in str(error.value)
    assert "--" not in str(error.value)


def test_what_follows_a_search_takes_a_loaded_model_too(
    demo_search: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path(demo_search["cwd"], "run")
    model, tokenizer = autoq.load_model("demo", dtype="float32")
    before = state(model)
    found = autoq.retrieval(run, model, tokenizer, lengths=[96], depths=[0.5], samples=1)
    assert found.rows
    autoq.export(run, "mlx", out="out", rounding="up")
    imported = autoq.import_recipe("out/config.json", model, out="back.yaml")
    assert imported.recipe.model.id == "demo"
    assert autoq.check(run, model).problems == ()
    assert state(model) == before
    with pytest.raises(autoq.UserError, match="load it first"), autoq.quantized("demo", run):
        pass


def test_figures_of_another_recipe_are_not_shown_with_this_one(llama: PreTrainedModel, here: Path) -> None:
    """A kill between the two files leaves a recipe beside the figures of the search before it."""
    autoq.search(llama, BATCHES, budget=5, run="run", **QUICK)
    before = Path("run/result.json").read_bytes()
    autoq.search(llama, BATCHES, budget=4, run="run", **QUICK)
    assert autoq.load_run("run").facts["bits"] < 4.01
    with pytest.raises(KeyboardInterrupt):  # in its last stage: recipe and figures are the new ones already
        autoq.search(llama, BATCHES, budget=3.5, run="run", validate=1, progress=Interrupting("running on packed bytes"), **QUICK)
    assert autoq.load_run("run").facts["bits"] < 3.51
    Path("run/result.json").write_bytes(before)
    with pytest.raises(autoq.UserError, match="holds the figures of another recipe"):
        autoq.report("run")


def test_token_ids_of_a_data_loader(llama: PreTrainedModel, here: Path) -> None:
    loader = [{"input_ids": BATCHES[i : i + 2], "attention_mask": torch.ones(2, 32)} for i in (0, 2, 4)]
    profile = autoq.profile(llama, loader)
    same = autoq.profile(llama, BATCHES)
    assert profile.damage == same.damage


def test_a_refused_export_leaves_nothing(demo_search: dict[str, Any], here: Path) -> None:
    recipe = autoq.read_recipe(Path(demo_search["cwd"], "run"))
    for options in (
        {"to": "transformers", "rounding": "bogus"},
        {"to": "all", "model": "./nothing"},
        {"to": "all", "rounding": "bogus"},
    ):
        with pytest.raises(autoq.UserError):
            recipe.export(**options, out="out")
        assert not list(here.iterdir())
    with pytest.raises(autoq.UserError, match="out is empty"):
        recipe.export("mlx", "", "up")
    with pytest.raises(autoq.UserError, match="at least one length"):
        autoq.retrieval(Path(demo_search["cwd"], "run"), lengths=[])


def test_importing_autoq_imports_nothing_heavy() -> None:
    code = "import sys, autoq; print([m for m in ('torch', 'transformers', 'plotly', 'optuna') if m in sys.modules], 'search' in dir(autoq))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("]")[0] == "["
    assert "True" in done.stdout


def test_the_first_verb_turns_tritons_interpreter_on() -> None:
    """Loading a model imports triton, which chooses between interpreter and GPU when it is imported."""
    if torch.cuda.is_available():
        pytest.skip("kernels run natively here")
    code = "import autoq; autoq.load_model('demo'); import triton; print(bool(triton.knobs.runtime.interpret))"
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_every_public_name_is_there() -> None:
    for name in autoq.__all__:
        found = getattr(autoq, name)
        assert found.__doc__, name
    with pytest.raises(AttributeError):
        autoq.nonsense  # noqa: B018


def test_doctor_looks_at_everything() -> None:
    found = autoq.doctor()
    assert not found.problems
    assert {k.name for k in found.kernels} == {"encode", "decode", "product", "score", "kl", "attention"}
    assert all(k.state == "ok" for k in found.kernels)
    assert "torch" in {p.name for p in found.packages}
    assert "compressed-tensors" in found.tools
    if not torch.cuda.is_available():
        assert (found.device, found.kernels_on, found.native) == ("cpu", "interpreter", ())
