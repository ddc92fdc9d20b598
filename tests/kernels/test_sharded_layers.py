"""Every storage and kind of layer under FSDP2 on two processes: sharded, gathered, and the same results (B73)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
sys.path[:0] = [{tests!r}]
from toys import context
from optforge.transforms.quantize import Quantize, SchemeName

dist.init_process_group("gloo", init_method="file://{store}", rank=int(sys.argv[1]), world_size=2)
mesh = init_device_mesh("cpu", (2,))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.conv, self.out = nn.Embedding(16, 64), nn.Conv2d(1, 2, 3, padding=1), nn.Linear(128, 64)

    def forward(self, ids):
        x = self.conv(self.table(ids)[:, None])
        return self.out(x.permute(0, 2, 1, 3).flatten(2))


for name in ("int8_dynamic", "int8_static", "int4_weight", "fp8_dynamic", "fp8_block", "mxfp8_weight", "mxfp4", "nvfp4"):
    scheme = SchemeName[name]
    torch.manual_seed(0)
    net = Net()
    Quantize(scheme=scheme, targets=["Linear", "Conv2d", "Embedding"]).apply(net, context())
    ids = torch.arange(8).reshape(2, 4)
    with torch.no_grad():
        expected = net(ids)
        for part in (net.out, net.conv, net.table, net):
            fully_shard(part, mesh=mesh)
        held = net.out.weight.to_local().shape[0]
        found = net(ids)
    assert held * 2 == 64, (scheme, held)
    assert torch.equal(found, expected), scheme
    assert net.out.weight.dtype in (torch.int8, torch.uint8), scheme
print("same", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.case("B73")
def test_b73_quantized_layers_of_every_kind_are_sharded_and_gathered(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER.format(tests=str(Path(__file__).parents[1]), store=tmp_path / "store"))
    workers = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "worker.py"), str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    for worker in workers:
        out, err = worker.communicate(timeout=240)
        assert worker.returncode == 0 and out == "same\n", err[-3000:]
