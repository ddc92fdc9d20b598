"""The examples run and learn."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    for name in ("gpt_text", "cnn_fashion_mnist"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_the_gpt_learns_text_as_it_does_without_the_recipe() -> None:
    import gpt_text

    sizes = {"width": 64, "layers": 2, "length": 64, "characters": 60_000}
    found, plain = (gpt_text.train(recipe, 60, **sizes).losses for recipe in ("llama_bf16_train", "baseline"))
    assert sum(found[-10:]) < 0.75 * sum(found[:10])
    assert sum(found[-10:]) == pytest.approx(sum(plain[-10:]), rel=0.02)


@pytest.mark.slow
def test_the_cnn_learns_fashion_mnist() -> None:
    import cnn_fashion_mnist

    losses, right = cnn_fashion_mnist.train(120)
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10]) and right > 0.6
