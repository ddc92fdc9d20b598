"""Samples are as many and as long as asked for, apart from the evaluation's, and never silently bad."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optforge.calibrate.kept import Kept
from optforge.calibrate.samples import Samples
from optforge.errors import ConfigError, DataError
from optforge.models.base import Loaded
from optforge.spec import CalibrationData, Quality


class Counting:
    """Token i is i; image i is filled with i."""

    real = True

    def __init__(self, length: int = 1000) -> None:
        self.length = length

    def check(self) -> Iterator[Any]:
        return iter(())

    def tokens(self, loaded: Loaded, count: int, seed: int = 0) -> Tensor:
        from optforge.errors import Problem

        if count > self.length:
            raise DataError(Problem(where="data", what=f"counting holds {self.length} tokens, {count} are wanted"))
        return torch.arange(count)

    def batches(self, loaded: Loaded, count: int, batch_size: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor | None]]:
        for start in range(0, min(count, self.length), batch_size):
            yield torch.full((batch_size, 1, 2, 2), float(start)), None

    def prompts(self) -> list[str]:
        return []


def _samples(family: str = "causal_lm", *, length: int = 1000, **options: Any) -> Samples:
    loaded = Loaded(module=nn.Identity(), family=family, name="toy")
    return Samples(
        loaded=loaded,
        data=Counting(length),
        data_name="counting",
        options=CalibrationData(**options),
        quality=Quality(tokens=100, items=5),
    )


def test_text_begins_where_the_evaluation_ends() -> None:
    taken = _samples().take(3, tokens=10, step="weights")
    ids = [kwargs["input_ids"] for _, kwargs in taken.examples]
    assert torch.equal(torch.cat(ids), torch.arange(100, 130).reshape(3, 10))
    assert taken.note == "calibrated on 3 samples of counting, 10 tokens each"


def test_images_begin_where_the_evaluation_ends() -> None:
    taken = _samples("image_classifier").take(2, tokens=10, step="weights")
    assert [float(args[0][0, 0, 0, 0]) for args, _ in taken.examples] == [5.0, 6.0]


@pytest.mark.parametrize("family", ["causal_lm", "image_classifier"])
def test_too_few_samples_are_refused_with_both_numbers(family: str) -> None:
    with pytest.raises(DataError, match=r"samples|tokens") as caught:
        _samples(family, length=20).take(30, tokens=10, step="weights")
    assert caught.value.problems[0].fix


def _factory(monkeypatch: pytest.MonkeyPatch, batches: list[Tensor]) -> str:
    module = types.ModuleType("own_samples")
    module.make = lambda batch_size: iter(batches)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_samples", module)
    return "own_samples:make"


def test_bad_samples_are_counted_and_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """B50"""
    batches = [torch.full((1, 4), float(index)) for index in range(4)]
    batches[1][0, 2], batches[3][0, 0] = float("nan"), float("inf")
    name = _factory(monkeypatch, batches)
    with pytest.raises(DataError, match=r"2 of 4 .*sample 1, 3"):
        _samples("image_classifier", factory=name).take(4, tokens=1, step="weights")
    taken = _samples("image_classifier", factory=name, max_bad_fraction=0.5).take(4, tokens=1, step="weights")
    assert taken.bad == [1, 3] and [float(args[0][0, 0]) for args, _ in taken.examples] == [0.0, 2.0]
    assert "2 more left out" in taken.note


def test_a_factory_of_token_ids_is_cut_to_length(monkeypatch: pytest.MonkeyPatch) -> None:
    name = _factory(monkeypatch, [torch.arange(0, 7)[None], torch.arange(7, 25)[None]])
    taken = _samples(factory=name).take(3, tokens=8, step="weights")
    assert torch.equal(torch.cat([kwargs["input_ids"] for _, kwargs in taken.examples]), torch.arange(24).reshape(3, 8))
    with pytest.raises(DataError, match="3 samples to calibrate on, 4 are wanted"):
        _samples(factory=name).take(4, tokens=8, step="weights")


def test_the_share_that_is_advised_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """B50: of 3 samples 1 is bad, and 0.333 is less than a third."""
    batches = [torch.ones(1, 4), torch.full((1, 4), float("nan")), torch.ones(1, 4)]
    name = _factory(monkeypatch, batches)
    with pytest.raises(DataError) as caught:
        _samples("image_classifier", factory=name).take(3, tokens=1, step="weights")
    (share,) = re.findall(r"max_bad_fraction=([\d.]+)", str(caught.value.problems[0].fix))
    assert len(_samples("image_classifier", factory=name, max_bad_fraction=float(share)).take(3, tokens=1, step="weights").examples) == 2


def test_samples_that_are_all_bad_are_refused_whatever_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """B50"""
    name = _factory(monkeypatch, [torch.full((1, 4), float("inf"))] * 2)
    with pytest.raises(DataError, match="all 2 calibration samples hold NaN or Inf"):
        _samples("image_classifier", factory=name, max_bad_fraction=1.0).take(2, tokens=1, step="weights")


def test_the_number_that_is_advised_leaves_those_that_are_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    name = _factory(monkeypatch, [torch.ones(1, 4)] * 6)
    with pytest.raises(DataError, match=r"steps\.heal\.samples=4"):
        _samples("image_classifier", factory=name).take(136, tokens=1, step="heal", held_out=2)
    with pytest.raises(DataError, match="give more of them"):
        _samples("image_classifier", factory=name).take(136, tokens=1, step="heal", held_out=8)


def _own(monkeypatch: pytest.MonkeyPatch, function: Any) -> str:
    module = types.ModuleType("own_samples")
    module.make = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_samples", module)
    return "own_samples:make"


def _takes_none() -> list[Tensor]:
    return []


def _raises(batch_size: int) -> Iterator[Tensor]:
    yield torch.ones(1, 4)
    raise OSError("no such disk")


@pytest.mark.parametrize(
    ("function", "message", "fix"),
    [
        (lambda batch_size: 7, "own_samples:make raised TypeError: 'int' object is not iterable", "return or yield samples"),
        (_takes_none, "raised TypeError", "one argument, the batch size"),
        (_raises, "own_samples:make raised OSError: no such disk", "correct it"),
    ],
)
def test_what_the_users_function_does_wrong_is_told_in_a_line(
    function: Any, message: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = _own(monkeypatch, function)
    with pytest.raises(ConfigError) as caught:
        _samples("image_classifier", factory=name).take(2, tokens=1, step="weights")
    (problem,) = caught.value.problems
    assert problem.where == "calibration.factory" and message in problem.what and fix in str(problem.fix)


def test_an_empty_function_is_not_told_to_change_other_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """B51, B52"""
    with pytest.raises(DataError, match="has 0 samples") as caught:
        _samples("image_classifier", factory=_factory(monkeypatch, [])).take(2, tokens=1, step="weights")
    assert caught.value.problems[0].fix == "let it yield some"


def test_samples_that_the_model_does_not_take_are_refused_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    name = _factory(monkeypatch, [torch.ones(1, 64), torch.ones(1, 13)])
    shared = nn.Linear(64, 64)
    model = nn.Sequential(shared, nn.ReLU(), shared)  # one layer under two names
    before = shared.weight
    loaded = Loaded(module=model, family="module", name="toy", example=((torch.ones(2, 64),), {}))
    samples = Samples(loaded=loaded, data=Counting(), data_name="counting", options=CalibrationData(factory=name))
    with pytest.raises(DataError, match=r"does not take sample 1 of own_samples:make: .*13"):
        samples.take(2, tokens=1, step="weights")
    assert len(samples.take(1, tokens=1, step="weights").examples) == 1
    assert shared.weight is before


def test_token_ids_beyond_the_vocabulary_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = _samples(factory=_factory(monkeypatch, [torch.tensor([[1, 2, 99, 3]])]))
    samples.loaded.vocab_size = 64
    with pytest.raises(DataError, match="token ids from 1 to 99; the model knows 64"):
        samples.take(1, tokens=4, step="weights")


def test_random_data_is_refused_for_trained_weights() -> None:
    """B52"""
    samples = _samples()
    samples.data.real = False
    with pytest.raises(DataError, match="needs data to calibrate on, and data=counting is random"):
        samples.take(1, tokens=4, step="weights")


def test_what_is_kept_depends_on_the_options(tmp_path: Any) -> None:
    """B87"""
    kept = Kept({"bits": 4}, tmp_path)
    key = kept.key("block")
    kept.put(key, {"weight": torch.arange(6.0).reshape(2, 3).T})
    found = kept.get(key, torch.device("cpu"))
    assert found is not None and torch.equal(found["weight"], torch.arange(6.0).reshape(2, 3).T)
    assert Kept({"bits": 8}, tmp_path).key("block") != key and kept.get(kept.key("other"), torch.device("cpu")) is None
    next(tmp_path.glob("*.safetensors")).write_bytes(b"cut off")
    assert kept.get(key, torch.device("cpu")) is None
