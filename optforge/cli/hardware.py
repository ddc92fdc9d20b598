"""`optforge hardware measure`: what this machine really reaches, as a profile on stdout and in the user's cache."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from optforge.errors import MissingDependency, Problem


def measure_command(*, calibrate: bool) -> None:
    """Measures the best device of this machine; prints the profile as YAML on stdout and progress on stderr.

    Raises:
        MissingDependency: no backend finds a device.
    """
    import transformers  # noqa: F401 - its loggers must be there before they can be kept quiet

    from optforge import config, logs
    from optforge.measure import contention
    from optforge.plan import measured
    from optforge.plan.devices import detect

    tell = teller()
    devices = detect(config.hardware)
    if not devices:
        raise MissingDependency(Problem(where="hardware", what="no backend found a device", fix="optforge doctor"))
    backend = devices[0].backend
    seen = backend.detect()
    assert seen is not None, "it was found a moment ago"
    tell(f"measuring {measured.identity(seen, backend)}; what else runs meanwhile makes its figures worse")
    watch = contention.watch(backend.torch_device())
    with logs.quiet("torch", "transformers", "torchao"):
        found = measured.measure(seen, backend, tell, calibrate_s=measured.CALIBRATE_S if calibrate else None)
    print(measured.to_yaml(found.hardware), end="")
    if (state := watch.read()).get("contended"):
        share = state["contention"].get("other_cpu_share")
        taken = f" and took {share:.0%} of the cores' time" if share is not None else ""
        tell(f"warning: something else ran meanwhile{taken}: these figures are too low; measure again on an idle machine")
    points = len(found.calibration.points)
    kept = f"with {points} points of single operators" if points else "without points of single operators (--calibrate adds them)"
    tell(f"kept for hardware=auto, {kept}")


def teller() -> Callable[[str], None]:
    """Prints each line on stderr with the seconds since now."""
    begun = time.perf_counter()

    def tell(text: str) -> None:
        print(f"{time.perf_counter() - begun:4.0f} s  {text}", file=sys.stderr, flush=True)

    return tell
