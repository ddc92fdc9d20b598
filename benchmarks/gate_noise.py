"""How often `optforge gate` raises a false alarm, and how often it catches a slow-down.

    python benchmarks/gate_noise.py record runs.jsonl [--pairs 120]     # half an hour to an hour; goes on where it was stopped
    python benchmarks/gate_noise.py report runs.jsonl [--out FILE.md]   # a minute

`record` starts one program twice, as two fresh processes, again and again. Each process is a run of an unchanged program: it
has a candidate (100 small layers) and a reference (the same layers with two more passes over the activations each), as a run
of OptForge has a model that was fused and the one as it was. Two calls take turns at a time, as the gate and the run do it:

    A's candidate and B's                       a pair of --ab, nothing changed
    A's candidate and B's of 103 layers         a pair of --ab, B works 3% more
    a candidate and its own reference           a run (of A, and of B), nothing changed
    B's of 110 layers and its own reference     a run that works 10% more

`report` draws gates from those records, 20,000 of each kind, and lets the code of the gate judge them. A gate against a
stored baseline is some runs of one time and a run of another, never of the same pair; a gate in --ab mode is five pairs,
and up to ten while the limit is undecided. Slow-downs are taken twice: from the candidates that really work more, and by
multiplying the samples of the unchanged one. Exit code 1 if false alarms are more than 1 in 200, or fewer than 19 in 20
slow-downs are caught.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from optforge.gate import ab, figures, judge, limits, stored
from optforge.gate import statistics as estimates
from optforge.gate.interleave import alternate
from optforge.gate.side import Side
from optforge.gate.statistics import Figure
from optforge.measure import contention
from optforge.spec import Measure, Measurement, Report

PATH = "latency_ms.p50"
STORED_LIMIT, AB_LIMIT = "+5%", "+1%"
STORED = ((1, 1), (3, 1), (5, 1))
"""Stored runs, and new ones."""
FALSE_ALARMS, CAUGHT = 1 / 200, 19 / 20
DRAWS = 20_000
LAYERS = 100
SLOWER = {"slow3": 103, "slow10": 110}
"""Candidates that work more: layers of a call."""
TURNS = {
    "pair": (("a", "candidate"), ("b", "candidate")),
    "pair.slow3": (("a", "candidate"), ("b", "slow3")),
    "run.a": (("a", "candidate"), ("a", "reference")),
    "run.b": (("b", "candidate"), ("b", "reference")),
    "run.slow10": (("b", "slow10"), ("b", "reference")),
}
"""What takes turns: the first, and what it is divided by (a run) or what is divided by it (a pair).

