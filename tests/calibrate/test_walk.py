"""A walk gives each layer the inputs that the whole model would give it, block by block, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import llamas
import pytest
import torch
from torch import Tensor, nn

from optforge.calibrate.statistics import Columns, Gram
from optforge.calibrate.walk import Block, walk

CPU = torch.device("cpu")


def _examples(count: int = 3, tokens: int = 7) -> list[Any]:
    ids = torch.randint(0, llamas.VOCABULARY, (count, tokens), generator=torch.Generator().manual_seed(0))
    return [((), {"input_ids": row[None], "use_cache": False}) for row in ids]


def _linears(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def _inputs(model: nn.Module, examples: list[Any]) -> dict[str, list[Tensor]]:
    """Every input of every linear in plain forward passes."""
    found: dict[str, list[Tensor]] = {}
    handles = [
        layer.register_forward_pre_hook(lambda _, args, name=name: found.setdefault(name, []).append(args[0].clone()))
        for name, layer in _linears(model).items()
    ]
    with torch.no_grad():
        for args, kwargs in examples:
            model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return found


def test_each_layer_sees_what_plain_passes_give_it() -> None:
    model, examples = llamas.module(), _examples()
    expected, seen, order = _inputs(model, examples), dict[str, list[Tensor]](), list[str]()

    def visit(block: Block) -> None:
        order.append(block.name)
        block.observe(block.inside(_linears(model)), lambda name, x: seen.setdefault(name, []).append(x.clone()))

    head = {"lm_head": model.lm_head}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert walk(model, examples, visit, device=CPU, outside=head)
    blocks = [f"model.layers.{index}" for index in range(len(model.model.layers))]
    assert order == [*blocks, ""]
    assert seen.keys() == expected.keys()
    for name, inputs in expected.items():
        got = seen[name][-len(inputs) :]  # the blocks compute nothing in the last visit, so none is seen twice
        assert all(torch.equal(a, b) for a, b in zip(got, inputs, strict=True)), name
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_later_block_sees_what_a_changed_one_gives() -> None:
    model, examples = llamas.module(), _examples()

    def halve(block: Block) -> None:
        for name, layer in block.inside(_linears(model)).items():
            if name.endswith("down_proj"):
                layer.weight = nn.Parameter(layer.weight * 0.5)

    last = f"model.layers.{len(model.model.layers) - 1}.self_attn.q_proj"
    seen: list[Tensor] = []

    def visit(block: Block) -> None:
        chosen = {name: layer for name, layer in block.inside(_linears(model)).items() if name == last}
        block.observe(chosen, lambda _, x: seen.append(x.clone()))
        halve(block)

    walk(model, examples, visit, device=CPU)
    expected = _inputs(model, examples)[last]  # the model is changed by now
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))


def test_blocks_that_do_not_form_a_chain_are_one() -> None:
    class Shrinking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 4), nn.Linear(4, 2)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model, names = Shrinking(), list[str]()
    x = torch.randn(5, 8)

    def visit(block: Block) -> None:
        names.append(block.name)
        block.observe(_linears(model), lambda name, x: names.append(name))

    assert not walk(model, [((x,), {})], visit, device=CPU)
    assert names == ["", "layers.0", "layers.1"]


def test_modes_come_back_and_running_statistics_stay() -> None:
    """B56"""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)).train()
    model[2].eval()
    before = model[1].running_mean.clone()
    walk(model, [((torch.randn(4, 6),), {})], lambda block: block.observe({"0": model[0]}, lambda *_: None), device=CPU)
    assert torch.equal(model[1].running_mean, before)
    assert [module.training for module in (model, model[0], model[1], model[2])] == [True, True, True, False]


def test_hooks_and_forwards_go_also_when_a_visit_fails() -> None:
    model = llamas.module()

    def fail(block: Block) -> None:
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        walk(model, _examples(), fail, device=CPU)
    assert not any("forward" in vars(module) for module in model.modules())


def test_fingerprints_tell_weights_and_inputs_apart() -> None:
    model, found = llamas.module(), list[str]()

    def run(examples: list[Any]) -> list[str]:
        found.clear()
        walk(model, examples, lambda block: found.append(block.fingerprint()), device=CPU)
        return list(found)

    first = run(_examples())
    assert run(_examples()) == first and len(set(first)) == len(first)
    assert run(_examples(tokens=6))[0] != first[0]
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] += 1
    changed = run(_examples())
    assert changed[0] == first[0] and changed[1] != first[1]


def test_statistics_are_those_of_all_rows_together() -> None:
    rows = torch.randn(11, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gram, columns = Gram(5, CPU), Columns(5, CPU)
    for part in (rows[:4].reshape(2, 2, 5), rows[4:], rows[:0]):
        gram.add(part)
        columns.add(part)
    assert gram.rows == columns.rows == 11
    torch.testing.assert_close(gram.matrix.double(), rows.T @ rows / 11, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(columns.mean_square.double(), (rows**2).mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(columns.mean_absolute.double(), rows.abs().mean(0), rtol=1e-5, atol=1e-6)
    assert torch.equal(columns.largest.double(), rows.float().abs().amax(0).double())


def test_a_convolution_is_observed_with_what_it_convolves() -> None:
    """A subclass that pads its input first: the rows of the product are those of the padded one."""

    class Padding(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.nn.functional.pad(x, (1, 1, 1, 1)))

    torch.manual_seed(0)
    model, x, seen = nn.Sequential(Padding(2, 3, 3)), torch.randn(1, 2, 5, 5), []
    block = Block(name="", module=model, calls=[((x,), {})], device=torch.device("cpu"))
    block.observe({"0": model[0]}, lambda name, given: seen.append((name, given)))
    assert seen[0][0] == "0" and torch.equal(seen[0][1], torch.nn.functional.pad(x, (1, 1, 1, 1)))
    assert "_conv_forward" not in vars(model[0])
