"""Reports as runs leave them: the committed ones, with their samples changed in proportion."""

from __future__ import annotations

import json
from pathlib import Path

from optforge.report import store
from optforge.spec import Report

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
INT8, BF16 = (RESULTS / "cpu" / f"2026-11-30_smollm2_prefill_llama_{name}.json" for name in ("int8", "bf16"))
ON_H200 = RESULTS / "h200" / "2026-11-30_smollm2_prefill_llama_fp8.json"


def run(*, candidate: float = 1.0, machine: float = 1.0, memory: float = 1.0, **facts: object) -> Report:
    """A run of llama_int8 on a CPU.

    Args:
        candidate: how many times longer the optimized model takes than in the committed run.
        machine: how many times longer everything takes.
        memory: how many times more memory it takes.
        facts: top-level keys of the report to replace.
    """
    tree = json.loads(INT8.read_text(encoding="utf-8"))
    row = tree["optimized"]
    row["samples_s"] = [value * candidate * machine for value in row["samples_s"]]
    row["baseline_samples_s"] = [value * machine for value in row["baseline_samples_s"]]
    for key in ("p50", "p90", "mean", "stdev"):
        row["latency_ms"][key] *= candidate * machine
    row["tokens_per_s"] /= candidate * machine
    row["peak_memory_bytes"] = round(row["peak_memory_bytes"] * memory)
    return store.from_json(json.dumps({**tree, **facts}))
