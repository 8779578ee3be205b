"""Optuna's samplers by name: over the whole space, the same whoever runs a trial, beside trials without parameters."""

from __future__ import annotations

import itertools

import optuna
import pytest
from optuna.storages import InMemoryStorage

from autoq.errors import UserError
from autoq.trials.samplers import SAMPLERS, check_sampler
from autoq.trials.study import finished, queue_trials, work
from tests.trials import fake

COUNT = 20


def run(sampler: str, stops: tuple[int, ...] = (COUNT,), seed: int = 0, traded: bool = False) -> optuna.Study:
    asked = fake.question(traded=traded)
    storage = InMemoryStorage()
    for count in stops:  # as after --resume: a new Study object, a new sampler, the same storage
        study = fake.study_in(storage, asked, sampler, seed)
        queue_trials(study, asked, count)
        work(study, fake.objective(asked))
    return study


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_study_measures_what_was_asked_and_finds_something_better(sampler: str) -> None:
    study = run(sampler)
    trials = finished(study)
    assert [t.number for t in trials] == list(range(COUNT))
    assert trials[0].user_attrs["recipe"] == fake.question().stored(fake.exact(fake.question()))["recipe"]
    assert trials[1].user_attrs["start"] == "uniform nvfp4_lsq"
    assert all(set(t.params) == set(fake.question().groups) for t in trials[2:])
    assert study.best_value < 0.99 * trials[0].values[0]  # the truth differs from the prediction, so there is something to find


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_an_interrupted_study_goes_on_as_if_nothing_had_happened(sampler: str) -> None:
    whole, parts = run(sampler), run(sampler, (7, 13, COUNT))
    assert [t.params for t in whole.trials] == [t.params for t in parts.trials]
    assert [t.values for t in whole.trials] == [t.values for t in parts.trials]


def test_another_seed_draws_others() -> None:
    assert run("random").trials[5].params != run("random", seed=1).trials[5].params


@pytest.mark.parametrize("sampler", ["tpe", "gp", "nsga3", "random"])
def test_a_front_is_a_study_with_several_objectives(sampler: str) -> None:
    study = run(sampler, traded=True)
    assert len(study.trials) == COUNT
    assert study.metric_names == ["kl", "weights_bits"]
    best = sorted({tuple(t.values) for t in study.best_trials}, key=lambda v: v[1])
    assert len(best) > 3
    assert all(a[0] > b[0] for a, b in itertools.pairwise(best))


def test_an_unknown_sampler_is_refused_and_so_is_one_objective_for_a_front() -> None:
    with pytest.raises(UserError, match=r"unknown sampler 'tpee'. Did you mean 'tpe'"):
        check_sampler("tpee")
    with pytest.raises(UserError, match="cmaes has one objective, a front has 2"):
        check_sampler("cmaes", 2)
