"""2:4 weights in the form that a GPU's sparse matrix units read, multiplied by cuSPARSELt through PyTorch.

The compressed weight is a plain parameter of nine sixteenths of the size, and its layout is the library's own: it multiplies on
GPUs alone. Measured on an H200 (bf16, benchmarks/sparse_products.py): 1.1 to 1.5 times the speed of the dense product from
1,024 rows on, and 2 to 5 times slower at 1 to 64 rows. PyTorch's CUTLASS form refuses that device altogether.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from optforge.errors import Problem, StepError
from optforge.measure.size import nbytes
from optforge.select import original_name
from optforge.spec import Hardware, Json
from optforge.transforms.base import Context, Receipt
from optforge.transforms.prune import masks
from optforge.transforms.prune.survey import weight_of

PATTERN = "optforge_pattern"
"""Attribute of a layer that was pruned in a pattern: its name."""
DTYPES = (torch.float16, torch.bfloat16)
SMALLEST = 32
"""Both sizes of a weight are multiples of it."""
ROWS = 8
"""Rows of the other factor are filled up to a multiple of it."""


@register_flop_formula(torch.ops.aten._cslt_sparse_mm)
def _flops(weight_shape: Sequence[int], x_shape: Sequence[int], *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Half of the dense product's: two of four factors are zero. x comes as [K, rows]."""
    return int(weight_shape[0] * x_shape[0] * x_shape[1])


class SparseLinear(nn.Linear):
    """A linear whose weight [N, 9 K / 16] is compressed 2:4; `in_features` and `out_features` are those of the dense one."""

    def forward(self, input: Tensor) -> Tensor:
        """input [..., K] to [..., N], in input's dtype, on CUDA."""
        return product(input.reshape(-1, self.in_features), self.weight, self.bias).reshape(*input.shape[:-1], self.out_features)

    def dequantize(self) -> Tensor:
        """The dense weight [N, K], exactly: the product with the identity."""
        identity = torch.eye(self.in_features, dtype=self.weight.dtype, device=self.weight.device)
        return product(identity, self.weight, None).t().contiguous()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves, but never casts: the bytes are no numbers."""
        own = id(self.weight)

        def keep(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return tensor.to(result.device) if id(tensor) == own and result.dtype is not tensor.dtype else result

        return super()._apply(keep, recurse)  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped


def product(x: Tensor, compressed: Tensor, bias: Tensor | None) -> Tensor:
    """x [rows, K] times the transposed dense weight: [rows, N]."""
    if not x.is_cuda and not x.is_meta:
        raise RuntimeError("a weight that is compressed for the 2:4 kernel multiplies on a GPU only; prune with kernel: dense for a CPU")
    short = -x.shape[0] % ROWS
    padded = F.pad(x, (0, 0, 0, short)) if short else x
    found: Tensor = torch._cslt_sparse_mm(compressed, padded.t(), bias=bias, transpose_result=False).t()
    return found[: x.shape[0]]


def convert(model: nn.Module, names: list[str], kernel: str, ctx: Context, receipt: Receipt) -> None:
    """Compresses 2:4 layers where `kernel` (auto, dense, sparse) says so, and says what was done or why not.

    Raises:
        StepError: a layer is not 2:4, or does not come back from the compressed form as it was.
    """
    if not names:
        return
    reason = "kernel: dense" if kernel == "dense" else unavailable(ctx.device)
    if reason is None and kernel == "auto":
        reason = _unwanted(ctx)
    if reason is not None:
        receipt.notes.append(f"{len(names)} layers stay dense, with zeros in them: {reason}")
        return
    for name in names:
        _convert(model, name, ctx.step, receipt)
    if receipt.decisions["sparse"]:
        receipt.kernels["aten::_cslt_sparse_mm"] = len(receipt.decisions["sparse"])


def unavailable(device: Hardware) -> str | None:
    """Why the device has no 2:4 product, or None."""
    if device.backend == "cpu":
        return "no sparse kernel on cpu"
    arch = str(device.arch or "")
    if device.backend != "nvidia" or not arch.startswith("sm_") or int("".join(filter(str.isdigit, arch)) or 0) < 80:
        return f"no sparse kernel on {device.name}, which needs NVIDIA's 2:4 units (sm_80 and later)"
    if torch.cuda.is_available() and not torch.backends.cusparselt.is_available():
        return "this build of PyTorch has no cuSPARSELt"
    return None


def _unwanted(ctx: Context) -> str | None:
    """Why `auto` keeps a dense product where a sparse one could run."""
    rewriting = next((kind for kind in ctx.later if kind in ("quantize", "heal")), None)
    if rewriting is not None:
        return f"a later {rewriting} step rewrites them"
    if ctx.workload == "decode":
        return "a decode multiplies few rows, at which the sparse product is the slower one (kernel: sparse asks for it)"
    return None


def _convert(model: nn.Module, name: str, step: str, receipt: Receipt) -> None:
    module = model.get_submodule(name)
    before = nbytes(weight_of(module))
    reason = _unfit(module)
    if reason is None and not weight_of(module).is_meta:
        require_2_4(weight_of(module).detach(), name, step)
        reason = _compress_(module, name, step)
    elif reason is None:
        _shape_(module)
    if reason is not None:
        receipt.notes.append(f"{name} stays dense, with zeros in it: {reason}")
        return
    receipt.decisions["sparse"].append(name)
    saved = before - nbytes(weight_of(module))
    for index, touched in enumerate(receipt.touched):
        if touched.name == name:
            receipt.touched[index] = replace(touched, what=f"{touched.what}, compressed", bytes_after=touched.bytes_after - saved)
            receipt.bytes_after -= saved


def replay(model: nn.Module, decisions: dict[str, Json]) -> None:
    """The compressed layers' structure, without values."""
    for name in decisions["sparse"]:
        _shape_(model.get_submodule(name))


