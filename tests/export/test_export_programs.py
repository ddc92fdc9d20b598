"""Programs for torch.export and ONNX Runtime: the same results at sizes that they were not traced with, without OptForge's operators."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from subjects import logits, optimized, subject
from torch import nn

from optforge.errors import ExportError, ModelError
from optforge.export import FORMATS, check, export
from optforge.export.program import program
from optforge.models.base import Loaded

SCHEMES = {"int8_weight": {}, "int8_dynamic": {}, "int4_weight": {"group_size": 32}, "fp8_weight": {}, "fp8_dynamic": {}}
CLOSE = 1e-3
"""Activations that lie between two steps may fall on either side of a sum in another order."""


def own(module: nn.Module, example: torch.Tensor) -> Loaded:
    return Loaded(module=module.eval(), family="module", name="own", example=((example,), {}))


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.case("B94")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_b94_one_program_serves_every_size(scheme: str) -> None:
    loaded = optimized(scheme, sizes={"num_hidden_layers": 1}, **SCHEMES[scheme])
    made = program(subject(loaded))
    assert made.dynamic == {"batch", "tokens"}
    names = {str(node.target) for node in made.exported.graph.nodes}
    assert not any("optforge" in name for name in names)
    call = made.exported.module()
    for batch in range(1, 10):
        ids = torch.randint(0, 128, (batch, 2 * batch + 1), generator=torch.Generator().manual_seed(batch))
        with torch.no_grad():
            (found,) = call(input_ids=ids)
        assert distance(found, logits(loaded.module, ids)) < CLOSE


class FixedBatch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(2, -1) @ torch.ones(8, 3)


@pytest.mark.case("B94")
def test_b94_a_model_with_a_fixed_batch_is_refused_and_not_fixed_in_silence() -> None:
    with pytest.raises(ModelError, match="refuses the model with a dynamic batch"):
        program(subject(own(FixedBatch(), torch.ones(2, 8))))


class FixedTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids).reshape(ids.shape[0], 8 * 4)


def test_a_fixed_number_of_tokens_is_noted_and_the_batch_stays_dynamic() -> None:
    made = program(subject(own(FixedTokens(), torch.arange(16).reshape(2, 8))))
    assert made.dynamic == {"batch"}
    assert "number of tokens is fixed" in made.notes[0]


def test_a_pt2_reloads_in_a_process_that_cannot_import_optforge(tmp_path: Path) -> None:
    record = export(subject(optimized("int8_dynamic", dtype=torch.bfloat16), torch.bfloat16), "torch_export", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["export.json", "model.pt2"]
    assert record["content"]["inputs"] == {"input_ids": ["batch", "tokens"]}
    assert {size["batch"] for size in record["check"]["sizes"]} == {1, 2, 3, 5}
    assert record["check"]["relative_error"] <= record["check"]["allowed"] < 0.1


@pytest.mark.case("B94")
def test_b94_a_program_that_computes_something_else_fails_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = own(nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8))
    other = own(nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8))
    written = FORMATS["torch_export"].write

    def wrong(self: object, given: object, folder: Path) -> object:
        return written(subject(other), folder)

    monkeypatch.setattr(type(FORMATS["torch_export"]), "write", wrong)
    monkeypatch.setattr(check, "reloaded", lambda folder, made, given: _compared(folder, made, given, loaded))
    with pytest.raises(ExportError, match=r"computes something else in torch_export \(relative error .* at batch 1; .*allowed"):
        export(subject(loaded), "torch_export", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


_reloaded = check.reloaded


def _compared(folder: Path, made: object, given: object, loaded: Loaded) -> object:
    from dataclasses import replace

    return _reloaded(folder, replace(made, module=loaded.module), given)


def test_an_artifact_that_needs_optforge_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is made without decomposing, so that it calls an operator of ours."""

    class Needs(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            import optforge.kernels.attention  # noqa: F401

            q = x.reshape(x.shape[0], 1, 2, 4)
            return torch.ops.optforge.grouped_attention(q, q, q, 0.5)

    loaded = own(Needs(), torch.randn(2, 8))
    with pytest.raises(ModelError, match=r"optforge\.grouped_attention"):
        program(subject(loaded))
    monkeypatch.setattr("optforge.export.program._require_plain", lambda exported: None)
    with pytest.raises(ExportError, match="does not load or run in torch_export"):
        export(subject(loaded), "torch_export", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_onnx_runtime_computes_the_same(tmp_path: Path, scheme: str) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed: pip install 'optforge[export]'")
    record = export(subject(optimized(scheme, dtype=torch.bfloat16, **SCHEMES[scheme]), torch.bfloat16), "onnx", tmp_path / "out")
    assert record["check"]["engine"] == "onnx"
    assert record["content"]["dynamic"] == ["batch", "tokens"]


def test_a_toy_in_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed: pip install 'optforge[export]'")
    loaded = own(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)), torch.randn(2, 8))
    record = export(subject(loaded), "onnx", tmp_path / "out")
    assert record["check"]["relative_error"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8_dynamic", "fp8_weight"])
def test_a_package_compiled_ahead_of_time_computes_the_same(tmp_path: Path, scheme: str) -> None:
    record = export(subject(optimized(scheme, dtype=torch.bfloat16), torch.bfloat16), "aot_inductor", tmp_path / "out")
    assert record["check"]["engine"] == "aot_inductor"


@pytest.mark.case("B92")
def test_b92_without_a_compiler_the_package_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    from optforge.errors import MissingDependency

    with pytest.raises(MissingDependency, match=r"aot_inductor: compile needs a C\+\+ compiler .*export: \[torch_export\]"):
        export(subject(own(nn.Linear(8, 8), torch.randn(2, 8))), "aot_inductor", tmp_path / "out")
