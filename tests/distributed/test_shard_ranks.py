"""Sharded models in 2 and 4 gloo processes against the same model in one: outputs, losses, weights after a step, bytes held."""

from __future__ import annotations

from typing import Any

import pytest
from started import found, start

TOLERANCE = 1e-5
"""Relative, of fp32 arithmetic whose sums are made in another order."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("two")
    start("ranks:two", folder, count=2)
    return found(folder, 0)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("four")
    start("ranks:four", folder, count=4)
    return found(folder, 0)


def equals_one_process(one: dict[str, Any], share: float) -> None:
    assert one["output"] < TOLERANCE
    assert one["loss"] < 1e-5
    assert one["weights"] < 1e-6, "after an update whose largest steps are about 0.2"
    assert one["held"] / one["all"] == pytest.approx(share, abs=0.01)
    assert one["baseline_untouched"] and one["touched"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensor", "fsdp", "llama_tensor"])
def test_two_devices_train_as_one(two: dict[str, Any], name: str) -> None:
    equals_one_process(two[name], 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode", "decode_compiled"])
def test_two_devices_choose_the_tokens_of_one_and_share_the_cache(two: dict[str, Any], name: str) -> None:
    assert two[name] == {"same": True, "held": 0.5}


@pytest.mark.slow
def test_copies_train_as_one(two: dict[str, Any]) -> None:
    equals_one_process(two["data"], 1.0)


@pytest.mark.slow
@pytest.mark.case("B19")
@pytest.mark.parametrize("name", ["fsdp_tied", "tensor_tied", "llama_fsdp"])
def test_b19_tied_weights_run_and_stay_tied(two: dict[str, Any], name: str) -> None:
    equals_one_process(two[name], 0.5)
    assert two[name]["tied"]


@pytest.mark.slow
@pytest.mark.case("B73")
@pytest.mark.parametrize("scheme", ["int8_weight", "int4_weight", "fp8_weight", "int8_dynamic", "fp8_dynamic"])
def test_b73_quantized_weights_are_sharded_as_integers(two: dict[str, Any], scheme: str) -> None:
    fsdp, tensor = two[f"{scheme}_fsdp"], two[f"{scheme}_tensor"]
    assert fsdp["output"] == 0.0, "gathered, they are what they were"
    if scheme.endswith("dynamic"):  # a device finds the scale of a row from its own part of the row
        assert tensor["from_plain"] < 1.1 * tensor["whole_from_plain"]
    else:
        assert tensor["output"] < TOLERANCE
    for one in (fsdp, tensor):
        assert one["held"] == pytest.approx(0.5, abs=0.01)
        assert set(one["integers"]) <= {"torch.int8", "torch.uint8"} and one["integers"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("tensor4", 0.25), ("fsdp_tensor", 0.25), ("data_tensor", 0.5), ("data_fsdp", 0.5)])
def test_four_devices_train_as_one(four: dict[str, Any], name: str, share: float) -> None:
    equals_one_process(four[name], share)


@pytest.mark.slow
@pytest.mark.case("B73")
def test_b73_a_quantized_packed_decoder_over_a_mesh_of_two_by_two(four: dict[str, Any]) -> None:
    assert four["int8_weight"]["output"] < TOLERANCE
    assert four["int8_weight"]["held"] == pytest.approx(0.25, abs=0.01)
