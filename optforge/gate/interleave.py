"""Lets processes run in turns, a sample each, in rounds that go forwards and backwards.

What drifts meets all of them alike, and cancels in the ratio of one round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from optforge.gate.side import Side

SETTLE_S = 0.01
"""Between two samples: threads of the process before spin for some milliseconds before they sleep."""
CHECK_EVERY = 4
"""Rounds between two looks at whether there are enough."""

Samples = list[list[float]]
"""A list of seconds for each call that takes turns, paired by round."""


def alternate(
    turns: Sequence[tuple[Side, str]], *, least: int, max_s: float, enough: Callable[[Samples], bool], timeout_s: float
) -> Samples:
    """Samples of each of `turns` (a side and the name of one of its calls).

    Args:
        least: rounds that are always run.
        max_s: seconds after which no further round begins, once those are done.
        enough: asked every few rounds after that; True ends it.
        timeout_s: for one sample.

    Raises:
        ChildFailed, ChildTimeout: a side has ended, or does not answer.
    """
    samples: Samples = [[] for _ in turns]
    begun = time.monotonic()
    rounds = 0
    while rounds < least or time.monotonic() - begun < max_s:
        order = range(len(turns)) if rounds % 2 == 0 else reversed(range(len(turns)))
        for index in order:
            side, call = turns[index]
            time.sleep(SETTLE_S)
            samples[index].append(side.sample(call, timeout_s))
        rounds += 1
        if rounds >= least and (rounds - least) % CHECK_EVERY == 0 and enough(samples):
            break
    return samples
