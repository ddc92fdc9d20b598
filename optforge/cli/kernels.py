"""`optforge kernels list|check|bench|tune`: the package's own operators, on the device at hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from optforge.cli import tables
from optforge.errors import EXIT_CRASH, EXIT_OK, ConfigError, MissingDependency, Problem, near
from optforge.kernels import checking
from optforge.kernels.cross_compile import triton_version


def list_command(*, as_json: bool) -> int:
    """Every operator with the dtypes and arches that it takes."""
    rows = [(name, dtypes, checking.ARCHES, text) for name, (dtypes, text) in checking.OPERATORS.items()]
    if as_json:
        print(json.dumps([dict(zip(("operator", "dtypes", "arches", "what"), row, strict=True)) for row in rows], indent=1))
    else:
        tables.show(rows)
    return EXIT_OK


def check_command(names: Sequence[str], *, as_json: bool) -> int:
    """Holds kernels against float64; 1 where one is wrong."""
    _needs_triton()
    where, found = checking.check(_chosen(names, checking.OPERATORS))
    wrong = [row for row in found if not row["passed"]]
    if as_json:
        print(json.dumps({"where": where, "trials": found}, indent=1))
        return EXIT_CRASH if wrong else EXIT_OK
    rows = []
    for name in dict.fromkeys(row["operator"] for row in found):
        own = [row for row in found if row["operator"] == name]
        rows.append((name, f"{sum(row['passed'] for row in own)} of {len(own)}", f"{max(row['error'] for row in own):.1e}"))
    tables.show([("operator", "right", "largest relative error"), *rows])
    for row in wrong:
        print(f"wrong: {row['operator']}: {row['label']} (error {row['error']:.1e})")
    print(f"{'WRONG' if wrong else 'right'} on {where}, against float64")
    return EXIT_CRASH if wrong else EXIT_OK


def bench_command(names: Sequence[str], *, rows: int, context: int) -> int:
    """Times Llama-3-8B's shapes with the configurations that would be launched, as a share of the copy bandwidth's floor."""
    _needs_gpu()
    import torch

    from optforge.kernels.configurations import origin
    from optforge.kernels.devices import device_of

    bandwidth = _bandwidth()
    lines = [("case", "us", "of the floor", "configuration")]
    for case in checking.cases(_chosen(names, checking.TUNED), rows, context):
        spent = checking.microseconds(lambda case=case: case.run(None))  # type: ignore[misc]  # bound now
        where = origin(case.shape, device_of(torch.empty(0, device="cuda")))
        lines.append((case.label, f"{spent:.1f}", f"{case.moved / bandwidth * 1e6 / spent:.2f}", where))
    tables.show(lines)
    print(f"{torch.cuda.get_device_name()}, {rows} rows, bf16; floor: {bandwidth / 1e12:.2f} TB/s, a copy in this run")
    return EXIT_OK


def tune_command(names: Sequence[str], *, rows: int, context: int, budget_s: float) -> int:
    """Finds the fastest configuration of each case within the time and keeps it in the user's cache folder."""
    _needs_gpu()
    import torch

    from optforge.kernels import configurations, tuned
    from optforge.kernels.devices import device_of

    device = device_of(torch.empty(0, device="cuda"))
    bandwidth = _bandwidth()
    cases = list(checking.cases(_chosen(names, checking.TUNED), rows, context))
    for case in cases:
        found, tried, refused = checking.best(case, device, budget_s=budget_s / len(cases))
        if found is None:
            print(f"{case.label}: nothing of {tried} ran", file=sys.stderr)
            continue
        share = case.moved / bandwidth * 1e6 / found["microseconds"]
        tuned.write(device, {case.shape.key: found | {"floor_share": share}})  # as each is found: an interrupt keeps it
        print(
            f"{case.label}: {found['microseconds']:.1f} us, {share:.2f} of the floor; {tried} tried, {refused} refused; {found['config']}"
        )
    configurations.forget()
    print(f"kept in {tuned.path(device)}")
    return EXIT_OK


def _bandwidth() -> float:
    """Bytes per second of a large copy, reads and writes together."""
    import torch

    source = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    return 2 * source.numel() / (checking.microseconds(lambda: target.copy_(source)) * 1e-6)


def _chosen(names: Sequence[str], known: Sequence[str] | dict[str, tuple[str, str]]) -> list[str]:
    """The operators that were named, or all.

    Raises:
        ConfigError: a name is not known.
    """
    strangers = [name for name in names if name not in known]
    if strangers:
        every = f"one of {', '.join(known)}"
        said = [Problem(where="kernels", what=f"no operator {name!r} here", fix=near(name, known) or every) for name in strangers]
        raise ConfigError(*said)
    return list(names) or list(known)


def _needs_triton() -> None:
    if triton_version() is None:
        raise MissingDependency(Problem(where="kernels", what="there is no Triton here", fix="pip install triton (it exists for Linux)"))


def _needs_gpu() -> None:
    """Raises MissingDependency where there is no GPU: nothing is timed under an interpreter."""
    _needs_triton()
    import torch

    if not torch.cuda.is_available():
        fix = "run it on a machine with one; optforge kernels check works here"
        raise MissingDependency(Problem(where="kernels", what="there is no GPU here, and nothing is timed under an interpreter", fix=fix))
