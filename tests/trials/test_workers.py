"""Many processes on one study: no trial is lost, none is run twice, a killed one is run again."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from autoq.trials.storage import open_storage
from autoq.trials.study import Reaper, finished, queue_trials, wait_for_others, work
from tests.trials import fake

COUNT = 24
Start = Callable[[str, float], "subprocess.Popen[str]"]


@pytest.fixture(params=["journal", "sqlite", "postgres"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        url: str = request.getfixturevalue("postgres")
        return url
    return "journal" if request.param == "journal" else f"sqlite:///{tmp_path}/trials.db"


def begin(storage: str, run: Path, sampler: str = "random", count: int = COUNT) -> optuna.Study:
    opened = open_storage(None if storage == "journal" else storage, run, grace=4)
    if fake.STUDY in optuna.get_all_study_names(opened):
        optuna.delete_study(study_name=fake.STUDY, storage=opened)
    study = fake.study_in(opened, fake.question(), sampler)
    queue_trials(study, fake.question(), count)
    return study


def ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def check(study: optuna.Study, count: int = COUNT) -> None:
    """Every slot was measured exactly once."""
    slots = Counter(t.user_attrs["slot"] for t in finished(study))
    assert slots == Counter(range(count))
    assert not study.get_trials(states=(TrialState.RUNNING, TrialState.WAITING))


def test_four_workers_lose_no_trial_and_run_none_twice(storage: str, tmp_path: Path, start_worker: Start) -> None:
    study = begin(storage, tmp_path)
    workers = [start_worker(storage, 0.02) for _ in range(4)]
    for worker in workers:
        assert worker.wait(120) == 0
    check(study)
    by = Counter(t.user_attrs["worker"]["pid"] for t in finished(study))
    assert len(by) > 1, "one process did it all: nothing was tested"
    alone = begin("journal", tmp_path / "alone")
    work(alone, fake.objective(fake.question()))
    params = {t.user_attrs["slot"]: t.params for t in finished(study)}
    assert params == {t.user_attrs["slot"]: t.params for t in finished(alone)}  # random draws do not depend on who makes them
    whole = [t for t in finished(study) if "stopped_after" not in t.user_attrs]
    known = {t.user_attrs["recipe"]: t.values for t in finished(alone) if "stopped_after" not in t.user_attrs}
    assert all(t.values == pytest.approx(known[t.user_attrs["recipe"]]) for t in whole if t.user_attrs["recipe"] in known)
    assert study.best_value == pytest.approx(alone.best_value)


def test_a_killed_worker_loses_only_its_running_trial(storage: str, tmp_path: Path, start_worker: Start) -> None:
    study = begin(storage, tmp_path, count=10)
    victim = start_worker(storage, 2.5)
    ready(victim)
    while True:  # killed after its first batch, when the second takes seconds
        running = study.get_trials(states=(TrialState.RUNNING,))
        if finished(study) and running and len(running[0].intermediate_values) == fake.SIZE:
            break
        time.sleep(0.05)
    before = {t.number: t.values for t in finished(study)}
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    lost = study.get_trials(states=(TrialState.RUNNING,))
    assert len(lost) == 1
    reaper = Reaper(study)
    assert reaper.check() == [lost[0].number]
    assert reaper.check() == []
    (again,) = (t for t in study.get_trials(states=(TrialState.WAITING,)) if t.user_attrs["slot"] == lost[0].user_attrs["slot"])
    assert again.params == lost[0].params
    work(study, fake.objective(fake.question()))
    check(study, 10)
    assert study.trials[lost[0].number].state == TrialState.FAIL
    assert before.items() <= {t.number: t.values for t in finished(study)}.items()


def test_a_survivor_takes_over_what_a_killed_worker_had(storage: str, tmp_path: Path, start_worker: Start) -> None:
    study = begin(storage, tmp_path, count=8)
    victim, survivor = start_worker(storage, 0.3), start_worker(storage, 0.3)
    ready(victim)
    ready(survivor)
    while not [
        t for t in study.get_trials(states=(TrialState.RUNNING,)) if t.user_attrs.get("worker", {}).get("pid") == victim.pid
    ]:
        assert victim.poll() is None, "the survivor took every trial: nothing was tested"
        time.sleep(0.05)
    os.kill(victim.pid, signal.SIGKILL)
    assert survivor.wait(120) == 0
    check(study, 8)


def test_another_machines_silent_trial_is_given_up(tmp_path: Path) -> None:
    study = begin("journal", tmp_path, count=1)
    trial = study.ask()
    trial.set_user_attr("worker", {"host": "elsewhere", "pid": 1, "started": 1})
    patient, hasty = Reaper(study, silence=60), Reaper(study, silence=0.2)
    assert patient.check() == hasty.check() == []
    time.sleep(0.15)
    trial.set_user_attr("batches", 1)  # a sign of life
    assert hasty.check() == []
    time.sleep(0.3)
    assert patient.check() == []
    assert hasty.check() == [0]
    assert not wait_for_others(study, patient, between=lambda: work(study, fake.objective(fake.question())))
    check(study, 1)


def test_the_last_trial_goes_to_one_process_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = begin("journal", tmp_path, count=1)
    other = fake.study_in(open_storage(None, tmp_path), fake.question(), "random")
    mine = study.ask()  # took it between the other's look and its own ask
    looks = iter([study.trials, []])  # the first look still sees the queued trial
    monkeypatch.setattr(other, "get_trials", lambda **_: next(looks))
    work(other, fake.objective(fake.question()))
    assert mine.number == 0
    assert finished(study) == []
    surplus = study.get_trials(states=(TrialState.FAIL,))
    assert len(surplus) == 1
    assert "slot" not in surplus[0].user_attrs


def test_an_interrupt_queues_the_running_trial_again(tmp_path: Path) -> None:
    study = begin("journal", tmp_path, count=3)

    def interrupted(trial: optuna.Trial) -> float:
        if trial.number == 1:
            raise KeyboardInterrupt
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        work(study, interrupted)
    waiting = study.get_trials(states=(TrialState.WAITING,))
    assert [t.user_attrs["slot"] for t in waiting] == [2, 1]
    work(study, fake.objective(fake.question()))
    check(study, 3)


def test_a_trial_that_always_fails_is_not_tried_for_ever(tmp_path: Path) -> None:
    from autoq.errors import AutoqError
    from autoq.trials.study import check_failures

    study = begin("journal", tmp_path, count=1)

    def failing(trial: optuna.Trial) -> float:
        raise MemoryError("no room")

    for _ in range(4):
        with pytest.raises(MemoryError):
            work(study, failing)
    work(study, failing)
    with pytest.raises(AutoqError, match="trial 0 failed 4 times"):
        check_failures(study, 1)


def test_fewer_trials_than_are_queued_end_earlier_and_more_go_on(tmp_path: Path) -> None:
    study = begin("journal", tmp_path, count=9)
    queue_trials(study, fake.question(), 4)
    work(study, fake.objective(fake.question()))
    assert sorted(t.user_attrs["slot"] for t in finished(study)) == [0, 1, 2, 3]
    assert not wait_for_others(study, Reaper(study))
    queue_trials(study, fake.question(), 9)
    work(study, fake.objective(fake.question()))
    check(study, 9)


def test_draws_follow_the_slot_whatever_failed_before(tmp_path: Path) -> None:
    plain, shifted = begin("journal", tmp_path / "a", count=6), begin("journal", tmp_path / "b", count=2)
    work(shifted, fake.objective(fake.question()))
    shifted.tell(shifted.ask().number, state=TrialState.FAIL)  # takes a number, is no trial of ours
    queue_trials(shifted, fake.question(), 6)
    for study in (plain, shifted):
        work(study, fake.objective(fake.question()))
    by_slot = [{t.user_attrs["slot"]: (t.params, t.values) for t in finished(study)} for study in (plain, shifted)]
    assert by_slot[0] == by_slot[1]


def test_no_trial_begins_after_the_deadline_and_a_later_run_goes_on(tmp_path: Path) -> None:
    study = begin("journal", tmp_path, count=30)
    work(study, fake.objective(fake.question(), 0.05), time.monotonic() + 0.5)
    done = len(finished(study))
    assert 0 < done < 30
    work(study, fake.objective(fake.question()))
    check(study, 30)
