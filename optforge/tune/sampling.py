"""Optuna proposes points of the space. Written to the API of Optuna 2.10, which Hydra's sweeper pins.

What the plan refuses or prunes is told as pruned: the sampler then looks elsewhere, and no time was spent on the device.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from optforge.errors import MissingDependency, Problem
from optforge.tune.options import TuneOptions
from optforge.tune.space import Params, Space

STARTUP_TRIALS = 6
"""Trials before TPE stops drawing at random; the hand-written recipes count."""


def require(options: TuneOptions) -> None:
    """
    Raises:
        MissingDependency: a search is asked for, and Optuna is not installed.
    """
    if options.sampler == "none":
        return
    try:
        import optuna  # noqa: F401  asked before the first minute is spent
    except ImportError as error:
        fix = "pip install 'optforge[sweep]', or tune.sampler=none to compare the given recipes alone"
        raise MissingDependency(Problem(where=f"tune.sampler={options.sampler}", what="needs Optuna", fix=fix)) from error


class Sampler:
    """A study in memory: proposals out, figures in."""

    def __init__(self, space: Space, options: TuneOptions) -> None:
        import optuna

        optuna.logging.set_verbosity(logging.ERROR)
        self._optuna, self.space = optuna, space
        with _without_warnings(optuna):
            sampler = _sampler(optuna.samplers, options)
        self.study = optuna.create_study(directions=["minimize"] * len(options.objectives), sampler=sampler)

    def ask(self) -> tuple[int, Params]:
        """The number of a new trial, and its point; the caller tells what became of it."""
        with _without_warnings(self._optuna):
            trial = self.study.ask()
            params = self.space.choose(lambda name, choices: str(trial.suggest_categorical(name, choices)))
        return int(trial.number), params

    def tell(self, trial: int, values: Sequence[float] | None) -> None:
        """What a proposal measured; None for one that was refused, pruned, failed, or missed a limit."""
        if values is None:
            self.study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
        else:
            self.study.tell(trial, list(values))

    def add(self, params: Params, values: Sequence[float] | None) -> None:
        """A recipe that was not proposed, with what it measured."""
        state = self._optuna.trial.TrialState
        distributions: dict[str, Any] = {}

        def given(name: str, choices: list[str]) -> str:
            distributions[name] = self._optuna.distributions.CategoricalDistribution(choices)
            return params[name]

        chosen = self.space.choose(given)
        with _without_warnings(self._optuna):
            trial = self._optuna.trial.create_trial(
                params=chosen,
                distributions=distributions,
                values=None if values is None else list(values),
                state=state.PRUNED if values is None else state.COMPLETE,
            )
            self.study.add_trial(trial)


@contextmanager
def _without_warnings(optuna: Any) -> Iterator[None]:
    """Optuna 2.10 calls most of what is used here experimental, and divides by zero where all points of an objective are equal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def _sampler(samplers: Any, options: TuneOptions) -> Any:
    if options.sampler == "tpe":
        return samplers.TPESampler(seed=options.seed, multivariate=True, group=True, n_startup_trials=STARTUP_TRIALS)
    if options.sampler == "nsga2":
        return samplers.NSGAIISampler(seed=options.seed, population_size=8)
    return samplers.RandomSampler(seed=options.seed)
