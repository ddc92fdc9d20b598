"""Recipes inside Lightning: a callback for Trainer, a helper for Fabric, and the optimizer that some steps need.

A recipe is applied before the strategy touches the model: after Lightning has built it, before it is sharded, moved or given
optimizers. What Trainer decides itself (precision, strategy, the optimizer of `configure_optimizers`, compiling) is Trainer's:
a step that it would override is refused by name, since one of the two would be without effect and nobody would know which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback
from torch import nn

from optforge import api
from optforge.errors import PlanError, Problem
from optforge.spec import Run
from optforge.training import optimizers
from optforge.training.settings import Settings, settings_of
from optforge.training.trainer import trained
from optforge.transforms.base import Receipt

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.pytorch import LightningModule, Trainer

SEQUENCE = 512
"""Tokens that a plan here is made for: batches come from the user's loop, and no step depends on their length."""


class OptForgeCallback(Callback):
    """Applies a recipe's steps to a LightningModule when a fit begins.

    Args:
        recipe: a recipe's name or file, for training.
        hardware: a profile's name; `auto` is the best device of this machine.
        module: dotted name of the part that is rewritten, such as `model`; None takes the only child that has weights, or the
            whole LightningModule where there are several.
        example: one example of the part's arguments; language models of transformers need none. None takes the
            module's `example_input_array`, where it has one.
        overrides: as on the command line, `steps.precision.use=precision/bf16`.

    `receipts` holds what each step did, by the step's name, once the fit has begun.
    """

    def __init__(
        self,
        recipe: str | Path,
        *,
        hardware: str = "auto",
        module: str | None = None,
        example: Any = None,
        overrides: Sequence[str] = (),
    ) -> None:
        self.recipe, self.hardware, self.module, self.example, self.overrides = recipe, hardware, module, example, tuple(overrides)
        self.receipts: dict[str, Receipt] = {}
        self.part: nn.Module | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Rewrites the module, once.

        Raises:
            PlanError: the plan refuses the recipe, or Trainer would override a step of it; every problem at once.
        """
        if stage != "fit" or self.receipts:
            return
        part = _part(pl_module, self.module)
        example = self.example if self.example is not None or part is not pl_module else pl_module.example_input_array
        run = _composed(part, self.recipe, self.hardware, example, self.overrides)
        problems = [*_overridden(run, _precision(trainer), "Trainer"), *_compiled(run, pl_module)]
        if problems:
            raise PlanError(*problems)
        self.receipts = api.apply(part, self.recipe, hardware=self.hardware, example=example, overrides=_training(part, self.overrides))
        self.part = part

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Holds the optimizers of `configure_optimizers` against what the steps need.

        Raises:
            PlanError: a step needs an optimizer of OptForge's, and the module brings another.
        """
        if self.part is not None and (problem := _foreign(self.part, trainer.optimizers)) is not None:
            raise PlanError(problem)


def prepare(
    fabric: Fabric, model: nn.Module, recipe: str | Path, *, hardware: str = "auto", example: Any = None, overrides: Sequence[str] = ()
) -> dict[str, Receipt]:
    """Applies a recipe to `model` in place, for a training loop with Fabric; call it before `fabric.setup(model, optimizer)` and
    before the optimizer is made.

    Returns:
        Each step's receipt by the step's name.

    Raises:
        PlanError: the plan refuses the recipe, or Fabric would override a step of it.
    """
    run = _composed(model, recipe, hardware, example, overrides)
    problems = list(_overridden(run, str(fabric._precision.precision), "Fabric"))
    if problems:
        raise PlanError(*problems)
    return api.apply(model, recipe, hardware=hardware, example=example, overrides=_training(model, overrides))


class OwnOptimizer(torch.optim.Optimizer):
    """The optimizer that the steps on a model ask for, as one that Lightning and learning-rate schedulers take."""

    def __init__(self, model: nn.Module, *, lr: float = 1e-4, weight_decay: float = 0.01, seed: int = 0) -> None:
        """
        Args:
            model: after the recipe was applied, on the device that trains it.
        """
        parameters = trained(model)
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        rates = optimizers.Rates(learning_rate=lr, weight_decay=weight_decay, seed=seed)
        self.settings = _settings(model)
        self.inner = optimizers.make(parameters, optimizers.ADAMW, self.settings, rates)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update at the learning rate that `param_groups` says now."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        optimizers.set_rate(self.inner, float(self.param_groups[0]["lr"]))
        self.inner.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Groups as PyTorch writes them, and the states of the optimizer inside."""
        return {**super().state_dict(), "inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "inner"})


def optimizer(model: nn.Module, *, lr: float = 1e-4, weight_decay: float = 0.01, seed: int = 0) -> OwnOptimizer:
    """What `configure_optimizers` returns where the recipe decides how weights are updated (masters, stochastic rounding,
    `optimizer/...`). Without such a step it is PyTorch's AdamW."""
    return OwnOptimizer(model, lr=lr, weight_decay=weight_decay, seed=seed)


