"""The command line's contract: JSON alone on stdout, exit codes, one clear sentence for a mistake."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import autoq
from autoq import cli
from autoq.errors import UserError
from autoq.recipe import read_recipe
from tests.conftest import SEARCH_ARGUMENTS, llama_config, run_autoq

COMMANDS = ("search", "profile", "front", "show", "report", "formats", "memory", "doctor")


def test_search_prints_one_json_object_with_the_promised_keys(demo_search: dict[str, Any]) -> None:
    found = demo_search["json"]
    promised = {"recipe", "bits", "bits_whole_model", "kv_bits", "predicted_kl", "predicted_kl_stderr", "measured_kl", "measured_kl_stderr",
                "perplexity", "perplexity_original", "top1_agreement", "uniform", "seconds", "noise_floor"}  # fmt: skip
    assert promised <= set(found)
    assert len(demo_search["stdout"].strip().splitlines()) == 1
    assert found["uniform"]
    assert all({"format", "bits", "measured_kl"} <= set(u) for u in found["uniform"])
    assert found["bits"] <= 4.501
    assert found["kv_bits"] <= 5.001
    assert all(u["bits"] <= 4.501 and u["kv_bits"] <= 5.001 for u in found["uniform"])
    assert found["measured_kl"] > 10 * found["noise_floor"]
    assert {"prepare", "load", "profile", "correct", "solve", "measure"} <= set(found["seconds"])
    kept = json.loads((demo_search["cwd"] / found["run"] / "result.json").read_text())
    damage = kept.pop("damage")
    assert found == kept
    assert all(damage[unit] for unit in read_recipe(demo_search["cwd"] / found["recipe"]).weights)


def test_the_recipe_beats_every_uniform_format_of_no_more_bits(demo_search: dict[str, Any]) -> None:
    assert all(demo_search["json"]["measured_kl"] < u["measured_kl"] for u in demo_search["json"]["uniform"])


def test_progress_goes_to_stderr(demo_search: dict[str, Any]) -> None:
    for stage in ("loading the model", "profiling", "checking uniform formats", "solving", "measuring the recipe"):
        assert f"done {stage}" in demo_search["stderr"]
    assert "parameters are searched" in demo_search["stderr"]
    assert "peak memory" in demo_search["stderr"]


def test_the_same_seed_gives_the_same_recipe_byte_for_byte(demo_search: dict[str, Any], tmp_path: Path) -> None:
    again = run_autoq(*SEARCH_ARGUMENTS, "--run", "run", cwd=tmp_path)
    assert again.returncode == 0, again.stderr

    def body(path: Path) -> str:
        return re.sub(r"created: .*", "", path.read_text())

    assert body(tmp_path / "run" / "recipe.yaml") == body(demo_search["cwd"] / "run" / "recipe.yaml")


def test_another_budget_reuses_the_profile_and_prints_tables(demo_search: dict[str, Any]) -> None:
    arguments = [a for a in SEARCH_ARGUMENTS if a != "--json"]
    arguments[arguments.index("4.5bits")] = "60%"
    done = run_autoq(*arguments, "--run", "run", cwd=demo_search["cwd"])
    assert done.returncode == 0, done.stderr
    assert "the profile is complete" in done.stderr
    for expected in (
        "role",
        "share",
        "front, bits per weight",
        "◄ chosen",
        "this recipe",
        "predicted KL",
        "measured KL",
        "perplexity",
        "top-1",
        "written",
        "next",
    ):
        assert expected in done.stdout, expected
    recipe = yaml.safe_load((demo_search["cwd"] / "run" / "recipe.yaml").read_text())
    assert recipe["totals"]["weight_bytes"] <= 0.6 * 2 * recipe["model"]["parameters"]
    rebuilt = run_autoq(*SEARCH_ARGUMENTS, "--run", "run", cwd=demo_search["cwd"])  # others read this folder's recipe
    assert rebuilt.returncode == 0


def test_a_recipe_for_another_budget_is_kept(demo_search: dict[str, Any], tmp_path: Path) -> None:
    run = Path(shutil.copytree(Path(demo_search["cwd"], "run"), tmp_path / "run"))
    first = (run / "recipe.yaml").read_text()
    for file in run.glob("recipe-*"):
        file.unlink()
    (run / "recipe-4.5bits-and-kv-5bits.yaml").write_text("kept before")
    again = [
        "search",
        "--samples",
        "6",
        "--seq-len",
        "64",
        "--eval-samples",
        "2",
        "--eval-len",
        "64",
        "--correct",
        "0",
        "--run",
        str(run),
    ]
    done = run_autoq(*again, "--budget", "6bits")
    assert done.returncode == 0, done.stderr
    assert (run / "recipe-4.5bits-and-kv-5bits.yaml").read_text() == "kept before"
    assert (run / "recipe-4.5bits-and-kv-5bits-2.yaml").read_text() == first
    assert (run / "result-4.5bits-and-kv-5bits-2.json").is_file()
    assert "is kept as" in done.stderr
    assert (run / "recipe.yaml").read_text() != first


def test_front_and_show_read_the_run(demo_search: dict[str, Any]) -> None:
    cwd = demo_search["cwd"]
    front = json.loads(run_autoq("front", "run", "--budgets", "3,4,4.5,8", "--json", cwd=cwd).stdout)
    damages = [p["predicted_kl"] for p in front["weights"]]
    assert len(damages) == 4
    assert damages == sorted(damages, reverse=True)
    assert front["kv"]
    assert front["weights"][2]["predicted_kl"] == pytest.approx(
        sum(
            u["predicted_kl"]
            for u in json.loads(run_autoq("show", "run", "--json", cwd=cwd).stdout)["units"]
            if u["kind"] == "weight"
        ),
        rel=1e-3,
    )
    shown = run_autoq("show", "run/recipe.yaml", cwd=cwd)
    assert "bits per weight" in shown.stdout
    printed = run_autoq("front", "run", cwd=cwd).stdout
    assert printed.count("◄ chosen") == 2  # the recipe's bits on either side
    assert "note:" not in printed  # both sides were corrected
    assert not any(line.endswith(" ") for line in printed.splitlines())


def test_the_front_of_the_newest_run_says_what_is_not_corrected(tmp_path: Path) -> None:
    assert "there is no profile in 'runs'" in run_autoq("front", cwd=tmp_path).stderr
    few = ("--samples", "4", "--seq-len", "64", "--eval-samples", "2", "--eval-len", "64", "--correct", "2", "--weak", "0")
    assert run_autoq("search", "--budget", "4.5bits", *few, cwd=tmp_path).returncode == 0
    done = run_autoq("front", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("◄ chosen") == 1
    assert done.stdout.count("note: no uniform format was measured to correct the prediction of the cache") == 1
    command = re.search(r"`autoq (search [^`]*)`", " ".join(done.stdout.split()))
    assert command is not None
    again = run_autoq(*command[1].split(), "--eval-samples", "2", "--eval-len", "64", "--correct", "2", "--weak", "0", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "note: " not in run_autoq("front", cwd=tmp_path).stdout


def test_a_front_keeps_to_the_engine_of_its_run(tmp_path: Path) -> None:
    """vLLM has one cache format beside 16 bit: no mix of its own for every K and V."""
    few = ("--samples", "4", "--seq-len", "64", "--eval-samples", "2", "--eval-len", "64", "--correct", "0", "--weak", "0")
    done = run_autoq(
        "search", "--budget", "4.5bits", "--kv-budget", "8bits", "--engine", "vllm", "--run", "run", *few, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "autoq export run --to vllm --round scales" in done.stdout
    assert run_autoq("export", "run", "--to", "vllm", "--round", "scales", cwd=tmp_path).returncode == 0
    for point in json.loads(run_autoq("front", "run", "--json", cwd=tmp_path).stdout)["kv"]:
        assert set(point["formats"]) - {"bf16"} <= {"fp8", "fp8_cast", "fp8_e5m2", "nvfp4", "int8_head"}
        assert len(set(point["formats"]) - {"bf16"}) <= 1


def test_a_device_says_what_it_leaves_out() -> None:
    assert "left out nvfp4, " in run_autoq("memory", "--target", "h100").stdout
    assert "left out" not in run_autoq("memory", "--target", "b200").stdout
    assert "the model itself reads at most 1,024 tokens" in " ".join(run_autoq("memory", "--target", "h100").stdout.split())


def test_the_run_that_nobody_named_is_named(demo_search: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    shutil.copytree(Path(demo_search["cwd"], "run"), tmp_path / "runs" / "mine")
    for command in (("show",), ("front",), ("export", "--to", "all"), ("check",), ("report",)):
        done = run_autoq(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "the newest: runs/mine" in done.stderr, command


def test_memory_and_formats(tmp_path: Path) -> None:
    llama_config().save_pretrained(tmp_path)
    found = json.loads(run_autoq("memory", "--model", str(tmp_path), "--context", "64,128", "--batch", "1,2", "--json").stdout)
    assert set(found) == {"rows", "largest"}
    assert found["largest"] == []
    assert set(found["rows"][0]) == {"kv_format", "context", "batch", "kv_bytes", "weight_bytes", "total_bytes"}
    assert "KV format" in run_autoq("memory", "--model", str(tmp_path), "--context", "64").stdout
    fits = run_autoq("memory", "--model", str(tmp_path), "--context", "64", "--target", "a100").stdout
    assert "the most that fits into 80 GiB" in fits
    assert "context at batch 1" in fits
    listed = run_autoq("formats").stdout
    assert all(name in listed for name in ("nvfp4_4over6", "mxfp6_e3m2", "int4_channel", "fp8_w8a8"))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str) -> None:
    done = run_autoq(command, "--help")
    assert done.returncode == 0
    assert "Examples" in done.stdout
    assert f"autoq {command}" in done.stdout


def test_version_and_help_import_neither_torch_nor_transformers() -> None:

    code = (
        "import sys, autoq.cli\nfor a in (['--version'], ['--help'], ['search', '--help']):\n    sys.argv = ['autoq', *a]\n"
        "    try: autoq.cli.main()\n    except SystemExit as e: assert not e.code\nassert not {'torch', 'transformers', 'scipy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"autoq {autoq.__version__}" in done.stdout


MISTAKES = [
    (["search"], "give a budget"),
    (["search", "--budget", "lots"], "is not a budget"),
    (["search", "--budget", "1bits"], "cannot be met"),
    (["search", "--memory", "2MiB"], "the least this space reaches is"),
    (["search", "--memory", "4bits"], "give bytes, such as 24GiB"),
    (["search", "--memory", "much"], "give bytes, such as 24GiB"),
    (["search", "--kv-budget", "6", "--batch", "3000000000"], "--batch is 3000000000"),
    (
        ["search", "--memory", "6MiB", "--engine", "llama.cpp", "--space", "int"],
        "what --engine llama.cpp can run of the search space 'int' has none",
    ),
    (["memory", "--memory", ""], "give bytes"),
    (["memory", "--target", "h10", "--memory", "1GiB"], "h100"),
    (["retrieval", "--lengths", "x"], "--lengths 'x' is not a number of tokens"),
    (["search", "--memory", "6MiB", "--kv-budget", "7MiB"], "contradicts --memory 6MiB"),
    (["search", "--memory", "1GiB", "--context", "1M"], "beyond this model's maximum"),
    (["search", "--memory", "1GiB", "--batch", "0"], "--batch is 0"),
    (["search", "--kv-budget", "6", "--engine", "vlm"], "vllm"),
    (["search", "--kv-budget", "6", "--target", "h10"], "h100"),
    (["search", "--kv-budget", "3.5", "--engine", "sglang"], "cannot meet the budgets"),
    (["memory", "--target", "any"], "says nothing of its memory"),
    (["memory", "--memory", "4bits"], "give bytes"),
    (["search", "--kv-budget", "1bits"], "cannot be met"),
    (["search", "--kv-budget", "2KiB"], "the least this space reaches is"),
    (["search", "--budget", "4", "--space", "defualt"], "Did you mean 'default'"),
    (["search", "--budget", "4", "--model", "./nowhere"], "no model folder"),
    (["search", "--budget", "4", "--model", "x.gguf"], "no GGUF file"),
    (["search", "--budget", "4", "--calib", "nowhere.txt"], "no text file"),
    (["search", "--budget", "4", "--samples", "0"], "at least 2"),
    (["search", "--budget", "4", "--seq-len", "99999"], "maximum of 1024"),
    (["search", "--budget", "4", "--device", "cuda:99"], "--device"),
    (["search", "--budget", "4", "--dtype", "int8"], "--dtype"),
    (["search", "--budget", "4", "--include", "everything"], "only lm_head"),
    (["search", "--budget", "4", "--resume"], "no run of demo"),
    (["search", "--budget", "4", "--resume", "--run", "nowhere"], "no run folder"),
    (["search", "--budget", "4", "--context", "1M"], "maximum of 1,024"),
    (["front", "nowhere"], "no run folder"),
    (["show", "nowhere.yaml"], "no recipe"),
    (["show"], "no recipe"),
    (["memory", "--batch", "0"], "batch of 0"),
    (["memory", "--batch", "many"], "not a whole number"),
    (["memory", "--context", "big"], "number of tokens"),
]


@pytest.mark.parametrize(("arguments", "says"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments: list[str], says: str, tmp_path: Path) -> None:
    done = run_autoq(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_debug_lets_the_error_through(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be met"):
        run_autoq("search", "--budget", "1bits", "--debug", cwd=tmp_path)


@pytest.mark.parametrize("kind", ["t5", "bert"])
def test_case_19_other_kinds_of_models_are_refused(kind: str, tmp_path: Path) -> None:
    from transformers import BertConfig, T5Config

    config = (
        T5Config(architectures=["T5ForConditionalGeneration"]) if kind == "t5" else BertConfig(architectures=["BertForMaskedLM"])
    )
    config.save_pretrained(tmp_path)
    done = run_autoq("search", "--budget", "4", "--model", str(tmp_path))
    assert done.returncode == 2
    assert "decoder-only language models" in done.stderr


def test_case_22_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    config = llama_config()
    config.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stored, "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    done = run_autoq("search", "--budget", "4", "--model", str(tmp_path))
    assert done.returncode == 2
    assert "quantized already (gptq)" in done.stderr


def test_the_options_of_the_command_line_have_the_defaults_of_the_config() -> None:
    """No default is written twice: the command reads them from SearchConfig."""
    source = (Path(autoq.__file__).with_name("cli") / "searching.py").read_text()
    search = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "search")
    names = [a.arg for a in search.args.args]
    for name, default in zip(names[-len(search.args.defaults) :], search.args.defaults, strict=True):
        text = ast.unparse(default)
        assert text in ("None", "False") or text == f"D.{name}", name


def test_every_command_in_the_readme_is_one_that_autoq_takes() -> None:
    import re

    import typer

    group: Any = typer.main.get_command(cli.app)
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    lines = re.findall(r"^\$ autoq (.+)$|^(?:\.venv/bin/)?autoq ((?:search|front|show) .+?)  ", readme, flags=re.M)
    commands = [a or b for a, b in lines]
    assert len(commands) >= 6
    for line in commands:
        name, *rest = shlex.split(line)
        group.commands[name].make_context(name, rest)
