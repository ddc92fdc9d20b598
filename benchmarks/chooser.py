"""The measured chooser against every uniform scheme and bf16, all in one process and the same alternating rounds.

    python benchmarks/chooser.py                                                        # SmolLM2, decode, this CPU
    python benchmarks/chooser.py model=smollm2_135m workload=prefill --seconds 120
    python benchmarks/chooser.py model=llama3_8b workload.batch_size=64 hardware=h200 --speed-only --mode reduce-overhead

Words are overrides as of `optforge run`. Perplexity is taken of each row uncompiled, on text that no choice was made on. A uniform
row rounds every layer that its scheme fits, with and without a tied head; rows named bf16 round nothing. Writes
benchmarks/results/<device>/<date>_chooser_<model>_<workload>.json (raw samples, the chooser's table) and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from torch import nn

from optforge import config, engine, environment
from optforge.backends.base import Candidate
from optforge.calibrate.samples import Samples
from optforge.measure import timing
from optforge.measure.language import LanguageQuality
from optforge.measure.size import weight_bytes
from optforge.models.base import Loaded
from optforge.rows import Rows
from optforge.spec import Measure, QualityResult, Run
from optforge.transforms.choose import Choose

RESULTS = Path(__file__).parent / "results"
AUTO, PLAIN, FUSED = "auto", "bf16, compiled", "bf16, fused, compiled"
DEFAULTS = ("model=smollm2_135m", "data=wikipedia", "workload=decode", "hardware=auto")


@dataclass(kw_only=True)
class Row:
    """One way to run the model."""

    name: str
    module: nn.Module
    seconds: float
    """To choose and to round."""
    quality: QualityResult | None = None
    receipt: dict[str, Any] | None = None


def composed(words: list[str], *extra: str) -> Run:
    return config.compose(config.parse(["recipe=llama_auto", *words, *extra], cwd=Path.cwd()), cwd=Path.cwd())


def recipes(words: list[str], options: argparse.Namespace) -> dict[str, Run]:
    """Row -> its run, the reference last."""
    compile_ = [f"steps.compile.mode={options.mode}"] if options.mode else []
    limits = [f"recipe.limits.max_perplexity_increase={options.limit}"]
    auto = composed(words, *compile_, *limits)
    target = engine.plan(auto).target
    found = {AUTO: auto}
    for scheme in Choose().steps(target):
        if engine_lowers(scheme, target):
            continue
        group = ["steps.uniform.on_misfit=skip"] if scheme == "int4_weight" else []
        for name, tied in ((scheme, "skip"), (f"{scheme}, tied head too", "untie")):
            changed = ["~steps.weights", f"steps.uniform={{use: quantize/{scheme}, tied: {tied}, before: compile}}"]
            found[name] = composed(words, *compile_, *changed, *group)
    found[FUSED] = composed(words, *compile_, "~steps.weights")
    found[PLAIN] = composed(words, *compile_, "~steps.weights", "~steps.fuse")
    return found


def engine_lowers(scheme: str, target: Any) -> bool:
    """Whether the target runs something else in place of the scheme."""
    return Choose().steps(target)[scheme].lower(target) is not None


def build(runs: dict[str, Run], options: argparse.Namespace) -> tuple[list[Row], Any, Any, Loaded]:
    """Each row rounded, judged and compiled over one baseline."""
    plans = {name: engine.plan(run) for name, run in runs.items()}
    plan = plans[AUTO]
    run, backend = plan.run, plan.backend
    loaded = run.model.source.load(run.seed, None)
    baseline = backend.place(loaded.module.eval())
    device = backend.torch_device()
    work = run.workload.source.prepare(loaded, run.data.source, device, run.seed)
    example = run.workload.source.example(loaded, device)
    judge = None
    if not options.speed_only:
        ids = run.data.source.tokens(loaded, options.quality_tokens, run.seed)
        judge = LanguageQuality(baseline=baseline, ids=ids, window=512, device=device)
        say("quality of the model as loaded")
        judge.prepare()
    found = []
    for name, own in plans.items():
        say(f"build: {name}")
        rows = Rows(own, baseline, work, example, Measure(), on_device=True, samples=Samples.of(own.run, loaded), tell=told)
        begun = time.perf_counter()
        module, applied = rows.fresh(own.rewrites)
        row = Row(name=name, module=module, seconds=time.perf_counter() - begun)
        row.receipt = next((asdict(one.receipt) for one in applied if one.planned.step.kind == "quantize"), None)
        if judge is not None:
            row.quality, _ = judge.evaluate(module)
        rows.compile(module)
        found.append(row)
    return found, work, backend, loaded


def told(title: str, fraction: float) -> None:
    say(f"  {title}: {fraction:.0%}")


def measured(found: list[Row], work: Any, backend: Any, seconds: float) -> tuple[list[list[float]], bool]:
    """Samples of every row from the same rounds, and whether they are steady."""
    for row in found:
        say(f"compile: {row.name}")
        work.run(row.module)
        work.run(row.module)
    say(f"time: {len(found)} rows in alternating rounds, at most {seconds:g} s")
    candidates = [Candidate(name=row.name, call=lambda module=row.module: work.run(module)) for row in found]
    options = Measure(warmup=2, min_rounds=12, max_s=seconds, steady=0.005)
    return timing.time_together(candidates, synchronize=backend.synchronize, options=options)


def describe(row: Row, samples: list[float], names: list[str], every: list[list[float]], units: int) -> dict[str, Any]:
    against = {name: asdict(timing.ratio(samples, theirs)) for name, theirs in zip(names, every, strict=True) if name != row.name}
    latency = timing.summary(samples)
    return {
        "name": row.name,
        "latency_ms": latency,
        "units_per_s": 1e3 * units / float(latency["p50"] or 1),
        "speed": against,
        "quality": None if row.quality is None else asdict(row.quality),
        "weight_bytes": weight_bytes(row.module),
        "seconds_to_build": row.seconds,
        "receipt": row.receipt,
        "samples_s": samples,
    }


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    facts, limit = result["environment"], result["limit"]
    lines = [
        f"# The measured chooser, {result['model']}, {result['workload']}, {result['date']}",
        "",
        f"{facts['device'].get('cpu') or facts['device'].get('device')}, {facts['device'].get('threads', '')} threads".rstrip(", threads"),
        "",
        f"    {result['command']}",
        "",
        f"| row | units/s | ms p50 (n) | times {PLAIN} (95%) | auto is times as fast (95%) | perplexity | KL | weights MB | s to build |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    auto = result["rows"][0]
    for row in result["rows"]:
        quality = row["quality"] or {}
        change, kl = quality.get("perplexity_increase"), quality.get("kl")
        lines.append(
            f"| {row['name']} | {row['units_per_s']:,.1f} | {row['latency_ms']['p50']:.1f} ({row['latency_ms']['n']}) "
            f"| {ratio(row['speed'].get(PLAIN))} | {ratio(auto['speed'].get(row['name']))} "
            f"| {'n/a' if change is None else f'{change:+.2%}'} | {'n/a' if kl is None else f'{kl:.4f}'} "
            f"| {row['weight_bytes'] / 1e6:.0f} | {row['seconds_to_build']:.0f} |"
        )
    notes = (auto["receipt"] or {}).get("notes", [])
    text = f"max_perplexity_increase {limit:g}; perplexity on {result['quality_tokens']:,} tokens against the model as loaded."
    load = (
        f"Load average {result['load_average']:.1f} before timing{'' if result['steady'] else '; stopped at the time limit, not steady'}."
    )
    versions = ", ".join(f"{key} {value}" for key, value in facts["versions"].items() if key in ("torch", "transformers", "optforge"))
    return "\n".join([*lines, "", text, load, versions, "", *(f"- {note}" for note in notes), ""])


def ratio(found: dict[str, float] | None) -> str:
    return "" if found is None else f"{found['value']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("words", nargs="*", help="overrides")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of the timed part")
    parser.add_argument("--quality-tokens", type=int, default=8192)
    parser.add_argument("--limit", type=float, default=0.005, help="max_perplexity_increase")
    parser.add_argument("--mode", default="", help="of the compile step")
    parser.add_argument("--speed-only", action="store_true", help="random weights: no quality")
    parser.add_argument("--no-record", action="store_true", help="write no files")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    given = {word.partition("=")[0] for word in options.words}
    words = [*(word for word in DEFAULTS if word.partition("=")[0] not in given), *options.words]
    words.append(f"quality.tokens={options.quality_tokens}")
    runs = recipes(words, options)
    backend = engine.plan(runs[AUTO]).backend
    with backend.session(0):
        found, work, backend, loaded = build(runs, options)
        load = os.getloadavg()[0]
        samples, steady = measured(found, work, backend, options.seconds)
        facts = environment.collect(backend)
    names = [row.name for row in found]
    result = {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "benchmarks/chooser.py", *sys.argv[1:]]),
        "model": loaded.name,
        "workload": runs[AUTO].workload.name,
        "limit": options.limit,
        "quality_tokens": options.quality_tokens,
        "steady": steady,
        "load_average": load,
        "rows": [describe(row, own, names, samples, work.units) for row, own in zip(found, samples, strict=True)],
        "environment": facts,
    }
    text = table(result)
    if not options.no_record:
        folder = RESULTS / ("cpu" if backend.name == "cpu" else "h200")
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{result['date']}_chooser_{runs[AUTO].model.name}_{result['workload']}"
        (folder / f"{stem}.json").write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
        (folder / f"{stem}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
