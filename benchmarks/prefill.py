"""Prefill of SmolLM2 on this machine's CPU: transformers eager, torch.compile, OptForge's bf16 and a recipe, side by side.

All rows are loaded in one process and timed in the same alternating rounds, so that a drift of the machine hits every
row alike. The bf16 row is what OptForge holds a recipe against: the same model with the recipe's compile step and nothing
else. Perplexity is computed here, not by OptForge's own quality code.

    python benchmarks/prefill.py                                  # llama_int8, 256 tokens, 2 CPU cores
    python benchmarks/prefill.py --recipe llama_bf16 --tokens 512 --seconds 30

Writes benchmarks/results/<date>_prefill_cpu_<recipe>.json (raw samples) and .md (the table).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import optforge
from optforge import config, environment, registry
from optforge.backends.base import Candidate
from optforge.backends.cpu import CpuBackend
from optforge.measure import compiles, timing
from optforge.measure.size import weight_bytes
from optforge.models.base import Loaded
from optforge.spec import Measure, Ratio
from optforge.workloads.prefill import Prefill, PrefillWork

RESULTS = Path(__file__).parent / "results"
WINDOW = 512
BASELINE = "optforge, bf16, compiled"


@dataclass(kw_only=True)
class Row:
    """One way to run the model."""

    name: str
    module: nn.Module
    compile_time_s: float | None = None
    perplexity: float | None = None


def load() -> Loaded:
    """SmolLM2 in bf16, each time with tensors of its own."""
    loaded: Loaded = registry.get("models", "smollm2")(dtype="bf16").load()
    return loaded


def rows(recipe: str) -> list[Row]:
    """The rows, the reference last."""
    recipe_row, bf16 = load().module, load().module
    optforge.apply(recipe_row, recipe, hardware="cpu")
    rewrites = [step.name for step in config.recipe(recipe).steps if step.kind != "compile"]
    optforge.apply(bf16, recipe, hardware="cpu", overrides=[f"~steps.{name}" for name in rewrites])
    return [
        Row(name="transformers, bf16, eager", module=load().module),
        Row(name="transformers, bf16, torch.compile", module=torch.compile(load().module)),
        Row(name=f"optforge, {recipe}", module=recipe_row),
        Row(name=BASELINE, module=bf16),
    ]


def perplexity(module: nn.Module, ids: Tensor) -> float:
    """exp of the mean negative log likelihood over windows of 512 tokens without overlap, each token but a window's first."""
    total, count = 0.0, 0
    for window in ids.split(WINDOW):
        logits = module(input_ids=window[None], use_cache=False).logits[0, :-1].double()
        total += float(nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
        count += len(window) - 1
    return math.exp(total / count)


def compile_all(found: list[Row], work: PrefillWork) -> None:
    """Runs each row until it compiles no more."""
    for row in found:
        say(f"compile: {row.name}")
        seen = compiles.first_calls(lambda module=row.module: work.run(module), lambda: None)
        row.compile_time_s = seen.seconds


def measured(found: list[Row], work: PrefillWork, seconds: float) -> tuple[list[list[float]], bool]:
    """Samples of every row from the same rounds, and whether they are steady."""
    say(f"time: {len(found)} rows in alternating rounds, at most {seconds:g} s")
    candidates = [Candidate(name=row.name, call=lambda module=row.module: work.run(module)) for row in found]
    options = Measure(warmup=3, min_rounds=12, max_s=seconds, steady=0.005)
    return timing.time_together(candidates, synchronize=lambda: None, options=options)


def judged(found: list[Row], ids: Tensor) -> None:
    """Perplexity of each row, uncompiled: other shapes would only compile it again. Compiling is no change of weights."""
    with torch.compiler.set_stance("force_eager"):
        for row in found:
            say(f"perplexity: {row.name}")
            row.perplexity = perplexity(row.module, ids)


def describe(row: Row, samples: list[float], found: list[Row], all_samples: list[list[float]], tokens: int) -> dict[str, Any]:
    """One row's figures against the first (transformers eager) and the last (OptForge's compiled bf16)."""
    against: dict[str, Ratio] = {other.name: timing.ratio(samples, theirs) for other, theirs in zip(found, all_samples, strict=True)}
    latency = timing.summary(samples)
    reference = found[-1].perplexity
    assert row.perplexity is not None and reference is not None and latency["p50"], "every row is timed and judged"
    return {
        "name": row.name,
        "latency_ms": latency,
        "tokens_per_s": 1e3 * tokens / latency["p50"],
        "speed": {name: asdict(ratio) for name, ratio in against.items() if name != row.name},
        "verdict": timing.verdict(against[found[-1].name]) if row is not found[-1] else None,
        "perplexity": row.perplexity,
        "perplexity_change": row.perplexity / reference - 1,
        "compile_time_s": row.compile_time_s,
        "weight_bytes": weight_bytes(row.module),
        "samples_s": samples,
    }


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    rows_, facts = result["rows"], result["environment"]
    reference, versions = rows_[-1]["name"], facts["versions"]
    lines = [
        f"# SmolLM2-135M, prefill of {result['tokens']} tokens, {result['date']}",
        "",
        f"{facts['device']['cpu']}, {facts['device']['threads']} threads",
        "",
        f"    {result['command']}",
        "",
        f"| row | tokens/s | ms p50 / p90 (n) | times the speed of {reference} (95%) | perplexity | change | compile s | weights MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows_:
        latency, ratio = row["latency_ms"], row["speed"].get(reference)
        speed = "1" if ratio is None else f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
        compiled = "-" if row["compile_time_s"] is None else f"{row['compile_time_s']:.0f}"
        lines.append(
            f"| {row['name']} | {row['tokens_per_s']:,.0f} | {latency['p50']:.1f} / {latency['p90']:.1f} ({latency['n']}) | {speed} "
            f"| {row['perplexity']:.3f} | {row['perplexity_change']:+.2%} | {compiled} | {row['weight_bytes'] / 1e6:.0f} |"
        )
    return "\n".join(
        [
            *lines,
            "",
            f"All rows in one process, in alternating rounds{'' if result['steady'] else ' (stopped at the time limit, not steady)'}. "
            f"Perplexity: first {result['quality_tokens']:,} tokens of the Wikipedia sample, windows of {WINDOW}, uncompiled; "
            f"change against {reference}. {result['note']}.",
            f"torch {versions['torch']}, transformers {versions['transformers']}, optforge {versions['optforge']}, "
            f"{', '.join(facts['device']['isa'])}, {facts['device']['compiler']}, load average {result['load_average']:.1f} before timing.",
            "",
        ]
    )


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", file=sys.stderr, flush=True)


def write(result: dict[str, Any], folder: Path) -> Path:
    """Writes both files and returns the Markdown one's path."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{result['date']}_prefill_cpu_{Path(result['recipe']).stem}"
    (folder / f"{stem}.json").write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    path = folder / f"{stem}.md"
    path.write_text(table(result))
    return path


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--recipe", default="llama_int8")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of the timed part")
    parser.add_argument("--quality-tokens", type=int, default=8192, help="tokens of text for the perplexity")
    return parser.parse_args()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that one run measures, as plain data."""
    backend, loaded = CpuBackend(), load()
    data = registry.get("data", "text")()
    with backend.session(0):
        found = rows(options.recipe)
        work = Prefill(prompt_tokens=options.tokens).prepare(loaded, data, torch.device("cpu"))
        judged(found, data.tokens(loaded, options.quality_tokens))
        compile_all(found, work)
        load_average = os.getloadavg()[0]
        if load_average > torch.get_num_threads() + 1:
            say(f"load average {load_average:.1f} on {torch.get_num_threads()} threads: the machine is busy, the times are worth little")
        samples, steady = measured(found, work, options.seconds)
        facts = environment.collect(backend)
    return {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "benchmarks/prefill.py", *sys.argv[1:]]),
        "recipe": options.recipe,
        "tokens": options.tokens,
        "quality_tokens": options.quality_tokens,
        "note": "; ".join(loaded.notes),
        "steady": steady,
        "load_average": load_average,
        "rows": [describe(row, own, found, samples, options.tokens) for row, own in zip(found, samples, strict=True)],
        "environment": facts,
    }


def main() -> None:
    result = run(arguments())
    path = write(result, RESULTS)
    print(path.read_text())


if __name__ == "__main__":
    main()
