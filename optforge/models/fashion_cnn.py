"""A small residual CNN for Fashion-MNIST, trained on the spot: a real image classifier that comes from data alone.

Training takes minutes on two cores and happens once; the result lies in the user's cache under a digest of this code and of
the data, so that a change of either trains again.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optforge import checkpoint, fetch
from optforge.cache import building, cache_dir
from optforge.errors import ModelError, Problem
from optforge.idx import read_idx
from optforge.models.base import Loaded, Tell
from optforge.pretrained import check_dtype, torch_dtype

NOTE = "trained on the spot on Fashion-MNIST's 60,000 training images"
_MEAN, _DEVIATION = 0.286, 0.353


@dataclass(frozen=True, kw_only=True)
class Training:
    """Stochastic gradient descent with Nesterov momentum, one cycle of the learning rate, horizontal flips."""

    epochs: int = 6
    batch_size: int = 128
    learning_rate: float = 0.2
    momentum: float = 0.9
    weight_decay: float = 5e-4
    seed: int = 28
    images: int = 60_000
    """The first images of the training set; fewer only in tests."""


class Residual(nn.Module):
    """Two 3x3 convolutions with batch norms, and the input added (He et al. 2016, arXiv:1512.03385, figure 2)."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out_channels:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class Network(nn.Module):
    """Images [batch, 1, 28, 28] in [0, 1] in, logits [batch, 10] out; 77,754 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem((x - _MEAN) / _DEVIATION)))
        logits: Tensor = self.head(self.blocks(x).mean((-2, -1)))
        return logits


@dataclass(frozen=True, kw_only=True)
class FashionCNN:
    """A residual CNN of 78,000 parameters on images of 28 x 28."""

    dtype: str = "fp32"
    """fp32, fp16 or bf16: the dtype of all weights."""

    def check(self) -> Iterator[Problem]:
        yield from check_dtype(self.dtype)
        absent = fetch.missing("fashion_mnist")
        if absent is not None:
            yield absent

    def skeleton(self) -> Loaded:
        with torch.device("meta"):
            module = Network().to(torch_dtype(self.dtype)).eval()
        return Loaded(module=module, family="image_classifier", name="fashion_cnn", image_shape=(1, 28, 28), notes=[NOTE])

    def load(self, seed: int = 0, tell: Tell | None = None) -> Loaded:
        """Trains on the first call (minutes; `tell` gets a stage and a fraction), then reads the cached weights."""
        training = Training()
        folder = _folder(training)
        weights = folder / "model.safetensors"
        if not weights.is_file():
            _store(train(training, tell), folder, training)
        loaded = self.skeleton()
        state = checkpoint.read(weights)
        checkpoint.require_finite(state.items(), str(weights))
        checkpoint.fill_(loaded.module, state, str(weights))
        loaded.module.to(torch_dtype(self.dtype))
        loaded.digest = checkpoint.module_digest(loaded.module)
        return loaded


def _folder(training: Training) -> Path:
    """Where the weights of this code, these settings and this data lie."""
    data = json.loads((fetch.require("fashion_mnist") / "asset.json").read_text())["files"]
    code = [inspect.getsource(part) for part in (Residual, Network, train)]
    key = hashlib.sha256(json.dumps([code, repr(training), data]).encode()).hexdigest()[:16]
    return cache_dir() / "models" / f"fashion-cnn-{key}"


def _store(module: nn.Module, folder: Path, training: Training) -> None:
    from safetensors.torch import save_file

    with building(folder) as new:
        save_file({name: tensor.contiguous() for name, tensor in module.state_dict().items()}, new / "model.safetensors")
        (new / "training.json").write_text(json.dumps({"training": repr(training), "torch": torch.__version__}) + "\n")


def train(training: Training, tell: Tell | None = None) -> Network:
    """The network after training, in eval mode. The caller's random state is left alone.

    Raises:
        DataError: the data set is not on this machine.
        ModelError: the training diverged.
    """
    folder = fetch.require("fashion_mnist")
    images = read_idx(folder / "train-images-idx3-ubyte.gz", (60_000, 28, 28))[: training.images].unsqueeze(1)
    labels = read_idx(folder / "train-labels-idx1-ubyte.gz", (60_000,))[: training.images].long()
    with torch.random.fork_rng():
        torch.manual_seed(training.seed)
        network = Network()
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # the stubs lack this form
        optimizer = torch.optim.SGD(
            network.parameters(),
            lr=training.learning_rate,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
            nesterov=True,
        )
        batches = len(images) // training.batch_size
        steps = training.epochs * batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=training.learning_rate, total_steps=steps, pct_start=0.2)
        for step in range(steps):
            if step % batches == 0:
                order = torch.randperm(len(images))
            rows = order[step % batches * training.batch_size :][: training.batch_size]
            batch = images[rows].float().div(255.0)
            flip = torch.rand(len(rows), 1, 1, 1) < 0.5
            loss = F.cross_entropy(network(torch.where(flip, batch.flip(-1), batch)), labels[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # untyped in PyTorch
            optimizer.step()
            schedule.step()
            if tell is not None and step % 20 == 0:
                tell("training fashion_cnn", step / steps)
    if not bool(torch.isfinite(loss)):
        raise ModelError(Problem(where="fashion_cnn", what="the training diverged", fix="report it with your versions of torch"))
    network.train(False)
    return network
