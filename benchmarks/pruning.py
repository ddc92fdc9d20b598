"""Perplexity of SmolLM2 after pruning: single weights, 2:4, whole parts, and after a short healing.

Wikipedia text in windows of 512 tokens without overlap; the calibration samples are other text, behind it. Perplexity is computed here,
not by OptForge's own quality code. The model comes from a 4-bit file, so "as loaded" is itself a rounded model.

    python benchmarks/pruning.py                                   # every row, 16,384 tokens, 48 samples
    python benchmarks/pruning.py --rows wanda_30,sparsegpt_2_4 --tokens 2048 --samples 8

Writes benchmarks/results/cpu/<date>_pruning.json and .md; rows that it ran before under the same settings are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optforge import config, environment, registry
from optforge.backends.cpu import CpuBackend
from optforge.calibrate.samples import Samples
from optforge.measure import sparsity
from optforge.measure.size import weight_bytes
from optforge.models.base import Loaded
from optforge.share import alias
from optforge.spec import Quality
from optforge.transforms.base import Context, Receipt

RESULTS = Path(__file__).parent / "results" / "cpu"
WINDOW = 512
TWO_FOUR = {"pattern": "2:4"}
HEAL = {"steps": 40, "batch_size": 2, "samples": 64, "sample_tokens": 256}
ROWS: dict[str, list[dict[str, Any]]] = {
    "as loaded": [],
    "magnitude_30": [{"use": "prune/magnitude", "sparsity": 0.3}],
    "wanda_30": [{"use": "prune/wanda", "sparsity": 0.3}],
    "sparsegpt_30": [{"use": "prune/sparsegpt", "sparsity": 0.3}],
    "wanda_50": [{"use": "prune/wanda", "sparsity": 0.5}],
    "sparsegpt_50": [{"use": "prune/sparsegpt", "sparsity": 0.5}],
    "magnitude_2_4": [{"use": "prune/magnitude", **TWO_FOUR}],
    "wanda_2_4": [{"use": "prune/wanda", **TWO_FOUR}],
    "sparsegpt_2_4": [{"use": "prune/sparsegpt", **TWO_FOUR}],
    "sparsegpt_4_8": [{"use": "prune/sparsegpt", "pattern": "4:8"}],
    "sparsegpt_2_4_int8": [{"use": "prune/sparsegpt", **TWO_FOUR}, {"use": "quantize/int8_weight"}],
    "sparsegpt_2_4_lora": [{"use": "prune/sparsegpt", **TWO_FOUR}, {"use": "heal/lora", **HEAL}],
    "layers_10": [{"use": "prune/layers", "sparsity": 0.1}],
    "channels_20": [{"use": "prune/channels", "sparsity": 0.2}],
    "heads_33": [{"use": "prune/heads", "sparsity": 0.33}],
    "layers_10_lora": [{"use": "prune/layers", "sparsity": 0.1}, {"use": "heal/lora", **HEAL}],
}
CALIBRATED = ("prune/wanda", "prune/sparsegpt", "prune/layers", "prune/channels", "prune/heads", "heal/lora")


@dataclass(kw_only=True)
class Row:
    """One model: what was done to it, and what it then is."""

    name: str
    steps: list[dict[str, Any]]
    perplexity: float
    zeros: float | None
    """Share of exact zeros in the layers that were pruned."""
    weight_bytes: int
    seconds: float
    notes: list[str]


def perplexity(module: nn.Module, ids: Tensor) -> float:
    """exp of the mean negative log likelihood, each token of a window but its first."""
    total, count = 0.0, 0
    with torch.no_grad():
        for window in ids.split(WINDOW):
            logits = module(input_ids=window[None], use_cache=False).logits[0, :-1].double()
            total += float(nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
            count += window.numel() - 1
    return math.exp(total / count)


def applied(module: nn.Module, baseline: nn.Module, steps: list[dict[str, Any]], samples: Samples, count: int) -> list[Receipt]:
    backend = CpuBackend()
    device = config.hardware("cpu")
    ids = torch.arange(8)[None]
    receipts = []
    for index, fields in enumerate(steps):
        own = dict(fields)
        if own["use"] in CALIBRATED and "samples" not in own:
            own["samples"] = count
        ctx = Context(
            step=f"step{index}",
            target=device,
            device=device,
            backend=backend,
            workload="prefill",
            example=((), {"input_ids": ids, "use_cache": False}),
            samples=samples,
            reference=baseline,
            tell=lambda title, fraction: print(f"\r{title}: {fraction:.0%}  ", end="", flush=True),
        )
        with torch.no_grad():
            receipts.append(config.step(ctx.step, own).transform.apply(module, ctx))
    return receipts


def run(loaded: Loaded, name: str, ids: Tensor, samples: Samples, options: argparse.Namespace) -> Row:
    start = time.perf_counter()
    module = alias(loaded.module)
    receipts = applied(module, loaded.module, ROWS[name], samples, options.samples)
    seconds = time.perf_counter() - start
    pruned = {layer for receipt in receipts for layer in receipt.decisions.get("zeros", {})}
    return Row(
        name=name,
        steps=ROWS[name],
        perplexity=perplexity(module, ids),
        zeros=sparsity.share(module, sorted(pruned)),
        weight_bytes=weight_bytes(module),
        seconds=seconds,
        notes=[note for receipt in receipts for note in receipt.notes],
    )


def table(found: dict[str, Any]) -> str:
    lines = [
        f"# Pruning SmolLM2 ({found['dtype']}, CPU)",
        "",
        f"`{found['command']}`, row by row",
        "",
    ]
    lines += ["| row | steps | perplexity | zeros | weights, MB | seconds |", "|---|---|---|---|---|---|"]
    for row in found["rows"].values():
        steps = ", ".join(" ".join(str(value) for value in step.values()) for step in row["steps"]) or "none"
        zeros = "" if row["zeros"] is None else f"{row['zeros']:.1%}"
        lines.append(
            f"| {row['name']} | {steps} | {row['perplexity']:.2f} | {zeros} | {row['weight_bytes'] / 1e6:.1f} | {row['seconds']:.0f} |"
        )
    notes = [f"- {row['name']}: {note}" for row in found["rows"].values() for note in row["notes"] if "samples of" not in note[:40]]
    return "\n".join([*lines, "", *notes, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--name", default="pruning")
    options = parser.parse_args()
    loaded: Loaded = registry.get("models", "smollm2")(dtype=options.dtype).load()
    data = registry.get("data", "text")(corpus="wikipedia")
    ids = data.tokens(loaded, options.tokens, 0)[: options.tokens]
    samples = Samples(loaded=loaded, data=data, data_name="wikipedia", quality=Quality(tokens=16384))
    path = RESULTS / f"{date.today()}_{options.name}.json"
    settings = {"tokens": options.tokens, "samples": options.samples, "dtype": options.dtype}
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if {key: found.get(key) for key in settings} != settings:
        found = {**settings, "environment": environment.collect(CpuBackend()), "rows": {}}
    found["command"] = f"python benchmarks/pruning.py --tokens {options.tokens} --samples {options.samples} --dtype {options.dtype}"
    for name in options.rows.split(","):
        row = run(loaded, name, ids, samples, options)
        found["rows"][name] = asdict(row)
        print(f"\r{name}: perplexity {row.perplexity:.2f}, zeros {row.zeros}, {row.seconds:.0f} s", flush=True)
        RESULTS.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1))
        path.with_suffix(".md").write_text(table(found))


if __name__ == "__main__":
    main()
