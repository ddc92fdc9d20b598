"""Weights from files: what is damaged, dangerous or incomplete is refused by name before anything is loaded."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from optforge import checkpoint
from optforge.errors import ModelError, TrustError


class Tied(nn.Module):
    """An embedding and a head that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.emb(ids))


class Touch:
    """Its pickle, once unpickled without restriction, creates a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


class Custom:
    """A class of the user's own, harmless but unknown to the restricted loader."""


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(8.0), "b": torch.ones(4)}, path)
    return path


def test_a_safetensors_file_is_read_as_it_was_written(weights: Path) -> None:
    state = checkpoint.read(weights)
    assert sorted(state) == ["a", "b"]
    assert state["a"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_truncated_safetensors_file_is_named_with_both_sizes(weights: Path) -> None:
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-7])
    with pytest.raises(ModelError) as caught:
        checkpoint.read(weights)
    message = str(caught.value)
    assert str(weights) in message and "truncated" in message
    assert str(len(whole)) in message and str(len(whole) - 7) in message


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 8, b"\x04" + bytes(7) + b"nope"])
def test_what_is_no_safetensors_file_is_refused(weights: Path, content: bytes) -> None:
    weights.write_bytes(content)
    with pytest.raises(ModelError, match=r"not a safetensors file|truncated"):
        checkpoint.read(weights)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"1 of 2 shards are missing: two.safetensors"):
        checkpoint.read(tmp_path)


@pytest.mark.case("B69")
def test_the_prefix_of_compiled_modules_is_stripped(tmp_path: Path) -> None:
    save_file({"_orig_mod.0.weight": torch.ones(2, 2), "1._orig_mod.bias": torch.ones(2)}, tmp_path / "model.safetensors")
    assert sorted(checkpoint.read(tmp_path)) == ["0.weight", "1.bias"]


@pytest.mark.case("B80")
@pytest.mark.parametrize("zip_layout", [True, False])
def test_a_pickle_that_calls_a_function_is_refused_and_never_run(tmp_path: Path, zip_layout: bool) -> None:
    victim, file = tmp_path / "victim", tmp_path / "model.pt"
    torch.save({"a": Touch(victim)}, file, _use_new_zipfile_serialization=zip_layout)
    with pytest.raises(TrustError) as caught:
        checkpoint.read(file)
    assert not victim.exists()
    assert "mkdir" in str(caught.value) and "trust=true" in str(caught.value)


@pytest.mark.case("B80")
def test_a_bare_pickle_is_refused_and_never_run(tmp_path: Path) -> None:
    victim, file = tmp_path / "victim", tmp_path / "model.bin"
    file.write_bytes(pickle.dumps({"a": Touch(victim)}))
    with pytest.raises((TrustError, ModelError)):
        checkpoint.read(file)
    assert not victim.exists()


@pytest.mark.case("B80")
def test_a_custom_class_is_named_and_loads_once_trusted(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    torch.save({"state_dict": {"a": torch.ones(2)}, "note": Custom()}, file)
    with pytest.raises(TrustError, match="Custom"):
        checkpoint.read(file)
    assert checkpoint.read(file, trust=True)["a"].tolist() == [1, 1]


def test_a_truncated_pickle_is_called_damaged(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    torch.save({"a": torch.ones(1000)}, file)
    file.write_bytes(file.read_bytes()[:900])
    with pytest.raises(ModelError, match="truncated or damaged"):
        checkpoint.read(file)


def test_a_file_without_a_state_dict_is_refused(tmp_path: Path) -> None:
    torch.save([1, 2, 3], tmp_path / "model.pt")
    with pytest.raises(ModelError, match="holds no state dict"):
        checkpoint.read(tmp_path / "model.pt")


@pytest.mark.case("B49")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_tensors_with_nan_or_inf_are_named_with_counts(dtype: torch.dtype) -> None:
    weight = torch.ones(4, 4)
    weight[0, 0] = float("nan")
    if dtype is not torch.float8_e4m3fn:  # which has no infinity
        weight[1, 1] = float("inf")
    state = {"fc.weight": weight.to(dtype), "fc.bias": torch.ones(4).to(dtype), "steps": torch.tensor(3)}
    with pytest.raises(ModelError) as caught:
        checkpoint.require_finite(state.items(), "model.pt")
    infinite = 0 if dtype is torch.float8_e4m3fn else 1
    assert f"fc.weight (1 NaN, {infinite} Inf of 16)" in str(caught.value)
    assert "fc.bias" not in str(caught.value) and "allow_nonfinite" in str(caught.value)
    assert len(checkpoint.require_finite(state.items(), "model.pt", allow=True)) == 1


@pytest.mark.case("B49")
def test_large_finite_values_are_not_taken_for_infinite() -> None:
    largest = torch.full((1000,), torch.finfo(torch.float32).max)
    assert checkpoint.require_finite([("a", largest), ("empty", torch.empty(0))], "x") == []


@pytest.mark.case("B20")
@pytest.mark.parametrize("names", [("emb.weight",), ("head.weight",), ("emb.weight", "head.weight")])
def test_a_tie_of_the_definition_survives_filling_from_meta(names: tuple[str, ...]) -> None:
    with torch.device("meta"):
        model = Tied()
    value = torch.randn(5, 3)
    checkpoint.fill_(model, {name: value.clone() for name in names}, "file")
    assert model.head.weight is model.emb.weight
    assert torch.equal(model(torch.tensor([2])), (value @ value[2])[None])


@pytest.mark.case("B20")
def test_tied_names_with_different_values_are_refused() -> None:
    with pytest.raises(ModelError, match=r"emb.weight and head.weight are tied"):
        checkpoint.fill_(Tied(), {"emb.weight": torch.ones(5, 3), "head.weight": torch.zeros(5, 3)}, "file")


def test_missing_foreign_and_misshapen_tensors_are_all_named() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    state = {"0.weight": torch.ones(3, 2), "0.bias": torch.ones(4), "1.bias": torch.ones(1), "other": torch.ones(1)}
    with pytest.raises(ModelError) as caught:
        checkpoint.fill_(model, state, "file")
    message = str(caught.value)
    assert "missing: 1.weight" in message and "not the model's: other" in message and "0.bias is (4,), the model's is (3,)" in message


@pytest.mark.case("B77")
def test_tensors_left_on_meta_are_listed() -> None:
    model = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.BatchNorm1d(2))
    with pytest.raises(ModelError) as caught:
        checkpoint.require_materialised(model, "factory")
    assert "2 tensors are on the meta device" in str(caught.value) and "0.weight, 0.bias" in str(caught.value)


def test_the_digest_is_sha256_over_names_dtypes_shapes_and_bytes() -> None:
    tensor = torch.tensor([1.0, 2.0])
    by_hand = hashlib.sha256(b"w|torch.float32|(2,)|" + tensor.numpy().tobytes()).hexdigest()
    assert checkpoint.digest([("w", tensor)]) == by_hand
    assert checkpoint.digest([("v", tensor)]) != by_hand
    assert checkpoint.digest([("w", tensor.bfloat16())]) != by_hand
    assert checkpoint.digest([("b", tensor), ("a", -tensor)]) == checkpoint.digest([("a", -tensor), ("b", tensor)])
