"""Many runs that look real: the committed reports of benchmarks/results with their figures changed in proportion."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from optforge.compare import Comparison

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
CPU = sorted((RESULTS / "cpu").glob("*_smollm2_prefill_*.json"))
"""Reports of five recipes, one of them for an A100, all of one workload on one CPU."""

Tree = dict[str, Any]
Compare = Callable[..., Comparison]
"""Reports, and options of `optforge.compare.compare`."""


def read(path: Path) -> Tree:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def named(recipe: str) -> Tree:
    """The committed report of a recipe on the CPU."""
    return next(tree for tree in map(read, CPU) if tree["recipe"]["name"] == recipe)


def faster(tree: Tree, factor: float) -> Tree:
    """The same run with the optimized model `factor` times as fast, and every sample of it."""
    made = copy.deepcopy(tree)
    for row in [made["optimized"], *([made["steps"][-1]["measured"]] if made["steps"] else [])]:
        for key in ("p50", "p90", "mean", "stdev"):
            row["latency_ms"][key] /= factor
        row["samples_s"] = [value / factor for value in row["samples_s"]]
        row["tokens_per_s"] *= factor
    for ratio in made["speedup"].values():
        if ratio is not None and ratio["unit"] == "latency":
            ratio.update({key: ratio[key] * factor for key in ("value", "low", "high")})
    return made


def settings(tree: Tree, **more: Any) -> Tree:
    """The settings of such a run as OptForge writes them; dotted keys in `more` are nested ones with `__` for the dot."""
    steps = {item["name"]: {"use": item["use"], "keep": "always"} for item in tree["plan"]["order"]}
    found: Tree = {
        "recipe": {"name": tree["recipe"]["name"], "goal": tree["recipe"]["goal"], "steps": steps, "limits": tree["recipe"]["limits"]},
        "model": {"name": tree["model"]["name"], "dtype": tree["model"]["dtype"]},
        "data": {"name": tree["data"]["name"]},
        "workload": {"name": tree["workload"]["name"], "batch_size": tree["workload"].get("batch_size")},
        "measure": {"warmup": 3, "min_rounds": 8, "max_s": 12.0, "steady": 0.01, "batch_ms": 10.0, "budget_s": None},
        "quality": {"enabled": True, "tokens": 4096, "window": 512},
        "seed": 0,
    }
    for dotted, value in more.items():
        *path, last = dotted.split("__")
        node = found
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return found


def write(tree: Tree, folder: Path) -> Path:
    """A run's folder that holds the report."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(tree), encoding="utf-8")
    return folder


def fleet(count: int, seed: int = 0) -> Iterator[Tree]:
    """Runs of a search over recipes and two settings of their quantize step, as a sweep leaves them."""
    random_ = random.Random(seed)
    trees = [read(path) for path in CPU]
    for index in range(count):
        tree = trees[index % len(trees)]
        group, kept = (32, 64, 128, 256)[index // len(trees) % 4], index // (4 * len(trees))
        made = faster(tree, random_.uniform(0.75, 1.35))
        quality = made["quality"]
        if quality is not None:
            change = random_.uniform(0.5, 1.9)
            quality["perplexity_increase"] *= change
            quality["kl"] *= change
        for key in ("peak_memory_bytes", "weight_bytes"):
            made["optimized"][key] = int(made["optimized"][key] * random_.uniform(0.8, 1.1))
        steps = {"recipe__steps__weights__group_size": group} if any(step["name"] == "weights" for step in made["steps"]) else {}
        made["settings"] = settings(made, **steps, seed=kept)
        made["folder"] = f"outputs/{made['recipe']['name']}/{index}"
        yield made
