"""Recipes inside Lightning: applied before the strategy, refused where Trainer would override them, through the command line too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning
import llamas
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader

import optforge.lightning as optforge_lightning
from optforge import config, engine
from optforge.errors import ModelError, PlanError
from optforge.lightning import OptForgeCallback, OwnOptimizer, prepare
from optforge.models.lightning import LitModel
from optforge.training.settings import settings_of

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
EAGER = ("~steps.compile",)


class Lit(lightning.LightningModule):
    """A tiny language model on numbers that count."""

    def __init__(self, own: bool = True) -> None:
        super().__init__()
        self.model, self.own, self.losses = llamas.module(), own, []  # type: ignore[var-annotated]

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optforge_lightning.optimizer(self, lr=3e-3) if self.own else torch.optim.AdamW(self.parameters(), lr=3e-3)

    def train_dataloader(self) -> DataLoader:
        return DataLoader((torch.arange(64 * 16) * 5).remainder(llamas.VOCABULARY).reshape(64, 16), batch_size=4)


class Bare(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.example_input_array = torch.ones(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def fit(module: lightning.LightningModule, callback: OptForgeCallback, **options: Any) -> None:
    lightning.Trainer(max_steps=8, callbacks=[callback], **{**QUIET, **options}).fit(module)


def test_the_callback_applies_the_recipe_and_the_model_learns() -> None:
    module, callback = Lit(), OptForgeCallback("llama_bf16_train", hardware="cpu", overrides=EAGER)
    fit(module, callback)
    assert list(callback.receipts) == ["precision", "loss", "optimizer"]
    assert module.model.lm_head.weight.dtype == torch.bfloat16
    assert settings_of(module.model).masters and isinstance(module.optimizers().optimizer, OwnOptimizer)
    assert module.losses[-1] < module.losses[0] and len(module.losses) == 8


@pytest.mark.parametrize(
    ("options", "overrides", "told"),
    [
        (
            {"precision": "bf16-mixed"},
            EAGER,
            "Trainer(precision='bf16-mixed') casts the model too, and would override precision/bf16_masters",
        ),
        ({}, (*EAGER, "steps.precision.use=precision/bf16_autocast"), "autocast is Trainer's"),
        ({}, (*EAGER, "steps.shard={use: shard/fsdp}"), "Trainer's strategy decides where weights go"),
    ],
)
def test_what_trainer_would_override_is_refused_by_name(options: dict[str, Any], overrides: tuple[str, ...], told: str) -> None:
    with pytest.raises(PlanError) as refused:
        fit(Lit(), OptForgeCallback("llama_bf16_train", hardware="cpu", overrides=overrides), **options)
    assert told in str(refused.value) and "~steps." in str(refused.value)


def test_an_optimizer_that_knows_nothing_of_masters_is_refused() -> None:
    with pytest.raises(PlanError, match=r"returns AdamW, which would override the recipe's masters, optimizer"):
        fit(Lit(own=False), OptForgeCallback("llama_bf16_train", hardware="cpu", overrides=EAGER))


def test_a_part_that_is_not_there_is_named() -> None:
    with pytest.raises(PlanError, match="module= one of model"):
        fit(Lit(), OptForgeCallback("llama_bf16_train", module="network"))


def test_fabric() -> None:
    fabric, model = Fabric(accelerator="cpu", devices=1), llamas.module()
    receipts = prepare(fabric, model, "llama_bf16_train", hardware="cpu", overrides=EAGER)
    assert list(receipts) == ["precision", "loss", "optimizer"]
    wrapped, moves = fabric.setup(model, optforge_lightning.optimizer(model, lr=3e-3))
    ids = next(iter(Lit().train_dataloader()))
    losses = []
    for _ in range(6):
        loss = wrapped(input_ids=ids, labels=ids, use_cache=False).loss
        fabric.backward(loss)
        moves.step()
        moves.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    with pytest.raises(PlanError, match="would override"):
        prepare(Fabric(accelerator="cpu", precision="bf16-mixed"), llamas.module(), "llama_bf16_train", hardware="cpu", overrides=EAGER)


def test_the_optimizer_goes_on_from_its_state() -> None:
    first, second = llamas.module(), llamas.module()
    for model in (first, second):
        overrides = ["workload=train", "workload.sequence=16", *EAGER]
        optforge_lightning.api.apply(model, "llama_bf16_train", hardware="cpu", overrides=overrides)
    one, other = (optforge_lightning.optimizer(model, lr=1e-3) for model in (first, second))
    ids = next(iter(Lit().train_dataloader()))

    def step(model: nn.Module, moves: OwnOptimizer) -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        moves.step()
        moves.zero_grad()

    step(first, one)
    second.load_state_dict(first.state_dict())
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    step(first, one)
    step(second, other)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_lightning_module_through_the_command_lines_config(tmp_path: Path) -> None:
    argv = [
        "recipe=llama_bf16_train",
        "hardware=cpu",
        "model=lightning",
        f"model.module={__name__}:Lit",
        "workload.steps=3",
        "workload.held_out=1",
        "measure.max_s=0.1",
        "measure.min_rounds=3",
        "measure.warmup=1",
        "~steps.compile",
        "~steps.loss",
        "trust=true",
    ]
    run = config.compose(config.parse(argv, cwd=tmp_path), cwd=tmp_path)
    assert run.workload.kind == "train"
    report = engine.execute(engine.plan(run))
    assert report.status == "complete" and len(report.quality.training.own.losses) == 3
    assert report.model["name"] == "lightning" and report.workload["unit"] == "items"


def test_what_is_no_lightning_module_is_told() -> None:
    with pytest.raises(ModelError, match="not a LightningModule"):
        LitModel(module="llamas:module").load()
    with pytest.raises(ModelError, match="no train_dataloader"):
        LitModel(module=f"{__name__}:Bare").load()
    assert LitModel(module=f"{__name__}:Bare", call="forward").load().example[0][0].shape == (2, 4)
    (problem,) = LitModel(module="Lit").check()
    assert "package.module:Class" in str(problem)