def _composed(part: nn.Module, recipe: str | Path, hardware: str, example: Any, overrides: Sequence[str]) -> Run:
    return api.compose(part, recipe, hardware=hardware, example=example, overrides=_training(part, overrides))


def _training(part: nn.Module, overrides: Sequence[str]) -> list[str]:
    """Overrides that make the plan one of a training, before the user's own."""
    positions = getattr(getattr(part, "config", None), "max_position_embeddings", None)
    return ["workload=train", f"workload.sequence={min(SEQUENCE, positions or SEQUENCE)}", *overrides]


def _part(module: LightningModule, name: str | None) -> nn.Module:
    """What is rewritten of a LightningModule.

    Raises:
        PlanError: it has no part of that name.
    """
    if name is not None:
        try:
            return module.get_submodule(name)
        except AttributeError as error:
            known = ", ".join(child for child, _ in module.named_children())
            what = f"{type(module).__name__} has no module {name!r}"
            raise PlanError(Problem(where="OptForgeCallback", what=what, fix=f"module= one of {known}")) from error
    weighty = [child for child in module.children() if any(True for _ in child.parameters())]
    own = any(True for _ in module.parameters(recurse=False))
    return weighty[0] if len(weighty) == 1 and not own else module


def _precision(trainer: Trainer) -> str:
    return str(trainer.precision)


def _overridden(run: Run, precision: str, who: str) -> list[Problem]:
    """Steps that Trainer or Fabric would override, or that only OptForge's own loop carries out."""
    problems = []
    for step in run.recipe.steps:
        where, drop = f"step {step.name}", f"drop it: overrides=['~steps.{step.name}']"
        if step.kind == "precision":
            way = str(step.options.get("training"))
            if way == "autocast":
                what, fix = f"autocast is {who}'s: the step would have no effect", f"{who}(precision='bf16-mixed'), and {drop}"
                problems.append(Problem(where=where, what=what, fix=fix))
            elif not precision.startswith("32"):
                what = f"{who}(precision={precision!r}) casts the model too, and would override {step.use}"
                problems.append(Problem(where=where, what=what, fix=f"{who}(precision='32-true'), or {drop}"))
        if step.kind == "shard":
            what, fix = f"{who}'s strategy decides where weights go, and would override {step.use}", f"{who}(strategy=...), and {drop}"
            problems.append(Problem(where=where, what=what, fix=fix))
    return problems


def _compiled(run: Run, module: LightningModule) -> list[Problem]:
    """A module that Trainer compiles whole, under a recipe that compiles it as well."""
    steps = [step for step in run.recipe.steps if step.kind == "compile"]
    if not steps or getattr(module, "_compiler_ctx", None) is None:
        return []
    what = "the LightningModule was compiled before it was given to Trainer, which would compile over this step"
    return [Problem(where=f"step {steps[0].name}", what=what, fix="give Trainer the plain module, or drop the step")]


def _foreign(part: nn.Module, found: Sequence[Any]) -> Problem | None:
    """An optimizer that knows nothing of what the steps on the model ask for."""
    settings = _settings(part)
    needs = [name for name in ("masters", "stochastic", "optimizer", "offload") if getattr(settings, name)]
    if not needs or all(isinstance(getattr(one, "optimizer", one), OwnOptimizer) for one in found):
        return None
    names = ", ".join(sorted({type(getattr(one, "optimizer", one)).__name__ for one in found}))
    return Problem(
        where="configure_optimizers",
        what=f"returns {names}, which would override the recipe's {', '.join(needs)}",
        fix="return optforge.lightning.optimizer(self, lr=...)",
    )


def _settings(model: nn.Module) -> Settings:
    """The settings that steps left on the model or on the part of it that was rewritten."""
    plain = Settings()
    return next((found for module in model.modules() if (found := settings_of(module)) != plain), plain)
