"""Holds predictions for accelerators that are not at hand against figures that others published.

    python benchmarks/published.py

Each figure names where it was published. It was measured by others, with other software, so the comparison is looser than
benchmarks/prediction.py: an engine's time holds its scheduler, and its kernels are its own. What a plan says of such a target is at the
published peaks, or with the efficiencies of the nearest device that was measured here, and bears no error band.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from optforge import config
from optforge.atomic import write_bytes
from optforge.plan import make
from optforge.plan.document import SpeedRow, Study
from optforge.plan.study import study

RESULTS = Path(__file__).with_name("results") / "published"
SHARES = (
    "DistServe/test-sample on Hugging Face, profile_breakdown/profiling_bs1_pl512/decode_comparison.csv: vLLM, Llama-3-8B, percent of time"
)
PAIR = "alpharomercoma/MI300X-vs-H200, REPORT.md at 6077fdc, 2026: vLLM 0.26.0 on both, one GPU each"
MAXTEXT = "MaxText documentation, Optimized models tiering, v0.2.2: Llama 3.1 8B on 256 v6e chips, bf16, sequences of 8192"

AT_PEAKS = " (the plan: both at their peaks)"
TRAINING = ("recipe=baseline", "model=llama3_8b", "data=random_tokens", "workload=train", "workload.batch_size=1")
DECODE = ("model=llama3_8b", "data=random_tokens", "workload=decode", "workload.context=512", "workload.new_tokens=16")
CAPTURED = "steps.compile.mode=reduce_overhead"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure beside the plan's."""

    what: str
    published: float
    predicted: float | None
    unit: str
    source: str

    @property
    def error(self) -> float | None:
        return None if self.predicted is None else self.predicted / self.published - 1


def planned(*overrides: str) -> Study:
    run = config.compose(config.parse(list(overrides), cwd=Path.cwd()), cwd=Path.cwd())
    return study(make.make(run, executes=False), kernels=False, xla=False)


def last(found: Study, figure: Callable[[SpeedRow], float | None]) -> float | None:
    """A figure of the whole recipe's row."""
    assert found.speed is not None
    return figure(found.speed.rows[-1])


def shares() -> list[Row]:
    """Where the time of one decoded token goes on an MI300X: the products of a layer, the head, attention."""
    found = planned("recipe=llama_bf16", "hardware=mi300x", *DECODE, CAPTURED)
    assert found.speed is not None
    spent = {(one.name, one.module.rpartition(".")[2]): one.share for one in found.speed.top}
    listed = [
        ("gate and up", ("aten.mm", "gate_up_proj"), 35.53),
        ("down", ("aten.mm", "down_proj"), 19.15),
        ("q, k and v", ("aten.mm", "qkv_proj"), 9.63),
        ("output", ("aten.mm", "o_proj"), 7.81),
        ("head", ("aten.mm", "lm_head"), 4.51),
        ("attention", ("aten.scaled_dot_product_attention", "self_attn"), 8.05),
    ]
    return [
        Row(what=f"MI300X decode, share of {name}", published=figure, predicted=_percent(spent.get(key)), unit="%", source=SHARES)
        for name, key, figure in listed
    ]


def pairs() -> list[Row]:
    """How an MI300X compares with an H200."""
    rows = []
    for what, published, overrides in (
        (
            f"8B decode, bf16, one stream: H200 / MI300X speed{AT_PEAKS}",
            1.02,
            ("recipe=llama_bf16", *DECODE, CAPTURED),
        ),
        (
            f"8B training, bf16: H200 / MI300X speed{AT_PEAKS}",
            1.36,
            (*TRAINING, "workload.sequence=4096"),
        ),
    ):
        # at the published peaks on both sides: only one of the two has a calibration
        h200, mi300x = (last(planned(f"hardware={name}", *overrides), lambda row: row.ideal_ms) for name in ("h200", "mi300x"))
        rows.append(Row(what=what, published=published, predicted=mi300x / h200 if h200 and mi300x else None, unit="times", source=PAIR))
    return rows


def training() -> list[Row]:
    """Training on a TPU: the plan's roofline is a bound, so it lies above what was reached."""
    found = planned("hardware=tpu_v6e", *TRAINING, "workload.sequence=8192")
    rate = last(found, lambda row: row.tokens_per_s)
    return [
        Row(
            what="8B training on v6e, tokens per second and chip (the plan: a bound)",
            published=7207.0,
            predicted=rate,
            unit="tok/s",
            source=MAXTEXT,
        )
    ]


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def markdown(rows: list[Row]) -> str:
    lines = [
        f"# Predictions against published figures, {date.today().isoformat()}",
        "",
        "    python benchmarks/published.py",
        "",
        "Nothing here was measured by this project. Every figure in `published` is another's; `predicted` is the plan's.",
        "",
        "| what | published | predicted | predicted / published - 1 | source |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        figures = (f"{row.published:.4g} {row.unit}", "n/a" if row.predicted is None else f"{row.predicted:.4g} {row.unit}")
        error = "n/a" if row.error is None else f"{row.error:+.0%}"
        lines.append(f"| {row.what} | {figures[0]} | {figures[1]} | {error} | {row.source} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = [*shares(), *pairs(), *training()]
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"{date.today().isoformat()}_published"
    write_bytes(stem.with_suffix(".json"), (json.dumps([asdict(row) for row in rows], indent=1) + "\n").encode())
    write_bytes(stem.with_suffix(".md"), markdown(rows).encode())
    print(markdown(rows))


if __name__ == "__main__":
    main()
