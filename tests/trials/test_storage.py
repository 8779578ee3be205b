"""Where trials are kept: what is refused in one sentence, never with a password; Optuna's own tools read it all."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import optuna
import pytest
from optuna.trial import TrialState

from autoq.errors import UserError
from autoq.trials import storage as storages
from autoq.trials.storage import JOURNAL, open_storage
from autoq.trials.study import Reaper, finished, load_study, open_study, queue_trials, work
from autoq.urls import without_password
from tests.trials import fake


def filled(url: str | None, run: Path, count: int = 14, traded: bool = False) -> optuna.Study:
    asked = fake.question(traded=traded)
    study = fake.study_in(open_storage(url, run), asked)
    queue_trials(study, asked, count)
    work(study, fake.objective(asked))
    return study


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("trials.db", "is no URL: give sqlite:///trials.db, postgresql://"),
        ("nosuchdb://u:secret@h/x", "is no database URL"),
        ("postgresql+nodriver://u:secret@h/x", "is no database URL"),
        ("mysql+pymysql://u:secret@h/x", "needs the driver pymysql: pip install pymysql"),
        ("postgresql://u:secret@127.0.0.1:9/x", "cannot be opened"),
        ("sqlite:////no/such/folder/trials.db", "cannot be opened"),
        ("grpc://somewhere", "must be grpc://host:port"),
        ("grpc://127.0.0.1:9", "no Optuna gRPC proxy answers"),
    ],
)
def test_a_storage_that_cannot_be_opened_is_told_without_its_password(
    url: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storages, "GRPC_WAIT", 0.2)
    with pytest.raises(UserError) as error:
        open_storage(url, tmp_path)
    assert message in str(error.value)
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)


def test_passwords_are_hidden_wherever_they_stand() -> None:
    assert without_password("--storage postgresql://me:pass@host/x --run a") == "--storage postgresql://me:***@host/x --run a"
    assert without_password("sqlite:///a.db") == "sqlite:///a.db"
    assert without_password("x://u:p%40q:r@h") == "x://u:***@h"
    assert without_password("x://u:p/a@ss@h/name") == "x://u:***@h/name"
    assert without_password("postgresql://h/x?user=u&password=p&a=b") == "postgresql://h/x?user=u&password=***&a=b"


def test_a_line_that_a_killed_process_left_unfinished_is_cut_off(tmp_path: Path) -> None:
    before = [t.values for t in finished(filled(None, tmp_path, 4))]
    journal = tmp_path / JOURNAL
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code":4,"trial')
    study = fake.study_in(open_storage(None, tmp_path), fake.question())
    assert journal.read_bytes().startswith(whole)
    queue_trials(study, fake.question(), 6)
    work(study, fake.objective(fake.question()))
    assert [t.values for t in finished(study)][:4] == before
    assert len(finished(study)) == 6


def test_a_damaged_journal_is_told(tmp_path: Path) -> None:
    filled(None, tmp_path, 2)
    journal = tmp_path / JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([lines[0], b"not json\n", *lines[1:]]))
    with pytest.raises(UserError, match=r"damaged .* move it away to begin anew"):
        fake.study_in(open_storage(None, tmp_path), fake.question())


def test_a_study_of_something_else_is_refused_and_a_missing_one_named(tmp_path: Path) -> None:
    filled(None, tmp_path, 1)
    opened = open_storage(None, tmp_path)
    with pytest.raises(UserError, match="asks something else"):
        open_study(opened, fake.STUDY, fake.question(), "another question", "tpe", 0, {})
    with pytest.raises(UserError, match="asks something else"):
        open_study(opened, fake.STUDY, fake.question(traded=True), "the question", "tpe", 0, {})
    with pytest.raises(UserError, match="there is no study 'other' in the run folder's journal"):
        load_study(opened, "other", None)
    with pytest.raises(UserError, match=r"in postgresql://u:\*\*\*@h/x"):
        load_study(opened, "other", "postgresql://u:p@h/x")


@pytest.fixture
def proxy(tmp_path: Path) -> str:
    """A gRPC proxy in front of an SQLite database."""
    from optuna.storages import run_grpc_proxy_server

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    behind = open_storage(f"sqlite:///{tmp_path}/behind.db", tmp_path)
    thread = threading.Thread(target=run_grpc_proxy_server, args=(behind,), kwargs={"host": "127.0.0.1", "port": port}, daemon=True)
    thread.start()
    return f"grpc://127.0.0.1:{port}"


def test_trials_run_through_a_grpc_proxy(proxy: str, tmp_path: Path) -> None:
    study = filled(proxy, tmp_path, 6)
    assert len(finished(study)) == 6
    direct = optuna.load_study(study_name=fake.STUDY, storage=open_storage(f"sqlite:///{tmp_path}/behind.db", tmp_path))
    assert [t.values for t in direct.trials] == [t.values for t in study.trials]


@pytest.mark.parametrize("kind", ["journal", "sqlite", "postgres"])
def test_the_dashboard_opens_it(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    from optuna_dashboard import wsgi

    urls = {"journal": None, "sqlite": f"sqlite:///{tmp_path}/t.db"}
    url = request.getfixturevalue("postgres") if kind == "postgres" else urls[kind]
    if kind == "postgres" and fake.STUDY in optuna.get_all_study_names(open_storage(url, tmp_path)):
        optuna.delete_study(study_name=fake.STUDY, storage=open_storage(url, tmp_path))
    filled(url, tmp_path, 5)
    application = wsgi(open_storage(url, tmp_path))
    (summary,) = asked_of(application, "/api/studies")["study_summaries"]
    assert summary["study_name"] == fake.STUDY
    detail = asked_of(application, f"/api/studies/{summary['study_id']}")
    assert [t["state"] for t in detail["trials"]] == ["Complete"] * 5
    attributes = {a["key"] for a in detail["trials"][0]["user_attrs"]}
    assert {"recipe", "bits", "weight_bytes", "kl_windows"} <= attributes


def asked_of(application: Callable[..., Iterator[bytes]], path: str) -> dict[str, Any]:
    environment: dict[str, object] = {"PATH_INFO": path}
    setup_testing_defaults(environment)
    answers: list[str] = []
    body = b"".join(application(environment, lambda status, *_: answers.append(status)))
    assert answers == ["200 OK"], (path, answers, body[:300])
    found: dict[str, Any] = json.loads(body)
    return found


def test_optunas_plots_work(tmp_path: Path) -> None:
    from optuna import visualization

    study = filled(None, tmp_path)
    for plot in (
        visualization.plot_optimization_history, visualization.plot_parallel_coordinate, visualization.plot_slice, visualization.plot_edf,
        visualization.plot_intermediate_values, visualization.plot_timeline, visualization.plot_rank,
    ):  # fmt: skip
        assert plot(study).data, plot.__name__
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    assert visualization.plot_param_importances(study, evaluator=evaluator).data
    front = filled(None, tmp_path / "front", 8, traded=True)
    figure = visualization.plot_pareto_front(front)
    assert figure.layout.xaxis.title.text == "kl"


def test_a_database_gives_up_a_silent_trial_by_its_heartbeat(tmp_path: Path) -> None:
    import time

    opened = open_storage(f"sqlite:///{tmp_path}/t.db", tmp_path, grace=2)
    asked = fake.question()
    study = fake.study_in(opened, asked)
    queue_trials(study, asked, 1)
    trial = study.ask()
    trial.set_user_attr("worker", {"host": "elsewhere", "pid": 1, "started": 1})
    opened.record_heartbeat(trial._trial_id)
    reaper = Reaper(study)
    reaper.check()
    assert study.trials[0].state == TrialState.RUNNING
    time.sleep(3.5)
    reaper.check()
    assert study.trials[0].state == TrialState.FAIL
    work(study, fake.objective(asked))
    assert [t.user_attrs["slot"] for t in finished(study)] == [0]
