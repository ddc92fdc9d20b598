"""Small models that many tests share. Weights are random and seeded; none serves a claim about quality."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optforge.calibrate.samples import Taken
from optforge.spec import Hardware
from optforge.transforms.base import Context

CPU = Hardware(name="cpu", backend="cpu", arch="x86_64", peak_flops={"fp32": 1e11, "bf16": 1e12, "int8": 2e12})
GPU = Hardware(name="gpu", backend="nvidia", arch="sm_90")
"""A GPU of which nothing but the kind is known."""


def context(step: str = "step", example: Any = None, **fields: Any) -> Context:
    """A planning context on the CPU profile."""
    return Context(step=step, target=CPU, device=CPU, example=example, **fields)


class FixedSamples:
    """Samples of a run that are given by hand, for steps that calibrate."""

    reason_against = None

    def __init__(self, examples: list[Any]) -> None:
        self.examples = examples

    def take(self, count: int, *, tokens: int, step: str, held_out: int = 0) -> Taken:
        return Taken(examples=self.examples[:count], bad=[], source="a test")


class TinyAttention(nn.Module):
    """Causal self-attention with separate q, k and v."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (p(x).view(batch, tokens, -1, self.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))


class TinyMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TinyBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.attention = TinyAttention(width, heads)
        self.norm2 = nn.RMSNorm(width)
        self.mlp = TinyMLP(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyLM(nn.Module):
    """A decoder of the usual shape: token ids [B, T] in, logits [B, T, vocabulary] out. The head can be tied."""

    def __init__(self, *, layers: int = 2, width: int = 32, heads: int = 4, vocabulary: int = 64, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(TinyBlock(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class ConvBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class TinyCNN(nn.Module):
    """A convolutional classifier: images [B, 3, 16, 16] in, logits [B, 10] out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvBlock(3, 8)
        self.depthwise = ConvBlock(8, 8, groups=8)
        self.body = nn.Sequential(nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.body(x + self.depthwise(x))
        return self.head(x.mean(dim=(2, 3)))


def tiny_lm(**options: Any) -> TinyLM:
    """A seeded TinyLM in eval mode."""
    torch.manual_seed(0)
    return TinyLM(**options).eval()


def tiny_cnn() -> TinyCNN:
    """A seeded TinyCNN in eval mode, its batch norms with statistics that are not the initial ones."""
    torch.manual_seed(0)
    return with_statistics(TinyCNN()).eval()


def with_statistics(model: nn.Module) -> nn.Module:
    """Fills batch norms with weights and running statistics as training would leave them."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.running_mean, -1, 1)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.uniform_(module.bias, -1, 1)
    return model


def token_ids(batch: int = 2, tokens: int = 8, vocabulary: int = 64, device: str = "cpu") -> Tensor:
    """Seeded token ids [batch, tokens]."""
    ids = torch.randint(0, vocabulary, (batch, tokens), generator=torch.Generator().manual_seed(1))
    return ids.to(device)
