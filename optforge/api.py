"""OptForge from Python: the same engine as the command line, on a module that already lives in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optforge import artifact, config, engine, preflight
from optforge.calibrate.samples import Samples
from optforge.errors import ConfigError, OutOfMemory, OutputError, PlanError, Problem
from optforge.measure.mode import evaluating
from optforge.models.base import as_example
from optforge.models.given import GivenModel
from optforge.plan.make import later, mesh_of
from optforge.progress import Progress
from optforge.spec import Part, Report, Run
from optforge.transforms.base import Context, Receipt


def optimize(
    model: nn.Module,
    recipe: str | Path,
    *,
    hardware: str = "auto",
    example: Any = None,
    tokenizer: Any = None,
    trained: bool = True,
    overrides: Sequence[str] = (),
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> tuple[nn.Module, Report]:
    """Applies a recipe to `model`, measures every step against the model as given, and returns both results.

    Args:
        model: any module, in the dtype it should run in. It is not changed: the result shares the tensors that no step
            replaced.
        recipe: a recipe's name, or the path of a recipe file.
        hardware: a profile's name; `auto` is the best device of this machine.
        example: one example of the arguments: a tensor, a tuple of arguments, or a dict of keywords. Language models of
            transformers need none.
        tokenizer: for quality on text and the two generations, where the model is a language model.
        trained: False for random weights, on which no quality is claimed.
        overrides: as on the command line: `steps.weights.group_size=64`, `workload=decode`, `quality.tokens=8192`.
        folder: where report.json, report.md, report.html and a saved artifact go; nothing is written without it, and
            `save=true` needs it.

    Returns:
        The optimized module, on the device that ran it, compiled where the recipe compiles, and the report.

    Raises:
        UserError: something must be changed first; each problem says what to type.
    """
    source = GivenModel(module=model, example=as_example(example), tokenizer=tokenizer, trained=trained)
    run = _run(source, recipe, hardware, overrides)
    if (run.save or run.export) and folder is None:
        what = "save=true and export need a folder to write to"
        raise OutputError(Problem(where="folder", what=what, fix="pass folder='...', or leave them out"))
    target = preflight.claim(Path(folder), "folder") if folder is not None else None
    outcome = engine.run(engine.plan(run), folder=target, progress=progress)
    if outcome.module is None:
        raise OutOfMemory(outcome.report.reason)
    return outcome.module, outcome.report


def compose(model: nn.Module, recipe: str | Path, *, hardware: str = "auto", example: Any = None, overrides: Sequence[str] = ()) -> Run:
    """What `apply` with the same arguments would plan: the composed, checked configuration. Nothing is planned, and `model` is left alone.

    Raises:
        UserError: the recipe or an override is wrong.
    """
    return _run(GivenModel(module=model, example=as_example(example)), recipe, hardware, overrides)


def apply(
    model: nn.Module,
    recipe: str | Path,
    *,
    hardware: str = "auto",
    example: Any = None,
    overrides: Sequence[str] = (),
) -> dict[str, Receipt]:
    """Rewrites `model` in place as the recipe says, without measuring anything. For production.

    Arguments are those of `optimize`. The model should already be on the device that will run it. It is rewritten in eval
    mode and left in the mode that it was in. Nothing is timed, so `keep: if_faster` keeps its step.

    Returns:
        Each step's receipt by the step's name.

    Raises:
        UserError: something must be changed first; the model is untouched then.
    """
    source = GivenModel(module=model, example=as_example(example))
    run = _run(source, recipe, hardware, overrides)
    plan = engine.plan(run)
    if mesh_of(plan).devices > 1:
        what = "apply rewrites a model in one process, and this recipe has a shard step"
        raise PlanError(Problem(where="recipe", what=what, fix="call optforge.optimize under torchrun, or drop the step"))
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    workload = run.workload.source
    receipts: dict[str, Receipt] = {}
    known = set(model.modules())
    with evaluating(model):
        for planned in plan.steps:
            ctx = Context(
                step=planned.name,
                target=plan.target,
                device=plan.device,
                backend=plan.backend,
                workload=run.workload.kind,
                uses_cache=workload.uses_cache,
                seed=run.seed,
                example=workload.example(source.live(), device),
                samples=Samples.of(run, source.live()),
                later=later([one.step for one in plan.steps], planned.name),
                limits=run.recipe.limits,
            )
            receipts[planned.name] = planned.step.transform.apply(model, ctx)
    for module in model.modules():
        if module not in known:
            module.training = model.training
    return receipts


def load(run_dir: str | Path, *, model: nn.Module | None = None, compile: bool = False, trust: bool = False) -> nn.Module:
    """The optimized model that a run with `save=true` left in its folder, bit for bit.

    Args:
        run_dir: a run's folder, or its `artifact/` folder.
        model: a fresh, unoptimized module of the same structure, which is rewritten in place and filled. For artifacts of
            `optimize(model, ...)`, whose module no file describes; meta tensors will do.
        compile: apply the recipe's compile step too; the uncompiled module is the bit-exact one.
        trust: allow the run's own callables (`model.factory`) to be imported.

    Raises:
        ModelError: the artifact is missing, truncated or was changed.
        TrustError: it names a callable and `trust` is False.
    """
    if model is not None:
        return artifact.load_into(model, Path(run_dir), compile=compile)
    return artifact.load(Path(run_dir), compile=compile, trust=trust)


def _run(source: GivenModel, recipe: str | Path, hardware: str, overrides: Sequence[str]) -> Run:
    """The configuration composed as on the command line, with the live module in the model's place."""
    defaults: Mapping[str, str] = (
        {"workload": "prefill", "data": "wikipedia" if source.tokenizer is not None else "random_tokens"}
        if source.family == "causal_lm"
        else {"workload": "forward", "data": "inputs"}
    )
    chosen = {entry.split("=", 1)[0] for entry in overrides}
    for key in sorted(
        {entry.split(".", 1)[0] for entry in chosen if entry.startswith("model.")} | chosen & {"model", "recipe", "hardware"}
    ):
        what = f"{key} is an argument of this call, and cannot be overridden"
        raise ConfigError(Problem(where="overrides", what=what, fix=f"pass {key}=... itself"))
    argv = [
        f"recipe={recipe}",
        f"hardware={hardware}",
        *(f"{key}={value}" for key, value in defaults.items() if key not in chosen),
        *overrides,
    ]
    run = config.compose(config.parse(argv, cwd=Path.cwd()), cwd=Path.cwd())
    kind = type(source.module)
    part = Part(name=kind.__name__, kind="given", options={}, source=source)
    resolved = {**run.resolved, "model": {"name": artifact.GIVEN, "class": f"{kind.__module__}.{kind.__qualname__}"}}
    return replace(run, model=part, resolved=resolved, command="optforge.optimize")
