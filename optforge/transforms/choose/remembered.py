"""What was chosen, kept in the user's cache under a key of all that decides it.

The rows of one run and the run after it then take one choice, though times differ from one measurement to the next. The key holds
every bit of the weights and samples, the step's fields and the limits, the device and how it is set up, what a pass of the
workload gives each layer, how the recipe compiles, and the versions: another model, another machine, another option is another choice.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from optforge import __version__, atomic
from optforge.cache import cache_dir
from optforge.calibrate.kept import fingerprint
from optforge.errors import OutputError
from optforge.spec import Json
from optforge.transforms.base import Context

if TYPE_CHECKING:
    from optforge.calibrate.samples import Taken
    from optforge.transforms.choose import Choose
    from optforge.transforms.choose.times import Site

FOLDER = "chosen"
FORMAT = 3
"""Goes up when the same measurements would lead to another choice."""
log = logging.getLogger("optforge")


def place(options: Choose, model: nn.Module, taken: Taken | None, found: Mapping[str, Site], ctx: Context) -> Path:
    """The file for this choice."""
    assert ctx.backend is not None, "nothing is chosen while planning"
    examples = [leaf for leaf in tree_leaves(taken.examples if taken is not None else []) if isinstance(leaf, Tensor)]
    shared = {tensor.data_ptr() for tensor in model.parameters()}
    reference = [] if ctx.reference is None else [one for one in ctx.reference.parameters() if one.data_ptr() not in shared]
    parts = {
        "weights": fingerprint([*model.parameters(), *model.buffers()]),
        "structure": hashlib.sha256(str(model).encode()).hexdigest(),
        "reference": fingerprint(reference),
        "samples": fingerprint(examples),
        "options": {key: getattr(value, "name", value) for key, value in asdict(options).items()},
        "limits": [dict(ctx.limits), None if ctx.samples is None else ctx.samples.quality.tokens],
        "target": asdict(ctx.target),
        "device": [ctx.device.name, ctx.device.arch, dict(ctx.backend.environment())],
        "workload": {name: [site.calls, list(site.input.shape), str(site.input.dtype)] for name, site in found.items()},
        "compile": None if ctx.compile is None else dict(ctx.compile.options),
        "versions": [FORMAT, __version__, torch.__version__],
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return cache_dir() / FOLDER / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def load(path: Path, ctx: Context) -> dict[str, Json] | None:
    """What was kept there, or None; a damaged file counts as none. The log says which."""
    try:
        found = json.loads(path.read_text(encoding="ascii"))
        kept = found if isinstance(found, dict) and {"assigned", "table", "notes", "made"} <= set(found) else None
    except (OSError, ValueError):
        kept = None
    log.info("step %s: choice %s: %s", ctx.step, "found" if kept else "not there yet", path)
    return kept


def save(path: Path, choice: Mapping[str, Json], ctx: Context) -> None:
    """Keeps a choice. A cache that cannot be written is no reason to stop: the log says so."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_json(path, choice)
    except (OSError, OutputError) as error:
        log.warning("step %s: the choice is not kept: %s", ctx.step, error)
