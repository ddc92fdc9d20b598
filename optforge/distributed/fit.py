"""A training that may be interrupted at any step: it goes on from its newest checkpoint, with the losses and the data from there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from optforge.distributed import world
from optforge.distributed.checkpoint import Checkpoints

if TYPE_CHECKING:
    from collections.abc import Callable

    from optforge.training.trainer import Trainer


def fit(
    trainer: Trainer, *, steps: int, folder: Path, every: int, keep: int = 2, told: Callable[[int, float], None] | None = None
) -> list[float]:
    """Trains up to step `steps`, and returns the mean loss of every step from the first on, over all ranks.

    What was trained before, by this process or by one that was killed, by as many ranks or by others, is not trained again.

    Args:
        trainer: begun afresh; every rank calls this with its own.
        folder: of the checkpoints.
        every: steps between two checkpoints, which are written while the training goes on.
        told: is given each step's number (from 1) and loss.

    Raises:
        ModelError: the checkpoint cannot be read by this model or this number of ranks.
        ValueError: it belongs to other data or another global batch.
    """
    checkpoints = Checkpoints(folder, keep=keep)
    losses: list[float] = []
    begun = checkpoints.latest()
    if begun is not None:
        state, _ = checkpoints.load(begun, trainer.module, trainer.optimizer)  # type: ignore[arg-type]  # of PyTorch's classes
        trainer.stream.load_state_dict(_global(state["stream"], trainer))
        trainer.steps, losses = int(state["steps"]), list(state["losses"])
    while trainer.steps < steps:
        own = float(trainer.step())
        losses.append(math.fsum(gathered := world.gather(own)) / len(gathered))
        checkpoints.poll()
        if told is not None:
            told(trainer.steps, losses[-1])
        if trainer.steps % every == 0 or trainer.steps == steps:
            state = {"stream": trainer.stream.state_dict(), "steps": trainer.steps, "losses": losses}
            checkpoints.save(trainer.steps, trainer.module, trainer.optimizer, state)  # type: ignore[arg-type]  # of PyTorch's classes
    checkpoints.finish()
    return losses


def _global(state: dict[str, int], trainer: Trainer) -> dict[str, int]:
    """A stored position as this trainer counts: another number of ranks makes a step of more or fewer, smaller or larger parts.

    Raises:
        ValueError: the items that were seen are no whole number of this trainer's global batches.
    """
    own = int(trainer.stream.state_dict()["global_batch"])
    seen = state["position"] * state["global_batch"]
    if seen % own:
        raise ValueError(f"{seen} items were seen, no whole number of global batches of {own}")
    return {**state, "position": seen // own, "global_batch": own}
