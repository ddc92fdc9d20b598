"""The compile step: what is compiled, under which names, and graph breaks told by the model's own line."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from torch import Tensor, nn
from toys import CPU, context, tiny_cnn, tiny_lm, token_ids

from optforge.backends.base import CompileOptions
from optforge.backends.cpu import CpuBackend
from optforge.errors import PlanError
from optforge.share import on_meta
from optforge.spec import Hardware
from optforge.transforms.base import Context
from optforge.transforms.compile import Compile, Mode, OnMissing, Scope, graph_break


class EagerBackend(CpuBackend):
    """The CPU backend with the tracer alone: whatever is asked for, no code is generated."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[CompileOptions] = []

    def compile(self, module: nn.Module, options: CompileOptions) -> None:
        self.asked.append(options)
        module.compile(backend="eager", fullgraph=options.fullgraph, dynamic=options.dynamic)


class ReadsValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 0:
            return x + 1
        return x


def compiled(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if module._compiled_call_impl is not None]


@pytest.mark.parametrize(
    ("scope", "uses_cache", "expected"),
    [
        (Scope.auto, False, ["layers.0", "layers.1"]),
        (Scope.auto, True, [""]),
        (Scope.block, True, ["layers.0", "layers.1"]),
        (Scope.model, False, [""]),
    ],
)
def test_scope(scope: Scope, uses_cache: bool, expected: list[str], fresh_compiler: None) -> None:
    model, backend = tiny_lm(), EagerBackend()
    receipt = Compile(scope=scope, mode=Mode.max_autotune).apply(model, context(backend=backend, uses_cache=uses_cache))
    assert compiled(model) == expected == [touched.name for touched in receipt.touched]
    assert {options.mode for options in backend.asked} == {"max-autotune"}
    for module in model.modules():
        backend.lift(module)
    assert compiled(model) == []


def test_without_repeated_layers_the_model_is_compiled_as_one() -> None:
    receipt = Compile().apply(tiny_cnn(), context())
    assert [touched.name for touched in receipt.touched] == [""] and receipt.notes == ["the whole model at once"]
    with pytest.raises(PlanError, match="has none"):
        Compile(scope=Scope.block).apply(tiny_cnn(), context())


def test_planning_compiles_nothing() -> None:
    model = on_meta(tiny_lm())
    receipt = Compile(fullgraph=True).apply(model, context(example=((token_ids(device="meta"),), {})))
    assert compiled(model) == [] and len(receipt.touched) == 2


@pytest.mark.case("B69")
def test_b69_keys_and_names_stay(fresh_compiler: None) -> None:
    model = tiny_lm()
    names, keys = [name for name, _ in model.named_modules()], list(model.state_dict())
    expected = model(token_ids())
    Compile().apply(model, context(backend=EagerBackend()))
    assert torch.equal(model(token_ids()), expected)
    assert [name for name, _ in model.named_modules()] == names and list(model.state_dict()) == keys


def test_equal_blocks_are_compiled_once(fresh_compiler: None) -> None:
    model = tiny_lm(layers=6)
    Compile(fullgraph=True).apply(model, context(backend=EagerBackend()))
    counter = torch._dynamo.utils.counters["stats"]
    counter.clear()
    with torch.no_grad():
        model(token_ids())
    assert counter["unique_graphs"] == 1


@pytest.mark.case("B91")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_b91_a_break_under_fullgraph_is_told_by_file_and_line_while_planning(device: str, fresh_compiler: None) -> None:
    model, x = ReadsValue(), torch.ones(3, device=device)
    lines, first = inspect.getsourcelines(ReadsValue)
    line = first + next(i for i, text in enumerate(lines) if ".item()" in text)
    with pytest.raises(PlanError) as caught:
        Compile(fullgraph=True).apply(model, context(example=((x,), {})))
    (problem,) = caught.value.problems
    assert problem.where == f"{__file__}:{line}"
    assert "if x.sum().item() > 0" in problem.what and "fullgraph=false" in problem.fix
    assert compiled(model) == []
    Compile().apply(model, context(example=((x,), {})))


def test_an_error_of_the_model_itself_is_not_taken_for_a_break() -> None:
    assert graph_break(ValueError("wrong shape")) is None


def test_a_mode_that_the_target_cannot_have_is_refused_and_a_stand_in_says_so() -> None:
    step = Compile(mode=Mode.reduce_overhead)
    (problem,) = step.check(context("fast"))
    assert problem.fix == "steps.fast.mode=default"
    gpu = Hardware(name="h100", backend="nvidia", arch="sm_90")
    on_stand_in = Context(step="fast", target=gpu, device=CPU)
    assert list(step.check(on_stand_in)) == []
    assert "cpu has no CUDA graphs" in step.apply(tiny_lm(), on_stand_in).notes[1]


def test_skipping_without_a_compiler_is_asked_for() -> None:
    assert not Compile().skips_when_missing and Compile(on_missing=OnMissing.skip).skips_when_missing


@pytest.mark.slow
@pytest.mark.case("B90")
@pytest.mark.parametrize(("dynamic", "most"), [(None, 3), (True, 1)])
def test_b90_sizes_that_change_take_few_compiles(dynamic: bool | None, most: int, fresh_compiler: None) -> None:
    model = tiny_lm()
    expected = [model(token_ids(batch=size)) for size in range(2, 14)]
    Compile(dynamic=dynamic).apply(model, context(backend=CpuBackend()))
    counter = torch._dynamo.utils.counters["stats"]
    counter.clear()
    for size, logits in zip(range(2, 14), expected, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(model(token_ids(batch=size)), logits, atol=1e-4, rtol=1e-4)
    assert 1 <= counter["unique_graphs"] <= most


def test_auto_compiles_the_whole_where_layers_of_one_class_come_in_many_shapes() -> None:
    class Stage(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.linear = nn.Linear(inputs, outputs)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).relu()

    class Stages(nn.Module):
        def __init__(self, *widths: int) -> None:
            super().__init__()
            self.stages = nn.ModuleList(Stage(a, b) for a, b in itertools.pairwise(widths))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for stage in self.stages:
                x = stage(x)
            return x

    def compiled(model: nn.Module) -> list[str]:
        return [touched.name for touched in Compile().apply(model, context("compile")).touched]

    assert compiled(Stages(8, 8, 8)) == ["stages.0", "stages.1"]
    assert compiled(Stages(8, 16, 32)) == ["stages.0", "stages.1"]
    assert compiled(Stages(8, 16, 24, 32, 40, 48)) == [""]
