"""A user's own factory: called under a seed, filled from a checkpoint, checked before any step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_checkpoint import Touch

from optforge.errors import ConfigError, ModelError, TrustError
from optforge.models.module import FactoryModel


def test_the_factory_is_called_with_its_arguments_and_seed() -> None:
    source = FactoryModel(factory="factories:with_example", arguments={"width": 5})
    first, again, other = source.load(seed=1), source.load(seed=1), source.load(seed=2)
    assert first.module[0].weight.shape == (2, 5)
    assert first.digest == again.digest != other.digest
    assert not any(module.training for module in first.module.modules())
    assert first.example is not None and first.example[0][0].shape == (4, 5)


def test_the_skeleton_is_on_meta_in_the_dtype_of_the_run() -> None:
    loaded = FactoryModel(factory="factories:linear", dtype="bf16").skeleton()
    assert {parameter.device.type for parameter in loaded.module.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {torch.bfloat16}


def test_a_callers_random_numbers_do_not_move() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    FactoryModel(factory="factories:linear").load(seed=9)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.case("B77")
def test_a_meta_module_is_refused_unless_a_checkpoint_fills_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        FactoryModel(factory="factories:on_meta").load()
    assert "weight, bias" in str(caught.value) and "model.checkpoint" in str(caught.value)
    file = tmp_path / "linear.safetensors"
    save_file({"weight": torch.full((2, 3), 2.0), "bias": torch.ones(2)}, file)
    module = FactoryModel(factory="factories:on_meta", checkpoint=str(file)).load().module
    assert module(torch.ones(3)).tolist() == [7, 7]


@pytest.mark.case("B49")
def test_nan_weights_stop_the_load_and_are_noted_when_allowed() -> None:
    with pytest.raises(ModelError, match=r"weight \(1 NaN, 0 Inf of 4\)"):
        FactoryModel(factory="factories:with_nan").load()
    loaded = FactoryModel(factory="factories:with_nan", allow_nonfinite=True).load()
    assert any("weight (1 NaN" in note for note in loaded.notes)


@pytest.mark.case("B80")
def test_a_hostile_checkpoint_is_never_run(tmp_path: Path) -> None:
    victim, file = tmp_path / "victim", tmp_path / "weights.pt"
    torch.save({"weight": Touch(victim)}, file)
    with pytest.raises(TrustError, match=r"model\.trust=true"):
        FactoryModel(factory="factories:on_meta", checkpoint=str(file)).load()
    assert not victim.exists()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"factory": "factories:nothing"}, ConfigError, "cannot import"),
        ({"factory": "no_such_package:x"}, ConfigError, "cannot import"),
        ({"factory": "factories:text"}, ModelError, "returned str"),
    ],
)
def test_a_wrong_factory_is_told_in_one_line(options: dict[str, str], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        FactoryModel(**options).load()
    assert "\n" not in str(caught.value)


def test_every_wrong_key_is_told_at_once() -> None:
    source = FactoryModel(factory="x", family="image_classifier", dtype="int8", checkpoint="/nowhere/a.pt")
    assert [problem.where for problem in source.check()] == ["model.dtype", "model.factory", "model.image_shape", "model.checkpoint"]


def test_tensors_that_a_module_makes_on_import_stay_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The skeleton is built on meta; the first import of the factory's module is not."""
    text = "import torch\nX = torch.ones(4, 3)\ndef make():\n    return torch.nn.Linear(3, 2), X\n"
    (tmp_path / "imported_on_meta.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    source = FactoryModel(factory="imported_on_meta:make")
    skeleton, loaded = source.skeleton(), source.load()
    assert skeleton.example is not None and skeleton.example[0][0].is_meta
    assert loaded.example is not None and torch.equal(loaded.example[0][0], torch.ones(4, 3))
