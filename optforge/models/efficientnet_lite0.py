"""EfficientNet-Lite0 trained on ImageNet: a pretrained image classifier that needs no hub.

The network is EfficientNet-B0 without squeeze-and-excitation and with ReLU6 (Tan and Le 2019, arXiv:1905.11946, table 1; the
Lite variant's announcement by Google, March 2020). Module names follow the published state dict, so that it loads as it is; the
package's own code is not used, and the pickle is read by PyTorch's restricted loader.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optforge import checkpoint, fetch
from optforge.errors import Problem
from optforge.models.base import Loaded, Tell
from optforge.pretrained import check_dtype, torch_dtype

# per stage: blocks, kernel, stride of the first block, expansion, input channels, output channels
_STAGES = (
    (1, 3, 1, 1, 32, 16),
    (2, 3, 2, 6, 16, 24),
    (2, 5, 2, 6, 24, 40),
    (3, 3, 2, 6, 40, 80),
    (3, 5, 1, 6, 80, 112),
    (4, 5, 2, 6, 112, 192),
    (1, 3, 1, 6, 192, 320),
)
_STEM, _HEAD, _CLASSES = 32, 1280, 1000
_EPSILON, _MOMENTUM = 1e-3, 0.01


class SameConv2d(nn.Conv2d):
    """A convolution padded as TensorFlow's SAME: the output has ceil(size / stride) rows, odd padding goes to the end.

    The weights were trained with it; at stride 2 PyTorch's symmetric padding would shift every feature by a pixel.
    """

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        if kernel == 1:
            return super().forward(x)
        down, across = (max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in x.shape[-2:])
        return super().forward(F.pad(x, (across // 2, across - across // 2, down // 2, down - down // 2)))


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=_EPSILON, momentum=_MOMENTUM)


class Block(nn.Module):
    """Inverted residual: 1x1 expansion, depthwise convolution, 1x1 projection, and the input added where shapes allow."""

    def __init__(self, channels: int, out_channels: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels * expansion
        self.expands = expansion != 1
        if self.expands:
            self._expand_conv = SameConv2d(channels, hidden, 1, bias=False)
            self._bn0 = _norm(hidden)
        self._depthwise_conv = SameConv2d(hidden, hidden, kernel, stride=stride, groups=hidden, bias=False)
        self._bn1 = _norm(hidden)
        self._project_conv = SameConv2d(hidden, out_channels, 1, bias=False)
        self._bn2 = _norm(out_channels)
        self.adds = stride == 1 and channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        y = F.relu6(self._bn1(self._depthwise_conv(y)))
        projected: Tensor = self._bn2(self._project_conv(y))
        return projected + x if self.adds else projected


class Network(nn.Module):
    """Images [batch, 3, height, width] in, logits [batch, 1000] out."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = SameConv2d(3, _STEM, 3, stride=2, bias=False)
        self._bn0 = _norm(_STEM)
        blocks = []
        for count, kernel, stride, expansion, channels, out_channels in _STAGES:
            blocks.append(Block(channels, out_channels, kernel, stride, expansion))
            blocks += [Block(out_channels, out_channels, kernel, 1, expansion) for _ in range(count - 1)]
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = SameConv2d(_STAGES[-1][-1], _HEAD, 1, bias=False)
        self._bn1 = _norm(_HEAD)
        self._fc = nn.Linear(_HEAD, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        x = F.relu6(self._bn1(self._conv_head(x)))
        logits: Tensor = self._fc(x.mean((-2, -1)))
        return logits


@dataclass(frozen=True, kw_only=True)
class EfficientNetLite0:
    """EfficientNet-Lite0, 4.65 million parameters, images of 224 x 224."""

    dtype: str = "fp32"
    """fp32, fp16 or bf16: the dtype of all weights."""

    def check(self) -> Iterator[Problem]:
        yield from check_dtype(self.dtype)
        absent = fetch.missing("efficientnet_lite0")
        if absent is not None:
            yield absent

    def skeleton(self) -> Loaded:
        with torch.device("meta"):
            module = Network().to(torch_dtype(self.dtype)).eval()
        return Loaded(module=module, family="image_classifier", name="efficientnet_lite0", image_shape=(3, 224, 224))

    def load(self, seed: int = 0, tell: Tell | None = None) -> Loaded:
        loaded = self.skeleton()
        file = next(fetch.require("efficientnet_lite0").glob("*.pth"))
        state = checkpoint.read(file)
        checkpoint.require_finite(state.items(), str(file))
        checkpoint.fill_(loaded.module, state, str(file))
        loaded.module.to(torch_dtype(self.dtype))
        loaded.digest = checkpoint.module_digest(loaded.module)
        return loaded