Rounds end as those of a run and of the gate do.
"""
DEFAULTS = Measure()
BATCH_S = 0.02
TIMEOUT_S = 600.0


# --- the program -------------------------------------------------------------------------------------------------------


def program(threads: int) -> None:
    """The recorded program: serves a candidate, its reference, and the slower candidates."""
    import torch

    from optforge.gate import serve

    stream = serve.answers()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    weights = [torch.randn(256, 256) / 16 for _ in range(8)]
    start = torch.randn(32, 256)

    def layers(count: int, *, fused: bool) -> Callable[[], Any]:
        def call() -> Any:
            h = start
            for layer in range(count):
                h = h @ weights[layer % len(weights)]
                h = torch.relu_(h) if fused else torch.relu(h * 1.5 + 0.1)
            return h

        return call

    calls = {"candidate": layers(LAYERS, fused=True), "reference": layers(LAYERS, fused=False)}
    calls |= {name: layers(count, fused=True) for name, count in SLOWER.items()}
    with torch.no_grad():
        serve.serve(stream, calls, synchronize=lambda: None, batch_s=BATCH_S, ready={"threads": torch.get_num_threads()})


# --- recording ---------------------------------------------------------------------------------------------------------


def record(path: Path, pairs: int, threads: int) -> None:
    """Appends pairs to `path` until it holds `pairs`; the process that starts first takes turns."""
    done = len(read(path)) if path.exists() else 0
    with tempfile.TemporaryDirectory() as folder:
        for index in range(done, pairs):
            found = one_pair(Path(folder), "ab" if index % 2 == 0 else "ba", threads)
            with path.open("a", encoding="ascii") as file:
                file.write(json.dumps(found) + "\n")
            print(f"{index + 1} of {pairs} pairs", file=sys.stderr, flush=True)


def one_pair(folder: Path, order: str, threads: int) -> dict[str, Any]:
    """Two fresh processes of the program, two of their calls in alternating rounds at a time."""
    import torch

    command = [sys.executable, str(Path(__file__).resolve()), "program", "--threads", str(threads)]
    with ExitStack() as stack:
        sides = {name: stack.enter_context(Side(name, command, cwd=folder, log=folder / f"{name}.log")) for name in order}
        ready = [side.ready(TIMEOUT_S) for side in sides.values()]
        watch = contention.CpuWatch()
        turns = {
            name: alternate(
                [(sides[side], call) for side, call in two],
                least=max(ab.LEAST_ROUNDS, DEFAULTS.min_rounds),
                max_s=DEFAULTS.max_s,
                enough=lambda samples: ab.steady(samples, DEFAULTS.steady),
                timeout_s=TIMEOUT_S,
            )
            for name, two in TURNS.items()
        }
        load = watch.read()
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "samples_s": {name: [[round(value, 9) for value in values] for values in two] for name, two in turns.items()},
        "threads": ready[0]["threads"],
        "torch": torch.__version__,
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": load,
    }


def read(path: Path) -> list[dict[str, Any]]:
    """The recorded pairs; a last line that a kill cut off is dropped."""
    found = []
    for line in path.read_text(encoding="ascii").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


# --- what the records say ----------------------------------------------------------------------------------------------


class Records:
    """What the gate needs of each recorded process and pair."""

    def __init__(self, pairs: Sequence[dict[str, Any]]) -> None:
        self.pairs = pairs
        self.runs = [[self._figure(pair, turns) for turns in ("run.a", "run.b")] for pair in pairs]
        self.slower = [self._figure(pair, "run.slow10") for pair in pairs]

    @staticmethod
    def _figure(pair: dict[str, Any], turns: str) -> Figure:
        """A run as a report would tell it: the time over that of its reference, with its own error."""
        samples, reference = pair["samples_s"][turns]
        found = figures.against_reference(Report(optimized=Measurement(samples_s=samples, baseline_samples_s=reference)), PATH)
        assert found is not None
        return found

    def ratios(self, turns: str) -> list[float]:
        """B over A of every pair."""
        return [ab.ratio(*pair["samples_s"][turns], PATH) for pair in self.pairs]

    def contended(self, index: int) -> bool:
        return bool(self.pairs[index]["load"].get("contended"))

    def raw(self) -> list[float]:
        """The candidate's median in each process, as it is."""
        return [statistics.median(pair["samples_s"][turns][0]) for pair in self.pairs for turns in ("run.a", "run.b")]


def stored_rate(records: Records, generator: random.Random, *, base: int, new: int, slower: float = 1.0, works: bool = False) -> float:
    """How often the gate misses +5% against `base` stored runs.

    Args:
        slower: what the new run's time is multiplied by.
        works: whether the new run is of the candidate that really works more.
    """
    limit, rules = limits.parse(f"{PATH} <= {STORED_LIMIT}"), limits.Rules(limits=())
    missed = 0
    for _ in range(DRAWS):
        drawn = generator.sample(range(len(records.pairs)), base + new)
        old, late = (stored.undisturbed(indices, records.contended) for indices in (drawn[:base], drawn[base:]))
        before = [records.runs[index][generator.randrange(2)] for index in old]
        unchanged = [records.runs[index][generator.randrange(2)] for index in late]
        after = [records.slower[index] for index in late] if works else unchanged
        after = [replace(figure, value=figure.value * slower) for figure in after]
        contended = any(map(records.contended, (*old, *late)))
        found = estimates.of_runs(after, before, stored.assumed(PATH, rules, contended=contended))
        missed += judge.hold(limit, found).verdict == judge.MISSED
    return missed / DRAWS


def ab_rate(ratios: Sequence[float], generator: random.Random, *, slower: float = 1.0) -> float:
    """How often the gate misses +1% with five pairs, and up to ten while it is undecided."""
    limit = limits.parse(f"{PATH} <= {AB_LIMIT}")

    def held(found: list[float]) -> str:
        return judge.hold(limit, estimates.of_pairs(found)).verdict

    missed = 0
    for _ in range(DRAWS):
        drawn = [ratio * slower for ratio in generator.sample(list(ratios), ab.MOST * ab.PAIRS)]
        found = ab.until_decided(drawn.__getitem__, ab.PAIRS, lambda found: held(found) != judge.UNDECIDED)
        missed += held(found) == judge.MISSED
    return missed / DRAWS


