"""Compiles a few whole programs for TPUs, on a machine without one, and writes XLA's figures beside the plan's roofline.

    python benchmarks/tpu_programs.py [--only 'tpu_v6e llama3_8b'] [--out FILE]

Every figure is a prediction: of XLA (`optimal_seconds`, its own lower bound) or of the plan. Nothing is measured but how long the
compile took here. Cases run one after another; the result is written after each, and cases that were not chosen keep their rows.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from optforge import config
from optforge.atomic import write_bytes
from optforge.errors import UserError
from optforge.plan import roofline, xla
from optforge.plan.make import make

RESULTS = Path(__file__).parent / "results" / "xla" / "tpu_programs.json"
WORKLOADS = {
    "prefill 512": ("workload=prefill", "workload.prompt_tokens=512"),
    "decode 512": ("workload=decode", "workload.context=512"),
}
CASES = [
    (hardware, model, recipe, workload, overrides)
    for hardware in ("tpu_v5e", "tpu_v6e")
    for model in ("smollm2_135m", "llama3_8b")
    for recipe in ("baseline", "llama_int8")
    for workload, overrides in WORKLOADS.items()
]
"""Batch 1; prompts of 512 tokens, and a decode step after 512."""
CASES.append(("tpu_v5e", "llama3_8b", "baseline", "decode 512 batch 16", (*WORKLOADS["decode 512"], "workload.batch_size=16")))
"""More than a v5e holds, to see where XLA draws the line."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only cases whose name holds this")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(argv)
    rows = {row["name"]: row for row in json.loads(chosen.out.read_text())["rows"]} if chosen.out.exists() else {}
    for case in CASES:
        name = " ".join(case[:4])
        if chosen.only not in name:
            continue
        rows[name] = {"name": name, "date": date.today().isoformat(), **_row(*case[:3], case[4])}
        print(_line(rows[name]), flush=True)
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        result = {"machine": f"{platform.machine()}, no TPU", "label": "predicted", "rows": list(rows.values())}
        write_bytes(chosen.out, json.dumps(result, indent=1).encode())
    return 0


def _row(hardware: str, model: str, recipe: str, workload: tuple[str, ...]) -> dict[str, Any]:
    overrides = [f"hardware={hardware}", f"model={model}", f"recipe={recipe}", "data=random_tokens", *workload]
    row: dict[str, Any] = {"overrides": overrides}
    try:
        plan = make(config.compose(config.parse(overrides, cwd=Path.cwd()), cwd=Path.cwd()), executes=False)
    except UserError as error:
        return {**row, "refused": str(error)}
    graph = plan.rewrites[-1].graph if plan.rewrites else plan.graph
    predicted = roofline.predict(graph, plan.target, mode="compiled")
    row["roofline"] = {
        "label": predicted.label,
        "pass_ms": None if predicted.latency_ms is None else predicted.latency_ms / graph.passes,
        "pass_ideal_ms": None if predicted.ideal_ms is None else predicted.ideal_ms / graph.passes,
        "bound": predicted.bound,
        "weight_bytes": predicted.weight_bytes,
        "kv_cache_bytes": predicted.kv_cache_bytes,
        "basis": predicted.basis,
    }
    row["xla"] = asdict(xla.compile_for(plan))
    return row


def _line(row: dict[str, Any]) -> str:
    if "refused" in row:
        return f"{row['name']:45} {row['refused']}"
    figures = row["xla"]["figures"]
    ours, theirs = row["roofline"]["pass_ms"], figures.get("optimal_ms")
    said = row["xla"]["reason"] or f"XLA {theirs if theirs is None else round(theirs, 3)} ms, roofline {ours and round(ours, 3)} ms"
    return f"{row['name']:45} {said}; compiled in {figures.get('compile_seconds')} s"


if __name__ == "__main__":
    raise SystemExit(main())
