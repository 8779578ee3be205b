"""Optuna's samplers by name, seeded by trial."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, NSGAIIISampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autoq.errors import UserError, unknown

STARTUP = 8  # random trials before a model of the objective is made
SAMPLERS = ("tpe", "gp", "nsga3", "cmaes", "random")
SINGLE_OBJECTIVE = ("cmaes",)


def check_sampler(name: str, objectives: int = 1) -> None:
    """Raise UserError for a sampler that does not exist or cannot do this."""
    if name not in SAMPLERS:
        raise unknown("sampler", name, SAMPLERS)
    if objectives > 1 and name in SINGLE_OBJECTIVE:
        raise UserError(f"--sampler {name} has one objective, a front has {objectives}: use {', '.join(_several())}")


def _several() -> list[str]:
    return [name for name in SAMPLERS if name not in SINGLE_OBJECTIVE]


def make_sampler(name: str, space: dict[str, BaseDistribution], seed: int) -> BaseSampler:
    """Return a sampler for the parameters of `space`; raises UserError for an unknown name."""
    check_sampler(name)
    makers: dict[str, Callable[[int], BaseSampler]] = {
        "tpe": lambda s: TPESampler(multivariate=True, constant_liar=True, n_startup_trials=STARTUP, seed=s),
        "gp": lambda s: _ParametrizedGP(n_startup_trials=STARTUP, seed=s),
        "nsga3": lambda s: NSGAIIISampler(population_size=STARTUP, seed=s),
        "cmaes": lambda s: CmaEsSampler(n_startup_trials=1, seed=s, warn_independent_sampling=False),
        "random": lambda s: RandomSampler(seed=s),
    }
    return SeededByTrial(makers[name], space, seed)


class SeededByTrial(BaseSampler):
    """A sampler that draws trial n the same way whichever process runs it, and over the whole space from the first trial on.

    Optuna infers the space from finished trials; here it is known, and trials that measure a given recipe have no parameters.
    """

    def __init__(self, make: Callable[[int], BaseSampler], space: dict[str, BaseDistribution], seed: int) -> None:
        self.make, self.space, self.seed = make, space, seed
        self.inner = self._made(0)

    def _made(self, number: int) -> BaseSampler:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return self.make((self.seed * 1_000_003 + number) % 2**32)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self.inner = self._made(trial.user_attrs.get("slot", trial.number))
        self.inner.before_trial(study, trial)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:  # noqa: ARG002
        return self.space

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        return self.inner.sample_relative(study, trial, search_space)

    def sample_independent(self, study: Study, trial: FrozenTrial, name: str, distribution: BaseDistribution) -> Any:
        return self.inner.sample_independent(study, trial, name, distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Constraints have been set")  # every trial is feasible: no sampler needs them
            self.inner.after_trial(study, trial, state, values)

    def reseed_rng(self) -> None:
        """Seeds follow the trial: nothing to do."""


class _ParametrizedGP(GPSampler):
    """Optuna's GP sampler, which reads the parameters of every trial, without the trials that have none."""

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        return super().sample_relative(_Parametrized(study), trial, search_space)


class _Parametrized(Study):
    """A view of a study that leaves out finished trials without parameters."""

    def __init__(self, study: Study) -> None:
        self.__dict__ = study.__dict__

    def _get_trials(self, *arguments: Any, **options: Any) -> list[FrozenTrial]:
        found: list[FrozenTrial] = super()._get_trials(*arguments, **options)
        return [t for t in found if t.params or not t.state.is_finished()]
