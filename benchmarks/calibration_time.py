"""How long calibrated quantization of a large model takes on one device, and how much of its memory: the 8B shape by default.

    python benchmarks/calibration_time.py --algorithm gptq --algorithm awq

The model stays in the host's memory, so that only the block at work is on the device, as for a model that does not fit it. Weights
and tokens are random: the work is that of a real model, and no quality is claimed. For comparison, llm-compressor publishes 7.0
minutes for AWQ of an 8B model on one GPU (128 samples of 2,048 tokens).

Writes benchmarks/results/<date>_calibration_<model>.json and .md, after each algorithm.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from optforge import config, environment
from optforge.backends.base import Backend
from optforge.calibrate.samples import Samples
from optforge.cli.hardware import teller
from optforge.measure.size import weight_bytes
from optforge.plan import devices
from optforge.select import repeated_blocks
from optforge.share import alias
from optforge.spec import Run
from optforge.transforms.base import Context

RESULTS = Path(__file__).parent / "results"
PUBLISHED_S = 420.0
"""What llm-compressor publishes for AWQ."""


def measured(run: Run, loaded: Any, backend: Backend, tell: Any) -> dict[str, Any]:
    """Seconds and peak bytes of one quantize step."""
    (step,) = run.recipe.steps
    device = backend.torch_device()
    hardware, _ = devices.choose(run.hardware, config.hardware)
    model = alias(loaded.module)
    ctx = Context(
        step=step.name,
        target=hardware,
        device=hardware,
        backend=backend,
        workload=run.workload.kind,
        samples=Samples.of(run, loaded),
        tell=lambda title, fraction: tell(f"{title}: {fraction:.0%}"),
    )
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    begun = time.perf_counter()
    with torch.no_grad(), tempfile.TemporaryDirectory() as cache:
        os.environ["OPTFORGE_CACHE"] = cache  # nothing is taken over from an earlier run
        receipt = step.transform.apply(model, ctx)
        backend.synchronize()
    return {
        "algorithm": step.options["algorithm"],
        "seconds": time.perf_counter() - begun,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if cuda else None,
        "layers": len(receipt.touched),
        "bytes_before": receipt.bytes_before,
        "bytes_after": receipt.bytes_after,
        "notes": receipt.notes[:6],
    }


def composed(algorithm: str, options: argparse.Namespace) -> Run:
    words = [
        "recipe=llama_int4",
        "~steps.fuse",
        "~steps.compile",
        f"model={options.model}",
        "data=random_tokens",
        f"hardware={options.hardware}",
        f"steps.weights.algorithm={algorithm}",
        f"steps.weights.group_size={options.group_size}",
        f"steps.weights.samples={options.samples}",
        f"steps.weights.sample_tokens={options.tokens}",
        *options.overrides,
    ]
    return config.compose(config.parse(words, cwd=Path.cwd()), cwd=Path.cwd())


def table(document: dict[str, Any]) -> str:
    lines = [
        f"# Calibrated int4 of {document['model']} on {document['device']}, {document['date']}",
        "",
        f"    {document['command']}",
        "",
        f"{document['samples']} samples of {document['tokens']} tokens, random weights. The model ({gigabytes(document['weight_bytes'])}) "
        f"stays in the host's memory; its largest block has {gigabytes(document['block_bytes'])}. Published for AWQ by llm-compressor: "
        f"{PUBLISHED_S:.0f} s.",
        "",
        "| algorithm | seconds | peak of the device | layers |",
        "|---|---|---|---|",
    ]
    for row in document["results"]:
        peak = "n/a" if row["peak_bytes"] is None else gigabytes(row["peak_bytes"])
        lines.append(f"| {row['algorithm']} | {row['seconds']:.0f} | {peak} | {row['layers']} |")
    versions = document["versions"]
    return "\n".join([*lines, "", f"torch {versions['torch']}, optforge {versions['optforge']}.", ""])


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--algorithm", action="append", choices=("gptq", "awq", "hqq", "rtn"))
    parser.add_argument("--model", default="llama3_8b")
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("overrides", nargs="*", help="more overrides of the run")
    options, tell = parser.parse_args(), teller()
    runs = [composed(algorithm, options) for algorithm in options.algorithm or ["gptq", "awq"]]
    hardware, device = devices.choose(runs[0].hardware, config.hardware, require_target=True)
    backend = device.backend
    options.out.mkdir(parents=True, exist_ok=True)
    with backend.session(0):
        loaded = runs[0].model.source.load(0)
        tell("loaded")
        document: dict[str, Any] = {
            "date": date.today().isoformat(),
            "command": shlex.join(["python", "benchmarks/calibration_time.py", *sys.argv[1:]]),
            "model": options.model,
            "device": hardware.description,
            "samples": options.samples,
            "tokens": options.tokens,
            "weight_bytes": weight_bytes(loaded.module),
            "block_bytes": max(map(weight_bytes, repeated_blocks(loaded.module).values())),
            "versions": environment.versions(),
            "results": [],
        }
        stem = options.out / f"{document['date']}_calibration_{options.model}"
        for run in runs:
            document["results"].append(measured(run, loaded, backend, tell))
            tell(str(document["results"][-1]))
            stem.with_suffix(".json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
            stem.with_suffix(".md").write_text(table(document))
    print(table(document))


if __name__ == "__main__":
    main()
