"""Trials, fronts and the inverse question through the command line, on the demo model."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoq.allocation.space import load_space
from autoq.display import trials as trials_report
from autoq.recipe import read_recipe
from tests.conftest import run_autoq

ASKED = ("search", "--budget", "3.7bits", "--samples", "6", "--seq-len", "64", "--eval-samples", "6", "--eval-len", "64", "--correct", "2",
         "--trial-samples", "12", "--run", "run")  # fmt: skip


def search(cwd: Path, *more: str) -> dict[str, Any]:
    done = run_autoq(*ASKED, *more, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "stderr": done.stderr}


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the JSON of a search with twelve trials."""
    folder = tmp_path_factory.mktemp("tried")
    return folder, search(folder, "--trials", "12")


@pytest.fixture
def copied(tried: tuple[Path, dict[str, Any]], tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    shutil.copytree(tried[0] / "run", tmp_path / "run")
    return tmp_path, tried[1]


def trials_in(run: Path, study: str) -> list[Any]:
    import optuna

    from autoq.trials.storage import open_storage

    found: list[Any] = optuna.load_study(study_name=study, storage=open_storage(None, run)).trials
    return found


def test_the_best_confirmed_recipe_is_returned_with_by_how_much(tried: tuple[Path, dict[str, Any]]) -> None:
    folder, found = tried
    rows = found["confirmed"]
    assert rows[0]["recipe"] == "exact solution"
    assert {r["recipe"].split()[0] for r in rows} == {"exact", "trial", "uniform"}
    best = min(rows, key=lambda r: r["measured_kl"])
    assert found["chosen"] == best["recipe"]
    assert [r["recipe"] for r in rows if r["is_best"]] == [best["recipe"]]
    assert found["measured_kl"] == best["measured_kl"]
    assert all(r["more_than_best"] == pytest.approx(r["measured_kl"] - best["measured_kl"]) for r in rows)
    recipe = read_recipe(folder / found["recipe"])
    assert recipe.measured is not None
    assert recipe.measured.chosen == found["chosen"]
    assert recipe.measured.trials is not None
    assert recipe.measured.trials.measured == 12
    assert recipe.measured.trials.recipe_minus_solution == pytest.approx(-rows[0]["more_than_best"], rel=1e-4, abs=1e-12)
    assert found["bits"] <= 3.701


def test_every_trial_is_feasible_and_in_the_journal(tried: tuple[Path, dict[str, Any]]) -> None:
    folder, found = tried
    report = found["trials"]
    trials = trials_in(folder / "run", report["study"])
    assert report["measured"] == len(trials) == 12
    assert Counter(t.user_attrs["slot"] for t in trials) == Counter(range(12))
    assert all(t.user_attrs["bits"] <= 3.701 for t in trials)
    assert {t.user_attrs.get("start", "")[:7] for t in trials} >= {"uniform", "98 % of", "95 % of"}
    assert report["stopped"] == sum("stopped_after" in t.user_attrs for t in trials) > 0


def test_the_three_texts_share_nothing(tried: tuple[Path, dict[str, Any]]) -> None:
    from autoq.model.load import load_tokenizer, model_source
    from autoq.model.text import sequences, text_sources

    folder, found = tried
    asked = json.loads((folder / "run" / f"study-{found['trials']['study']}.json").read_text())
    tokenizer, (calib, measure) = load_tokenizer(model_source("demo")), text_sources(None, None)
    profiled, confirmed = sequences(tokenizer, calib, 6, 64), sequences(tokenizer, measure, 6, 64)
    both = sequences(tokenizer, calib, 18, 64)
    assert asked["ids"] == both[6:].tolist()
    windows = [tuple(w) for part in (profiled.tolist(), asked["ids"], confirmed.tolist()) for w in part]
    assert len(set(windows)) == 6 + 12 + 6


def test_the_same_question_again_measures_nothing_anew_and_more_trials_go_on(copied: tuple[Path, dict[str, Any]]) -> None:
    folder, first = copied
    again = search(folder, "--trials", "12")
    assert again["trials"] == {**first["trials"], "storage": again["trials"]["storage"]}
    assert again["chosen"] == first["chosen"]
    assert "has 12 trials already" in again["stderr"]
    more = search(folder, "--trials", "14", "--resume", "--sampler", "random")
    assert more["trials"]["study"] == first["trials"]["study"]
    assert more["trials"]["measured"] == 14
    other = search(folder, "--trials", "1", "--seed", "0", "--budget", "4.6bits")
    assert other["trials"]["study"] != first["trials"]["study"]
    assert other["trials"]["measured"] == 1
    within = {f.name for f in load_space("default").weights if f.storage_bits((256, 256)) / 256**2 < 4.601}
    assert {r["recipe"] for r in other["confirmed"][1:]} == {f"uniform {name}" for name in within}  # every one of no more bits


def test_workers_share_a_study(copied: tuple[Path, dict[str, Any]]) -> None:
    folder, first = copied
    found = search(folder, "--trials", "40", "--workers", "2")
    trials = trials_in(folder / "run", first["trials"]["study"])
    assert Counter(t.user_attrs["slot"] for t in trials if t.state.name == "COMPLETE") == Counter(range(40))
    assert found["trials"]["measured"] == 40
    assert (folder / "run" / "worker-1.log").is_file()


def test_a_worker_joins_from_a_copy_of_the_run_folder(copied: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, first = copied
    storage = f"sqlite:///{tmp_path}/shared.db"
    begun = search(folder, "--trials", "5", "--storage", storage, "--study", "mine", "--timeout", "0.01s")
    assert begun["trials"]["measured"] < 5
    shutil.copytree(folder / "run", tmp_path / "elsewhere")
    done = run_autoq("worker", "--run", str(tmp_path / "elsewhere"), "--study", "mine", "--storage", storage, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["trials"]) == 5 - begun["trials"]["measured"]
    ended = search(folder, "--trials", "5", "--storage", storage, "--study", "mine")
    assert ended["trials"]["measured"] == 5
    assert ended["trials"]["best"]["kl"] == pytest.approx(
        min(t.values[0] for t in trials_in(folder / "run", first["trials"]["study"])[:5])
    )


def test_what_a_worker_is_given_must_belong_together(copied: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, first = copied
    study = first["trials"]["study"]
    for arguments, message in (
        (("--run", "run", "--study", "nosuch"), "has no study-nosuch.json: copy the run folder"),
        (("--run", "nowhere", "--study", study), "copy the run folder of the search that began the study"),
        (
            ("--run", "run", "--study", study, "--storage", f"sqlite:///{tmp_path}/other.db"),
            f"there is no study '{study}' in sqlite",
        ),
        (("--run", "run", "--study", study, "--timeout", "soon"), "--timeout 'soon' is not a time: write 90s, 15m or 2h"),
        (("--run", "run", "--study", study, "--processes", "0"), "--processes is 0"),
    ):
        done = run_autoq("worker", *arguments, cwd=folder)
        assert done.returncode == 2, done.stderr
        assert message in done.stderr.replace("\n", " ")
    asked = folder / "run" / f"study-{study}.json"
    content = json.loads(asked.read_text())
    asked.write_text(json.dumps({**content, "ids": content["ids"][:4]}))
    done = run_autoq("worker", "--run", "run", "--study", study, cwd=folder)
    assert done.returncode == 2
    assert "is not what the study" in done.stderr
    asked.write_text("{")
    assert run_autoq("worker", "--run", "run", "--study", study, cwd=folder).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trials", "-1"), "--trials is -1"),
        (("--trials", "5", "--sampler", "tep"), "unknown sampler 'tep'. Did you mean 'tpe'"),
        (("--trials", "5", "--workers", "0"), "--workers is 0"),
        (("--workers", "3"), "--workers is about trials: give --trials too"),
        (("--study", "x"), "--study is about trials"),
        (("--trials", "5", "--storage", "nowhere"), "is no URL: give sqlite:///trials.db"),
        (("--trials", "5", "--trial-samples", "900000"), "use fewer (--trial-samples)"),
        (("--trials", "5", "--timeout", "0"), "--timeout '0' is not a time"),
        (("--max-kl", "0"), "--max-kl is 0.0, but must be above 0"),
        (("--max-kl", "0.1", "--front"), "--max-kl asks for one recipe and --front for all"),
        (("--front", "--sides", "keys"), "unknown value of --sides 'keys'"),
        (("--front", "--trials", "5", "--sampler", "cmaes"), "cmaes has one objective, a front has 2"),
        (("--weak", "-2"), "--weak is -2"),
        (("--trials", "5", "--study", "a/b"), "--study 'a/b' must be letters, digits"),
        (("--sides", "both"), "--sides is about --front and --max-kl"),
        (("--sampler", "gp"), "--sampler is about trials"),
        (("--front", "--trials", "3", "--validate", "2"), "--validate checks one recipe"),
        (("--front",), "--front without --trials draws every budget: leave the budgets out"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], message: str, copied: tuple[Path, dict[str, Any]]) -> None:
    done = run_autoq(*ASKED, *arguments, cwd=copied[0])
    assert done.returncode == 2, done.stderr
    assert message in " ".join(done.stderr.split())
    assert not done.stdout


def test_a_password_is_written_nowhere(copied: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = copied
    done = run_autoq(*ASKED, "--trials", "3", "--storage", "postgresql://me:hunter2@127.0.0.1:9/x", cwd=folder)
    assert done.returncode == 2
    written = b"".join(p.read_bytes() for p in folder.rglob("*") if p.is_file())
    assert b"hunter2" not in written
    assert "hunter2" not in done.stderr


def test_the_smallest_recipe_within_a_damage(copied: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = copied
    arguments = [a for a in ASKED if a not in ("--budget", "3.7bits")]
    done = run_autoq(*arguments, "--max-kl", "0.02", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["measured_kl"] <= 0.02
    assert found["measured_kl"] > 0.013, "far from the damage allowed: not the smallest"
    assert all(u["bits"] <= found["bits"] + 0.001 for u in found["uniform"])
    written = yaml.safe_load((folder / found["recipe"]).read_text())
    assert written["budget"]["max_kl"] == 0.02
    begun = json.loads(
        run_autoq(*arguments, "--max-kl", "0.02", "--trials", "4", "--timeout", "0.01s", "--json", cwd=folder).stdout
    )
    study = begun["trials"]["study"]
    joined = run_autoq(
        "worker", "--run", "run", "--study", study, "--json", cwd=folder
    )  # asks the same, at the budget that was found
    assert joined.returncode == 0, joined.stderr
    measured = [t for t in trials_in(folder / "run", study) if t.state.name == "COMPLETE"]
    assert len(measured) == 4
    assert all(t.user_attrs["bits"] <= found["bits"] + 0.001 for t in measured)
    other = json.loads(run_autoq(*arguments, "--max-kl", "0.05", "--trials", "1", "--json", cwd=folder).stdout)
    assert other["trials"]["study"] != study
    looser = json.loads(run_autoq(*arguments, "--max-kl", "0.05", "--json", cwd=folder).stdout)
    assert looser["bits"] < found["bits"] - 0.2
    assert looser["measured_kl"] <= 0.05


def test_a_front_of_weights_and_cache_is_measured_and_its_recipes_written(copied: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = copied
    arguments = [a for a in ASKED if a not in ("--budget", "3.7bits")]
    done = run_autoq(*arguments, "--front", "--sides", "both", "--trials", "10", "--sampler", "nsga3", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((folder / "run" / "front.json").read_text())
    points = found["measured"]
    assert len(points) > 2
    for point in points:
        recipe = read_recipe(folder / point["recipe"])
        assert recipe.totals.bits == point["bits"]
        assert recipe.measured is not None
        assert recipe.measured.kl == pytest.approx(point["measured_kl"], rel=1e-5)
        beaten = [
            p
            for p in points
            if p["bits"] <= point["bits"] and p["kv_bits"] <= point["kv_bits"] and p["measured_kl"] < point["measured_kl"]
        ]
        assert not beaten
    assert any(p["is_knee"] for p in found["weights"])
    assert [p["bytes"] for p in found["kv"]] == sorted(p["bytes"] for p in found["kv"])
    assert found["total"]
    shown = run_autoq("front", "run", "--measure", "3.5,4.5", "--measure-kv", "4", cwd=folder)
    assert shown.returncode == 0, shown.stderr
    for expected in (
        "◆ knee",
        "bytes of 1,024 tokens",
        "all weights and the cache of",
        "measured on untouched text",
        "weights 4.5bits",
        "cache 4bits",
    ):
        assert expected in shown.stdout
    refused = run_autoq("front", "run", "--measure", "1.5", cwd=folder)
    assert refused.returncode == 2
    assert "1.5 bits for the weights cannot be met" in refused.stderr


def test_the_tables_say_how_the_trials_ended_and_what_mattered(copied: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = copied
    found = search(folder, "--trials", "16")
    done = run_autoq(*ASKED, "--trials", "16", cwd=folder)
    assert done.returncode == 0, done.stderr
    shown, report = " ".join(done.stdout.split()), found["trials"]
    parameter, share = next(iter(report["importances"].items()))
    for expected in (
        f"16 trials on 12 windows, {report['stopped']} stopped early, {report['repeated']} with a recipe known already",
        f"study {report['study']} in run/trials.journal",
        "confirmed on untouched text",
        f"{found['chosen']} is the result",
        f"what mattered (PED-ANOVA): {parameter} {100 * share:.0f} %",
        "run/trials.journal # every trial; optuna-dashboard opens it",
    ):
        assert expected in shown, expected
    pointed = run_autoq(*ASKED, cwd=folder)
    assert "--budget 3.7bits --trials 60" in " ".join(pointed.stdout.split())
    assert "confirmed on untouched text" not in pointed.stdout


@pytest.mark.parametrize(
    ("windows", "begins", "ends"),
    [
        ([0.30, 0.32, 0.28], "the exact solution is the result", "no trial and no uniform format measured less"),
        ([0.10, 0.12, 0.08], "trial 7 is the result: 0.1 ± ", "nats less than the exact solution"),
        ([0.10, 0.32, 0.08], "trial 7 is the result: 0.033 ± 0.067 nats", "which is within what chance explains"),
    ],
)
def test_the_verdict_gives_the_difference_and_says_when_chance_explains_it(windows: list[float], begins: str, ends: str) -> None:
    from types import SimpleNamespace

    import numpy as np

    from autoq.api.confirming import Candidate, Confirmed
    from autoq.measure.divergence import Divergence

    def measured(values: list[float]) -> Divergence:
        kl = np.array(values)[:, None]
        return Divergence(kl, kl > 0, kl, kl)

    confirmed = Confirmed(
        (Candidate("exact solution", {}, measured([0.2, 0.22, 0.18])), Candidate("trial 7", {}, measured(windows))), ()
    )
    verdict = trials_report.verdict(SimpleNamespace(confirmed=confirmed))  # type: ignore[arg-type]
    assert verdict.startswith(begins)
    assert verdict.endswith(ends)
