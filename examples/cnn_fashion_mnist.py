"""Trains a small CNN on Fashion-MNIST with Lightning Fabric, with weights in bf16 that are rounded at random.

    python examples/cnn_fashion_mnist.py --steps 300

The recipe is a file beside this one, as a colleague would send it. Batch norms stay in fp32, as the step's defaults say.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn

from optforge.data.fashion_mnist import FashionMNIST
from optforge.lightning import optimizer, prepare
from optforge.models.base import Loaded
from optforge.models.fashion_cnn import Network

RECIPE = Path(__file__).with_name("cnn_bf16.yaml")


def batches(split: str, count: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Images fp32 [size, 1, 28, 28] and labels."""
    loaded = Loaded(module=nn.Identity(), family="image_classifier", name="cnn", image_shape=(1, 28, 28))
    return list(FashionMNIST(split=split).batches(loaded, count, size))  # type: ignore[arg-type]  # both have labels


def accuracy(model: nn.Module, items: int) -> float:
    """Share of test images that are named right."""
    model.eval()
    with torch.no_grad():
        found = [(model(images).argmax(-1) == labels).float().mean() for images, labels in batches("test", items, 500)]
    model.train()
    return float(torch.stack(found).mean())


def train(steps: int, batch_size: int = 64) -> tuple[list[float], float]:
    """Losses of the steps, and the accuracy on 2,000 test images at the end."""
    torch.manual_seed(0)
    fabric, network = Fabric(accelerator="auto", devices=1), Network()
    for name, receipt in prepare(fabric, network, RECIPE, example=torch.rand(2, 1, 28, 28)).items():
        fabric.print(f"step {name}: {len(receipt.touched)} modules")
    network = network.to(fabric.device)
    model, moves = fabric.setup(network, optimizer(network, lr=2e-3))
    data, losses = batches("train", steps * batch_size, batch_size), []
    for step in range(steps):
        images, labels = (tensor.to(fabric.device) for tensor in data[step % len(data)])
        loss = F.cross_entropy(model(images).float(), labels)
        fabric.backward(loss)
        moves.step()
        moves.zero_grad()
        losses.append(float(loss.detach()))
    return losses, accuracy(model, 2000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    losses, right = train(parser.parse_args().steps)
    print(f"loss of the first ten steps {sum(losses[:10]) / 10:.3f}, of the last ten {sum(losses[-10:]) / 10:.3f}; {right:.1%} right")


if __name__ == "__main__":
    main()
