"""2:4 weights in the form that a GPU's sparse matrix units read, multiplied by cuSPARSELt through PyTorch.

The compressed weight is a plain parameter of nine sixteenths of the size, and its layout is the library's own: it multiplies on
GPUs alone. Measured on an H200 (bf16, benchmarks/results/h200): 1.2 to 1.4 times the speed of the dense product from
512 rows on, and 3 to 4 times slower at 1 to 64 rows, where a product waits for memory and the library does not; PyTorch's
CUTLASS form refuses that device altogether.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optforge.errors import Problem, StepError
from optforge.measure.size import nbytes
from optforge.spec import Hardware, Json
from optforge.transforms.base import Context, Receipt
from optforge.transforms.prune import masks

if TYPE_CHECKING:
    from optforge.transforms.prune import Prune

DTYPES = (torch.float16, torch.bfloat16)
SMALLEST = 32
"""Both sizes of a weight are multiples of it."""
ROWS = 8
"""Rows of the other factor are filled up to a multiple of it."""


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


def convert(model: nn.Module, names: list[str], options: Prune, ctx: Context, receipt: Receipt) -> None:
    """Compresses the pruned 2:4 layers where `kernel` says so, and says what was done or why not.

    Raises:
        StepError: a layer is not 2:4, or does not come back from the compressed form as it was.
    """
    if options.pattern is None or options.pattern.name != "2:4" or not names:
        return
    reason = "kernel: dense" if options.kernel.name == "dense" else unavailable(ctx.device)
    if reason is None and options.kernel.name == "auto":
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
    reason = _unfit(module)
    if reason is None and not module.weight.is_meta:
        require_2_4(module.weight.detach(), name, step)
        reason = _compress_(module, name, step)
    elif reason is None:
        _shape_(module)
    if reason is not None:
        receipt.notes.append(f"{name} stays dense, with zeros in it: {reason}")
        return
    receipt.decisions["sparse"].append(name)
    touched = next(touched for touched in receipt.touched if touched.name == name)
    after = nbytes(module.weight)
    index = receipt.touched.index(touched)
    receipt.touched[index] = type(touched)(
        name=name, what=f"{touched.what}, compressed", bytes_before=touched.bytes_before, bytes_after=after, dtypes=touched.dtypes
    )
    receipt.bytes_after += after - touched.bytes_after


def replay(model: nn.Module, decisions: dict[str, Json]) -> None:
    """The compressed layers' structure, without values."""
    for name in decisions["sparse"]:
        _shape_(model.get_submodule(name))


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
    if module.weight.dtype not in DTYPES:
        return f"the kernel multiplies bf16 and fp16, and it is {str(module.weight.dtype).removeprefix('torch.')}"
    if any(size % SMALLEST for size in module.weight.shape):
        return f"the kernel needs sizes that {SMALLEST} divides, and it is {'x'.join(map(str, module.weight.shape))}"
    return None


def _compress_(module: nn.Module, name: str, step: str) -> str | None:
    """Compresses a layer on its GPU and tries it; the library's reason where it refuses, after which the layer is as it was.

    Raises:
        StepError: the dense weight does not come back exactly.
    """
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    if not weight.is_cuda:
        return "it lies on the CPU"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch calls the interface a prototype
            compressed = torch._cslt_compress(weight.detach().contiguous())
        module.weight = nn.Parameter(compressed, requires_grad=False)
        module.__class__ = SparseLinear
        back = module.dequantize()
    except (RuntimeError, NotImplementedError) as error:
        module.__class__, module.weight = nn.Linear, weight
        return f"the sparse library refuses it ({str(error).splitlines()[0]})"
    if not torch.equal(back, weight.detach()):
        raise StepError(f"step {step}: {name} does not come back from its compressed form as it was")
    return None


def _shape_(module: nn.Module) -> None:
    """The compressed layer's structure, on meta or with values to be assigned."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    outputs, columns = weight.shape
    module.weight = nn.Parameter(weight.new_empty(outputs, columns // 16 * 9), requires_grad=False)
    module.__class__ = SparseLinear
