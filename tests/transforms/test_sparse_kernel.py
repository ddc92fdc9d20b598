"""The 2:4 product on a CUDA device: exact storage, right products, refusals that leave the layer as it was."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn
from toys import context

from optforge.backends.cpu import CpuBackend
from optforge.measure import sparsity
from optforge.spec import Hardware
from optforge.transforms.base import Receipt
from optforge.transforms.prune import Kernel, Method, Pattern, Prune
from optforge.transforms.prune.sparse import SparseLinear

pytestmark = pytest.mark.gpu
GPU = Hardware(name="gpu", backend="nvidia", arch="sm_90")


def pruned(model: nn.Module, kernel: Kernel = Kernel.auto) -> Receipt:
    options = Prune(method=Method.magnitude, pattern=Pattern["2:4"], kernel=kernel)
    ctx = dataclasses.replace(context("sparse", backend=CpuBackend(), workload="prefill"), target=GPU, device=GPU)
    with torch.no_grad():
        return options.apply(model, ctx)


@pytest.mark.case("B36")
@pytest.mark.case("B37")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_b36_b37_a_compressed_weight_is_the_masked_one_and_multiplies_as_it(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1024), nn.Linear(1024, 96, bias=False), nn.Linear(96, 40)).to("cuda", dtype)
    dense = copy.deepcopy(model)
    pruned(dense, Kernel.dense)
    receipt = pruned(model)
    assert receipt.decisions["sparse"] == ["0", "1", "2"] and type(model[3]) is nn.Linear
    assert sparsity.share(model, ["0", "1", "2", "3"]) == 0.5
    for own, other in zip(model, dense, strict=True):
        found = sparsity.dense(own)
        assert found is not None and torch.equal(found, other.weight)
        for rows in (1, 3, 8, 17, 512):
            x = torch.randn(rows, own.in_features, device="cuda", dtype=dtype)
            expected = torch.nn.functional.linear(x.double(), other.weight.double(), None if other.bias is None else other.bias.double())
            assert (own(x).double() - expected).norm() / expected.norm() < 1e-2
    state = copy.deepcopy(model)
    assert torch.equal(state(torch.ones(2, 64, device="cuda", dtype=dtype)), model(torch.ones(2, 64, device="cuda", dtype=dtype)))
    assert isinstance(model.float()[0], SparseLinear) and model[0].weight.dtype is dtype, "a cast would ruin the compressed bytes"


def test_it_compiles_as_one_graph() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.SiLU(), nn.Linear(512, 256)).to("cuda", torch.bfloat16)
    pruned(model)
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected, found = model(x), torch.compile(model, fullgraph=True)(x)
    assert (found.double() - expected.double()).norm() / expected.double().norm() < 1e-2