def marked(model: nn.Module) -> list[str]:
    """The 2:4 layers that an earlier step left dense."""
    return [
        original_name(path)
        for path, module in model.named_modules()
        if vars(module).get(PATTERN) == "2:4" and not isinstance(module, SparseLinear)
    ]


def require_2_4(weight: Tensor, name: str, step: str) -> None:
    """
    Raises:
        StepError: a group of four neighbours has fewer than two zeros, with the share of such groups.
    """
    bad = ~masks.satisfied(weight == 0, 2, 4)
    if bool(bad.any()):
        share = float(bad.float().mean())
        what = f"{share:.1%} of its groups of 4 have fewer than two zeros, so it is not 2:4 and must not be compressed"
        raise StepError(Problem(where=f"step {step}, {name}", what=what, fix="prune it with pattern: 2:4 first"))


def _unfit(module: nn.Module) -> str | None:
    if type(module) is not nn.Linear:
        return f"the kernel multiplies plain linears, and it is a {type(module).__name__}"
    weight = weight_of(module)
    if weight.dtype not in DTYPES:
        return f"the kernel multiplies bf16 and fp16, and it is {str(weight.dtype).removeprefix('torch.')}"
    if any(size % SMALLEST for size in weight.shape):
        return f"the kernel needs sizes that {SMALLEST} divides, and it is {'x'.join(map(str, weight.shape))}"
    return None


def _compress_(module: nn.Module, name: str, step: str) -> str | None:
    """Compresses a layer on its GPU and tries it; the library's reason where it refuses, after which the layer is as it was.

    Raises:
        StepError: the dense weight does not come back exactly.
    """
    weight = weight_of(module)
    if not weight.is_cuda:
        return "it lies on the CPU"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch calls the interface a prototype
            compressed = torch._cslt_compress(weight.detach().contiguous())
        module.weight = nn.Parameter(compressed, requires_grad=False)
        module.__class__ = SparseLinear
        assert isinstance(module, SparseLinear)
        back = module.dequantize()
    except (RuntimeError, NotImplementedError) as error:
        module.__class__, module.weight = nn.Linear, weight
        return f"the sparse library refuses it ({str(error).splitlines()[0]})"
    if not torch.equal(back, weight.detach()):
        raise StepError(f"step {step}: {name} does not come back from its compressed form as it was")
    return None


def _shape_(module: nn.Module) -> None:
    """The compressed layer's structure, on meta or with values to be assigned."""
    weight = weight_of(module)
    outputs, columns = weight.shape
    module.weight = nn.Parameter(weight.new_empty(outputs, columns // 16 * 9), requires_grad=False)
    module.__class__ = SparseLinear
