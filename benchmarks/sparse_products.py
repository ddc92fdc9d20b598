"""2:4 against dense products on an NVIDIA GPU: the linears of an 8B decoder one by one, then its MLP as a compiled block.

python benchmarks/sparse_products.py --json benchmarks/results/h200/<date>_sparse_products.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optforge.spec import Hardware
from optforge.transforms.base import Context
from optforge.transforms.prune import Kernel, Method, Pattern, Prune

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192)
CALLS, ROUNDS = 20, 7
GPU = Hardware(name="h200", backend="nvidia", arch="sm_90")


class Mlp(nn.Module):
    """Gate and up packed, then down."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(4096, 28672, bias=False)
        self.down = nn.Linear(14336, 4096, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(torch.nn.functional.silu(gate) * up)
        return out


def microseconds(call: Callable[[], Any]) -> float:
    """Median of rounds of one call, launched from a CUDA graph."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    found = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / CALLS * 1e3)
    return statistics.median(found)


def timed(what: str, rows: int, dense: nn.Module, sparse: nn.Module, x: Tensor) -> dict[str, Any]:
    return {"what": what, "rows": rows, "dense_us": microseconds(lambda: dense(x)), "sparse_us": microseconds(lambda: sparse(x))}


def pruned(module: nn.Module, kernel: Kernel) -> nn.Module:
    backend: Any = _Cuda()  # magnitude asks it nothing
    ctx = Context(step="sparse", target=GPU, device=GPU, backend=backend, workload="prefill")
    Prune(method=Method.magnitude, pattern=Pattern["2:4"], kernel=kernel).apply(module, ctx)
    return module


class _Cuda:
    """Stands for a backend: only that there is one matters."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    with torch.no_grad():
        for name, (outputs, columns) in SHAPES.items():
            torch.manual_seed(0)
            dense = nn.Sequential(nn.Linear(columns, outputs, bias=False)).to("cuda", torch.bfloat16)
            sparse = nn.Sequential(nn.Linear(columns, outputs, bias=False)).to("cuda", torch.bfloat16)
            pruned(dense, Kernel.dense)
            pruned(sparse, Kernel.sparse)
            for rows in ROWS:
                x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
                found.append(timed(name, rows, dense, sparse, x))
        torch.manual_seed(0)
        blocks = [torch.compile(pruned(Mlp().to("cuda", torch.bfloat16), kernel)) for kernel in (Kernel.dense, Kernel.sparse)]
        for rows in (512, 2048, 8192):
            x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
            found.append(timed("mlp, compiled", rows, *blocks, x))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, medians of {ROUNDS} rounds of {CALLS} calls")
    print("| product | rows | dense, us | 2:4, us | speed |\n|---|---|---|---|---|")
    for row in found:
        print(
            f"| {row['what']} | {row['rows']} | {row['dense_us']:.1f} | {row['sparse_us']:.1f} | {row['dense_us'] / row['sparse_us']:.2f} |"
        )
    if options.json is not None:
        device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.json.write_text(json.dumps({**device, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
