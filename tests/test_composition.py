"""How quantized weights can be represented, and what each form composes with: the table behind a decision.

Rows are what else happens to the model; columns are forms of a quantized linear. Two processes (gloo) run every cell on
a two-block decoder; a cell holds whether it works, and a form that stops working or begins to work fails the test, since
the decision to keep quantized weights as plain integer parameters of an `nn.Linear` subclass rests on it.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from toys import TinyLM, context, tiny_lm, token_ids

WORLD = 2
WIDTH = 128


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Int8 weight and fp32 scale per output channel, by rounding to nearest."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


class Swapped(nn.Module):
    """A module put in a linear's place, integers and scale in buffers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = rounded(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.weight_scale)


class Plain(nn.Linear):
    """An `nn.Linear` subclass with plain parameters beside one another."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.weight_scale)


def none(model: TinyLM) -> None:
    """No quantization."""


def swap(model: TinyLM) -> None:
    for name, module in list(model.layers.named_modules()):
        if isinstance(module, nn.Linear):
            model.layers.set_submodule(name, Swapped(module))


def torchao(model: TinyLM) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model.layers, Int8WeightOnlyConfig())


def plain(model: TinyLM) -> None:
    for module in model.layers.modules():
        if isinstance(module, nn.Linear):
            weight, scale = rounded(module.weight.detach())
            module.__class__ = Plain
            module.weight = nn.Parameter(weight, requires_grad=False)
            module.weight_scale = nn.Parameter(scale, requires_grad=False)


def packed(model: TinyLM) -> None:
    from optforge.backends.cpu import CpuBackend
    from optforge.transforms.fuse import Fuse

    Fuse().apply(model, context("fuse", ((token_ids(),), {}), backend=CpuBackend()))


def optforge(model: TinyLM) -> None:
    from optforge.backends.cpu import CpuBackend
    from optforge.config.steps import step

    transform = step("weights", {"use": "quantize/int8_weight", "ignore": ["lm_head"]}).transform
    transform.apply(model, context("weights", ((token_ids(),), {}), backend=CpuBackend()))


FORMS: dict[str, Callable[[TinyLM], None]] = {f.__name__: f for f in (none, swap, torchao, plain, packed, optforge)}


def decoder() -> TinyLM:
    return tiny_lm(width=WIDTH).requires_grad_(False)


def run(model: nn.Module) -> Tensor:
    with torch.no_grad():
        output = model(token_ids())
    return output.full_tensor() if isinstance(output, DTensor) else output


def shard(model: TinyLM, mesh: DeviceMesh) -> None:
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def hold_sharded(model: TinyLM) -> None:
    weight = model.layers[0].mlp.down_proj.weight
    assert isinstance(weight, DTensor), "weight not sharded"
    assert weight.to_local().shape[0] == weight.shape[0] // WORLD


# The rows. Each gets a fresh model, the form, and the mesh, and raises where it does not work.


def fsdp(model: TinyLM, form: Callable[[TinyLM], None], mesh: DeviceMesh) -> None:
    form(model)
    expected = run(model)
    shard(model, mesh)
    hold_sharded(model)
    torch.testing.assert_close(run(model), expected, atol=1e-4, rtol=1e-4)


def fsdp_blocks_compiled(model: TinyLM, form: Callable[[TinyLM], None], mesh: DeviceMesh) -> None:
    form(model)
    expected = run(model)
    for block in model.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    shard(model, mesh)
    hold_sharded(model)
    torch.testing.assert_close(run(model), expected, atol=1e-4, rtol=1e-4)


def tensor_parallel(model: TinyLM, form: Callable[[TinyLM], None], mesh: DeviceMesh) -> None:
    form(model)
    expected = run(model)
    for block in model.layers:
        parallelize_module(block.mlp, mesh, {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()})
    hold_column_parallel(model)
    torch.testing.assert_close(run(model), expected, atol=1e-4, rtol=1e-4)


def hold_column_parallel(model: TinyLM) -> None:
    weight = model.layers[0].mlp.gate_proj.weight
    assert isinstance(weight, DTensor) and weight.to_local().shape[0] == weight.shape[0] // WORLD, "weight not sharded"


def fsdp_then_quantize(model: TinyLM, form: Callable[[TinyLM], None], mesh: DeviceMesh) -> None:
    reference = copy.deepcopy(model)
    form(reference)
    shard(model, mesh)
    form(model)
    hold_sharded(model)
    torch.testing.assert_close(run(model), run(reference), atol=1e-4, rtol=1e-4)


def fullgraph_over_fsdp(model: TinyLM, form: Callable[[TinyLM], None], mesh: DeviceMesh) -> None:
    form(model)
    shard(model, mesh)
    model.compile(backend="aot_eager", fullgraph=True)
    run(model)


def export_after_fsdp(model: TinyLM, form: Callable[[TinyLM], None], mesh: DeviceMesh) -> None:
    form(model)
    shard(model, mesh)
    torch.export.export(model, (token_ids(),), strict=False)


ROWS = {r.__name__: r for r in (fsdp, fsdp_blocks_compiled, tensor_parallel, fsdp_then_quantize, fullgraph_over_fsdp, export_after_fsdp)}


def cell(row: str, form: str, mesh: DeviceMesh) -> str:
    """`ok`, or why not."""
    torch._dynamo.reset()
    try:
        ROWS[row](decoder(), FORMS[form], mesh)
    except Exception as error:  # whatever a combination raises is the finding
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return "ok"


def worker(rank: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    found = {}
    for row in ROWS:
        for form in FORMS:
            found[row, form] = cell(row, form, mesh)
            dist.barrier()
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def table() -> dict[tuple[str, str], str]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(folder,), nprocs=WORLD)
        first, second = (torch.load(Path(folder) / f"{rank}.pt") for rank in range(WORLD))
    return {key: f"{first[key]} | {second[key]}" if first[key] != second[key] else first[key] for key in first}


WORKS = {
    "fsdp": {"none", "plain", "packed", "optforge"},
    "fsdp_blocks_compiled": {"none", "plain", "packed", "optforge"},
    "tensor_parallel": {"none", "plain", "optforge"},
    "fsdp_then_quantize": {"none"},
    "fullgraph_over_fsdp": set(),
    "export_after_fsdp": set(),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("row", ROWS)
def test_cell(row: str, form: str, table: dict[tuple[str, str], str]) -> None:
    found = table[row, form]
    assert (found == "ok") == (form in WORKS[row]), found


@pytest.mark.parametrize("form", [form for form in FORMS if form != "torchao"])
def test_one_process_compiles_exports_saves_and_loads(form: str, tmp_path: Path, fresh_compiler: None) -> None:
    model = decoder()
    FORMS[form](model)
    expected = run(model)
    compiled = copy.deepcopy(model)
    for block in compiled.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(compiled), expected, atol=1e-4, rtol=1e-4)
    program = torch.export.export(model, (token_ids(),), strict=False)
    torch.testing.assert_close(program.module()(token_ids()), expected, atol=1e-4, rtol=1e-4)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    again = decoder()
    FORMS[form](again)
    nn.init.zeros_(again.embed.weight)
    again.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(run(again), expected)


@pytest.mark.parametrize("form", ["plain", "optforge"])
def test_a_cast_of_the_whole_model_leaves_integers(form: str) -> None:
    model = decoder()
    FORMS[form](model)
    assert model.to(torch.bfloat16).layers[0].mlp.up_proj.weight.dtype == torch.int8


def test_8_bit_floats_would_be_lost_in_a_cast() -> None:
    """Why fp8 weights are stored as their bits in uint8."""
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(model.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    assert model.to(torch.bfloat16).weight.dtype == torch.bfloat16