def report(path: Path, out: Path | None) -> int:
    """Prints what the records say; 1 where it is not good enough."""
    pairs = read(path)
    records, generator = Records(pairs), random.Random(0)
    rows: list[tuple[str, str, float, str, bool]] = []

    def add(gate: str, program_: str, rate: float, least: float | None) -> None:
        good = rate <= FALSE_ALARMS if least is None else rate >= least
        rows.append(
            (gate, program_, rate, f"at most {FALSE_ALARMS:.1%}" if least is None else f"at least {least:.0%}" if least else "", good)
        )

    for base, new in STORED:
        name = f"stored, {base} against {new}"
        aim = CAUGHT if base == STORED[-1][0] else 0.0
        add(name, "unchanged", stored_rate(records, generator, base=base, new=new), None)
        add(name, "works 10% more", stored_rate(records, generator, base=base, new=new, works=True), aim)
        add(name, "samples x 1.10", stored_rate(records, generator, base=base, new=new, slower=1.10), aim)
    same = records.ratios("pair")
    add("--ab, 5 to 10 pairs", "unchanged", ab_rate(same, generator), None)
    add("--ab, 5 to 10 pairs", "works 3% more", ab_rate(records.ratios("pair.slow3"), generator), CAUGHT)
    add("--ab, 5 to 10 pairs", "samples x 1.03", ab_rate(same, generator, slower=1.03), CAUGHT)
    text = _document(records, rows, path)
    print(text, end="")
    if out is not None:
        out.write_text(text, encoding="utf-8")
    return 0 if all(row[-1] for row in rows) else 1


def _document(records: Records, rows: Sequence[tuple[str, str, float, str, bool]], path: Path) -> str:
    """The report in Markdown."""
    first, last = records.pairs[0], records.pairs[-1]
    loads = [pair["load"]["contention"]["other_cpu_share"] or 0.0 for pair in records.pairs]
    shared = sum(map(records.contended, range(len(records.pairs))))
    slow3 = statistics.median(records.ratios("pair.slow3")) - 1
    slow10 = (
        statistics.median(one.value for one in records.slower) / statistics.median(one.value for two in records.runs for one in two) - 1
    )
    spread = {
        "raw time, between processes": records.raw(),
        "time over the reference's, between processes": [figure.value for pair in records.runs for figure in pair],
        "B over A, between pairs": records.ratios("pair"),
    }
    lines = [
        f"# False alarms and catches of `optforge gate`, {first['started'][:10]}",
        "",
        f"{2 * len(records.pairs)} runs in {len(records.pairs)} pairs, {first['started']} to {last['started']}; "
        f"{first['cpu']}, {first['cores']} cores, "
        f"threads of the program: {first['threads']}, torch {first['torch']}. "
        f"Other programs took {statistics.median(loads):.0%} of the cores' time "
        f"(median of the pairs; most {max(loads):.0%}); {shared} pairs count as contended.",
        "",
        f"    python benchmarks/gate_noise.py report {path.name}",
        "",
        f"Limits: {STORED_LIMIT} against a stored baseline, {AB_LIMIT} with --ab. {DRAWS:,} draws each.",
        "",
        "| gate | program | missed the limit | wanted | |",
        "|---|---|---|---|---|",
        *(
            f"| {gate} | {program_} | {rate:.2%} | {wanted} | {'yes' if good else '**no**'} |"
            for gate, program_, rate, wanted, good in rows
        ),
        "",
        "| spread of an unchanged program | standard deviation | largest distance from the median |",
        "|---|---|---|",
        *(f"| {name} | {_deviation(values):.2%} | {_farthest(values):.1%} |" for name, values in spread.items()),
        "",
        f"The candidates that work more were slower by {slow3:.1%} (103 layers for 100; median of the pairs) and by {slow10:.1%} "
        "(110 layers; median of the runs).",
        "",
    ]
    return "\n".join(lines)


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(math.log(value) for value in values)


def _farthest(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    return max(abs(value / middle - 1) for value in values)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser("program", help="what is recorded; started by `record`")
    recording = commands.add_parser("record", help="append pairs of runs")
    recording.add_argument("file", type=Path)
    recording.add_argument("--pairs", type=int, default=120)
    for command in (serving, recording):
        command.add_argument("--threads", type=int, default=1, help="of the program")
    reporting = commands.add_parser("report", help="how often the gate is right")
    reporting.add_argument("file", type=Path)
    reporting.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if options.command == "program":
        program(options.threads)
    elif options.command == "record":
        record(options.file, options.pairs, options.threads)
    else:
        return report(options.file, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
