"""Every shipped recipe plans on every hardware profile, on a machine that has none of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from optforge import config, engine

RECIPES = [option.name for option in config.options("recipe")]
HARDWARE = [option.name for option in config.options("hardware")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder of two layers, its config only: a plan reads no weights."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("tiny")
    LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_plans_on_every_profile(recipe: str, hardware: str, checkpoint: Path, tmp_path: Path) -> None:
    model = ["model=fashion_cnn"] if recipe.startswith("vision") else ["model=hf", f"model.path={checkpoint}", "data=random_tokens"]
    arguments = config.parse([f"recipe={recipe}", f"hardware={hardware}", *model], cwd=tmp_path)
    plan = engine.plan(config.compose(arguments, cwd=tmp_path))
    assert [step.name for step in plan.steps] == [step.name for step in plan.run.recipe.steps]
    assert all(step.receipt.touched for step in plan.steps)
    predicted = plan.predicted()
    assert predicted["label"] == "predicted"
    if plan.target.peak_flops:
        assert predicted["optimized"]["latency_ms"] > 0
    for downgrade in plan.downgrades:
        assert plan.target.name in downgrade.reason
        assert bool(downgrade.alternatives) == downgrade.requested.startswith("quantize/")
