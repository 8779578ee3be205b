"""A trial stops when it has surely lost, answers a known recipe from the study, and leaves Optuna's tools what they need."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import optuna
import pytest
from optuna.storages import InMemoryStorage

from autoq.trials.importance import importances
from autoq.trials.objective import WORST, Objective, paired, window_values
from autoq.trials.question import Choice, Question
from autoq.trials.study import finished, queue_trials, work
from tests.trials import fake


def run(count: int, asked: Question | None = None, objective: Objective | None = None) -> optuna.Study:
    asked = asked or fake.question()
    study = fake.study_in(InMemoryStorage(), asked)
    queue_trials(study, asked, count)
    work(study, objective or fake.objective(asked))
    return study


def test_a_loser_is_stopped_and_its_kl_estimated_from_the_windows_it_shares_with_the_best() -> None:
    trials = finished(run(2))
    uniform, asked = trials[1], fake.question()
    assert uniform.user_attrs["stopped_after"] == 8
    assert len(uniform.intermediate_values) == 8
    whole = [kl for part in fake.measure(asked)(asked.starts["uniform nvfp4_lsq"], range(fake.BATCHES)) for kl in part.values()]
    assert uniform.values[0] == pytest.approx(sum(whole) / len(whole), rel=0.1)
    assert uniform.values[0] > trials[0].values[0]
    best, more = paired(uniform, trials[0])[0], uniform.values[0] - trials[0].values[0]
    assert best == pytest.approx(more)


def test_the_best_trial_was_measured_on_every_window() -> None:
    study = run(30)
    assert len(window_values(study.best_trial)) == fake.BATCHES * fake.SIZE
    assert "stopped_after" not in study.best_trial.user_attrs
    stopped = [t for t in finished(study) if "stopped_after" in t.user_attrs]
    assert 0 < len(stopped) < 30
    assert all(t.values[0] > study.best_value for t in stopped)


def test_a_known_recipe_is_not_measured_again() -> None:
    asked, measured = fake.question(), []
    inner = fake.measure(asked)

    def counted(choice: Choice, order: Sequence[int]) -> Iterator[dict[int, float]]:
        measured.append(choice)
        yield from inner(choice, order)

    study = fake.study_in(InMemoryStorage(), asked)
    study.enqueue_trial(asked.firsts[0], user_attrs={"slot": 0})
    study.enqueue_trial(dict.fromkeys(asked.groups, 0.25), user_attrs={"slot": 1})  # the same for all: the same recipe
    work(study, Objective(asked, counted, fake.BATCHES))
    first, second = finished(study)
    assert len(measured) == 1
    assert second.user_attrs["same_as"] == first.number
    assert second.user_attrs["recipe"] == first.user_attrs["recipe"]
    assert second.values == first.values
    assert second.intermediate_values == first.intermediate_values


def test_no_number_counts_as_the_worst() -> None:
    asked = fake.question()

    def broken(choice: Choice, order: Sequence[int]) -> Iterator[dict[int, float]]:
        yield dict.fromkeys(range(fake.BATCHES * fake.SIZE), math.nan)

    study = run(1, asked, Objective(asked, broken, 1))
    assert study.best_value == WORST


def test_every_trial_tells_what_it_is() -> None:
    asked = fake.question()
    for trial in finished(run(6, asked)):
        assert {"recipe", "bits", "weight_bytes", "predicted_kl", "kl_windows", "worker", "slot"} <= set(trial.user_attrs)
        assert trial.constraints == {"--budget": pytest.approx(trial.user_attrs["bits"] / 5.0 - 1, abs=1e-6)}
        assert all(violation <= 0 for violation in trial.constraints.values())


def test_the_order_of_the_windows_is_another_one_for_every_trial() -> None:
    asked, orders = fake.question(), []
    inner = fake.measure(asked)

    def noted(choice: Choice, order: Sequence[int]) -> Iterator[dict[int, float]]:
        orders.append(tuple(order))
        yield from inner(choice, order)

    run(8, asked, Objective(asked, noted, fake.BATCHES))
    assert all(sorted(order) == list(range(fake.BATCHES)) for order in orders)
    assert len(set(orders)) > 2


def test_what_mattered_is_told_from_ten_trials_on() -> None:
    assert importances(finished(run(9))) == {}
    found = importances(finished(run(30)))
    assert set(found) == set(fake.question().groups)
    assert sum(found.values()) == pytest.approx(1, abs=0.01)
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_a_front_reports_no_steps_but_keeps_the_windows() -> None:
    study = run(8, fake.question(traded=True), fake.objective(fake.question(traded=True)))
    assert all(not t.intermediate_values and len(window_values(t)) == 16 for t in finished(study))
    assert all(t.values[1] == t.user_attrs["bits"] for t in finished(study))


def test_corners_of_a_front_are_measured_first() -> None:
    asked = replace(fake.question(traded=True), corners=({"weights/bits": 4.0}, {"weights/bits": 6.0}))
    first, second, _, third = finished(run(4, asked, fake.objective(asked)))
    assert first.params["weights/bits"] == 4.0
    assert second.params["weights/bits"] == 6.0
    assert all(first.params[name] == second.params[name] == 0 for name in asked.groups)
    assert any(third.params[name] for name in asked.groups)
