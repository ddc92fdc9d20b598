"""`optforge tune` against the best hand-written recipe: SmolLM2 on this machine's CPU, decode and prefill.

For each workload the search runs with its defaults (15 minutes). Then every hand-written recipe that applies and holds its
limits, the recipe that was found, and the model as loaded are timed in one fresh process, whose figures decided nothing in the
search. Exit code 1 where the recipe found is slower than the best hand-written one: the upper end of its 95% interval lies
below 1.

    python benchmarks/tune.py                                    # both workloads, at most 15 minutes each
    python benchmarks/tune.py --workload prefill --budget-s 600 --seconds 30

Writes benchmarks/results/<date>_tune_<hardware>_<model>.json (raw samples) and .md (the table).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from optforge import environment
from optforge.measure import timing
from optforge.tune import final

RESULTS = Path(__file__).parent / "results"
LIMITS = 3
"""Exit code of a search in which nothing met the limits."""
CONTEST = ("measured", "pruned", "waiting")
"""Hand-written recipes that are timed against the found one: all but those that the plan refuses, that fail, or that miss a limit. One that
the plan ruled out is timed too: if it were the fastest, ruling it out was wrong."""


def search(workload: str, options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], Path, float]:
    """Runs one search; what tune.json says, its folder, and the seconds of the whole command."""
    words = [
        "tune",
        f"model={options.model}",
        f"hardware={options.hardware}",
        f"workload={workload}",
        f"tune.budget_s={options.budget_s:g}",
    ]
    words += [*options.overrides, f"output_dir={folder / workload}"]
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "optforge", *words], check=False)
    seconds = time.perf_counter() - begin
    if done.returncode not in (0, LIMITS):
        raise SystemExit(f"the search ended with exit code {done.returncode}")
    (found,) = (folder / workload / "tunes").iterdir()
    return json.loads((found / "tune.json").read_text()), found, seconds


def contest(found: dict[str, Any], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Times the recipe found, every hand-written one within the limits, and the model as loaded in the same rounds."""
    written = [one["name"] for one in found["candidates"] if one["origin"] == "recipe" and one["state"] in CONTEST]
    names = list(dict.fromkeys([found["best"], *written]))
    place = folder / "contest"
    place.mkdir()
    base = [*found["overrides"], "quality.enabled=false"]
    base = [word for word in base if not word.startswith("measure.max_s=")] + [f"measure.max_s={options.seconds}"]
    files = {name: folder / ("best.yaml" if name == found["best"] else f"recipes/{name}.yaml") for name in names}
    final.write_request(place, cwd=Path.cwd(), runs=[(name, [f"recipe={files[name]}", *base]) for name in names])
    subprocess.run([sys.executable, "-m", "optforge", "tune-final", str(place)], check=True)
    result = final.read_result(place)
    assert result is not None, "the process ended well, so it wrote its result"
    return result


def judged(workload: str, found: dict[str, Any], result: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The rows of one workload, and whether the recipe found is at least as good as the best hand-written one."""
    best, base = found["best"], result["baseline_samples_s"]
    origin = {one["name"]: one for one in found["candidates"]}
    rows = [
        {
            "name": name,
            "origin": origin[name]["origin"] if name in origin else "as_loaded",
            "p50_ms": timing.summary(samples)["p50"],
            "n": len(samples),
            "vs_as_loaded": asdict(timing.ratio(samples, base)),
            "quality": _quality(origin.get(name)),
        }
        for name, samples in result["samples_s"].items()
    ]
    written = [row for row in rows if row["origin"] == "recipe"]
    champion = max(written, key=lambda row: row["vs_as_loaded"]["value"], default=None)
    ratio = None
    if champion is not None and champion["name"] != best:
        ratio = asdict(final.against(result, best, champion["name"]))
    return {
        "workload": workload,
        "found": best,
        "seconds": seconds,
        "measured": sum(bool(one["results"]) for one in found["candidates"]),
        "pruned": sum(one["state"] == "pruned" for one in found["candidates"]),
        "rows": rows,
        "best_hand_written": None if champion is None else champion["name"],
        "found_vs_best_hand_written": ratio,
        "as_good": ratio is None or ratio["high"] >= 1.0,
        "samples": result,
    }


def _quality(candidate: dict[str, Any] | None) -> dict[str, float]:
    results = candidate["results"] if candidate is not None else []
    return dict(results[0]["figures"]["quality"]) if results else {}


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    facts = result["environment"]
    lines = [f"# optforge tune, {result['model']} on {result['hardware']}, {result['date']}", "", f"    {result['command']}", ""]
    for part in result["workloads"]:
        ratio = part["found_vs_best_hand_written"]
        against = (
            "is the best hand-written recipe"
            if ratio is None
            else f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}) times"
        )
        words = against if ratio is None else f"{against} the speed of {part['best_hand_written']}"
        lines += [
            f"## {part['workload']}",
            "",
            f"Search: {part['seconds']:.0f} s, {part['measured']} recipes measured, {part['pruned']} ruled out by the plan. "
            f"Found: `{part['found']}`, {words}.",
            "",
            "| recipe | from | ms p50 (n) | times the model as loaded (95%) | quality |",
            "|---|---|---|---|---|",
        ]
        for row in sorted(part["rows"], key=lambda row: -row["vs_as_loaded"]["value"]):
            speed, quality = row["vs_as_loaded"], row["quality"].get("perplexity_increase")
            lines.append(
                f"| {row['name']} | {row['origin']} | {row['p50_ms']:.1f} ({row['n']}) "
                f"| {speed['value']:.2f} ({speed['low']:.2f} to {speed['high']:.2f}) "
                f"| {'' if quality is None else f'perplexity {quality:+.1%}'} |"
            )
        lines.append("")
    versions = facts["versions"]
    lines += [
        "Rows of one workload are timed in one process, in alternating rounds, after the search and apart from it.",
        f"{facts['cpu']}; torch {versions['torch']}, optforge {versions['optforge']}; load average {result['load_average']:.1f} before.",
        "",
    ]
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--workload", action="append", help="decode or prefill; both where it is left out")
    parser.add_argument("--model", default="smollm2_135m")
    parser.add_argument("--hardware", default="cpu")
    parser.add_argument("--budget-s", type=float, default=900.0, help="seconds of each search")
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds of timing after it, for each pair of rows")
    parser.add_argument("--folder", type=Path, help="where the searches go; a temporary folder without it")
    parser.add_argument("overrides", nargs="*", help="more words for optforge tune")
    return parser.parse_args()


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    load_average = os.getloadavg()[0]
    parts = []
    for workload in options.workload or ["decode", "prefill"]:
        found, place, seconds = search(workload, options, folder)
        parts.append(judged(workload, found, contest(found, place, options), seconds))
    return {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "benchmarks/tune.py", *sys.argv[1:]]),
        "model": options.model,
        "hardware": options.hardware,
        "load_average": load_average,
        "workloads": parts,
        "environment": {"versions": environment.versions(), "cpu": _cpu()},
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown processor")
    return f"{name}, {os.cpu_count()} processors"


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="optforge-tune-") as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        result = run(options, folder)
    RESULTS.mkdir(parents=True, exist_ok=True)
    stem = f"{result['date']}_tune_{options.hardware}_{options.model}"
    (RESULTS / f"{stem}.json").write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    (RESULTS / f"{stem}.md").write_text(table(result))
    print(table(result))
    sys.exit(0 if all(part["as_good"] for part in result["workloads"]) else 1)


if __name__ == "__main__":
    main()
