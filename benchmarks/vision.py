"""How often quantized image classifiers agree with themselves as loaded: the Fashion-MNIST CNN and EfficientNet-Lite0.

The CNN on all 10,000 test images, calibrated on training images. EfficientNet-Lite0 on 1,000 seeded crops and flips of ten photos,
calibrated on those of ten others. Batch norms are folded first, as a recipe would. Agreement and top-1 are computed here, not by
OptForge's own quality code.

    python benchmarks/vision.py                                             # every row
    python benchmarks/vision.py --models fashion_cnn --rows "int8;mxfp4" --images 1000

Writes benchmarks/results/cpu/<date>_vision.json and .md; rows of the same day that are not run again are kept.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optforge import config
from optforge.backends.cpu import CpuBackend
from optforge.calibrate.samples import Samples
from optforge.data.base import DataSource
from optforge.data.fashion_mnist import FashionMNIST
from optforge.data.photos import Photos, Split
from optforge.measure.size import weight_bytes
from optforge.models.base import Loaded
from optforge.models.efficientnet_lite0 import EfficientNetLite0
from optforge.models.fashion_cnn import FashionCNN
from optforge.share import alias
from optforge.transforms.base import Context

RESULTS = Path(__file__).parent / "results" / "cpu"
ALL = ["Conv2d", "Linear"]
CHANNEL = {"use": "quantize/int4_weight", "targets": ALL, "group_size": None, "symmetric": False}
GROUPS = CHANNEL | {"group_size": 32, "on_misfit": "pad"}
ROWS: dict[str, dict[str, Any]] = {
    "int8": {"use": "quantize/int8_weight", "targets": ALL},
    "fp8": {"use": "quantize/fp8_weight", "targets": ALL},
    "int4 per channel, to nearest": CHANNEL,
    "int4 per channel, gptq": CHANNEL | {"algorithm": "gptq"},
    "int4 groups of 32, to nearest": GROUPS,
    "int4 groups of 32, gptq": GROUPS | {"algorithm": "gptq"},
    "mxfp4": {"use": "quantize/mxfp4_weight", "targets": ALL},
    "nvfp4": {"use": "quantize/nvfp4_weight", "targets": ALL},
}
BATCH = 100


@dataclass(kw_only=True)
class Row:
    """One model under one scheme."""

    model: str
    name: str
    agreement: float
    """Share of the images to which it gives the class that the model as loaded gives."""
    top1: float
    baseline_top1: float
    images: int
    bytes: int
    baseline_bytes: int
    seconds: float
    """To quantize it, calibration included."""
    notes: list[str]


@dataclass(frozen=True)
class Model:
    name: str
    source: Any
    data: DataSource
    images: int
    samples: int


MODELS = {
    "fashion_cnn": Model("fashion_cnn", FashionCNN(), FashionMNIST(), 10_000, 512),
    "efficientnet_lite0": Model("efficientnet_lite0", EfficientNetLite0(), Photos(views=100, split=Split.figure), 1_000, 200),
}


def classes(module: nn.Module, batches: Iterator[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor]:
    """The class chosen for each image, and the labels."""
    chosen, labels = [], []
    with torch.no_grad():
        for images, wanted in batches:
            assert wanted is not None
            chosen.append(module(images).argmax(-1))
            labels.append(wanted)
    return torch.cat(chosen), torch.cat(labels)


def quantized(loaded: Loaded, model: Model, fields: dict[str, Any]) -> tuple[nn.Module, list[str]]:
    """The model after folding and one quantize step, and what the receipt says."""
    device, module, notes = config.hardware("cpu"), alias(loaded.module), []
    example = next(iter(model.data.batches(loaded, 1, 1)))[0]
    own = fields if "algorithm" not in fields else fields | {"samples": model.samples}
    for name, step in {"fuse": {"use": "fuse/conv_bn"}, "weights": own}.items():
        samples = Samples(loaded=loaded, data=model.data, data_name=model.name)
        ctx = Context(step=name, target=device, device=device, backend=CpuBackend(), example=((example,), {}), samples=samples)
        with torch.no_grad():
            receipt = config.step(name, step).transform.apply(module, ctx)
        notes += receipt.notes + [f"{layer} is left: {why}" for layer, why in receipt.skipped.items()]
    return module, notes


def rows(model: Model, wanted: list[str], images: int | None) -> Iterator[Row]:
    loaded = model.source.load()
    count = min(images or model.images, model.images)
    expected, labels = classes(loaded.module, model.data.batches(loaded, count, BATCH))
    for name in wanted:
        start = time.perf_counter()
        module, notes = quantized(loaded, model, ROWS[name])
        seconds = time.perf_counter() - start
        found, _ = classes(module, model.data.batches(loaded, count, BATCH))
        yield Row(
            model=model.name,
            name=name,
            agreement=float((found == expected).float().mean()),
            top1=float((found == labels).float().mean()),
            baseline_top1=float((expected == labels).float().mean()),
            images=count,
            bytes=weight_bytes(module),
            baseline_bytes=weight_bytes(loaded.module),
            seconds=seconds,
            notes=notes,
        )


def kept(path: Path, found: list[Row]) -> list[Row]:
    """The rows of the file and those that were found now, models and schemes in the order of the tables above."""
    before = [Row(**row) for row in json.loads(path.read_text())["rows"]] if path.exists() else []
    rows = {(row.model, row.name): row for row in (*before, *found)}
    return [rows[key] for key in ((model, name) for model in MODELS for name in ROWS) if key in rows]


def reused(row: Row) -> bool:
    """Whether an earlier run had calibrated it already."""
    return any("decided by an earlier run" in note for note in row.notes)


def table(found: list[Row], command: str) -> str:
    lines = [
        f"# Image classifiers, quantized ({date.today().isoformat()})",
        "",
        f"Last run: `{command}`, torch {torch.__version__}, CPU. Agreement with the model as loaded, fp32.",
        "",
        "| model | scheme | images | agreement | top-1 (as loaded) | weights (as loaded) | seconds to quantize |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.model} | {row.name} | {row.images:,} | {row.agreement:.2%} | {row.top1:.2%} ({row.baseline_top1:.2%}) "
        f"| {row.bytes / 1e6:.2f} MB ({row.baseline_bytes / 1e6:.2f}) | {row.seconds:.0f}{', decided before' if reused(row) else ''} |"
        for row in found
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rows", default=";".join(ROWS), help="names of rows, with ; between them")
    parser.add_argument("--images", type=int, help="fewer images than all")
    options = parser.parse_args()
    command = shlex.join(["python", "benchmarks/vision.py", *sys.argv[1:]])
    stem = RESULTS / f"{date.today().isoformat()}_vision"
    stem.parent.mkdir(parents=True, exist_ok=True)
    for name in options.models.split(","):
        for row in rows(MODELS[name], options.rows.split(";"), options.images):
            print(f"{row.model}: {row.name}: agreement {row.agreement:.2%}, top-1 {row.top1:.2%}, {row.seconds:.0f} s", flush=True)
            found = kept(stem.with_suffix(".json"), [row])
            stem.with_suffix(".json").write_text(
                json.dumps({"command": command, "rows": [asdict(each) for each in found]}, indent=1) + "\n"
            )
            stem.with_suffix(".md").write_text(table(found, command))


if __name__ == "__main__":
    main()
