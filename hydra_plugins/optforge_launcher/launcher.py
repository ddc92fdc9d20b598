"""A Hydra launcher that gives every job a fresh process, and returns whatever becomes of it.

Hydra loads this file whenever it starts, also for a single run, so what runs the jobs is imported when there are some.
It executes the file before the module is known to Python, in which a dataclass with postponed annotations fails: there
is no `from __future__ import annotations` here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class OptForgeLauncherConf:
    """It has no settings of its own: `sweep.*` are keys of the run, where they are checked with the others."""

    _target_: str = "hydra_plugins.optforge_launcher.launcher.OptForgeLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="optforge", node=OptForgeLauncherConf, provider="optforge")


class OptForgeLauncher(Launcher):
    """Runs the jobs of the sweep that `optforge run -m` has opened in this process."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Hydra's order of things: called once, before `launch`. A job composes anew, so the context is not needed."""
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs one batch of jobs. The value of each is what a sweeper may minimize, infinite for a job that failed."""
        from optforge.sweep import schedule, session

        jobs = session.current().batch([list(overrides) for overrides in job_overrides], initial_job_idx)
        schedule.run(session.current(), jobs, hydra=[str(text) for text in self.config.hydra.overrides.hydra])
        return [_returned(job.overrides, job.objective) for job in jobs]


def _returned(overrides: Sequence[str], objective: float | None) -> JobReturn:
    done = JobReturn(overrides=overrides, status=JobStatus.COMPLETED)
    done.return_value = math.inf if objective is None else objective
    return done
