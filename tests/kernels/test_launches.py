"""What the package says that it launches is what its launches hand to Triton, for NVIDIA and for AMD."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import optforge.kernels
from optforge.kernels import compiler, cross_compile, weight_only
from optforge.kernels.formats import OCP
from optforge.kernels.launches import DECLARED, Product, declared

ARCHES = ("sm_80", "gfx942")
OTHERS = ("few_rows", "row_kernels", "rotary_kernel", "split_attention", "argmax_kernel", "cross_entropy_kernel")
"""Modules whose launches are recorded instead (`kernels.recorded`): no plan asks for them beforehand."""
SIZES = ((512, 512), (48, 96), (1, 64), (33, 40), (64, 1))
"""Outputs and inputs: multiples of 16, none, and 1, which Triton compiles in."""


def forms() -> list[Product]:
    found = []
    for outputs, columns in SIZES:
        for rows in (1, 4, 5, 16, 100, 256):
            common = {"rows": rows, "outputs": outputs, "columns": columns}
            for dtype in ("bf16", "fp16", "fp32"):
                found += [
                    Product(operator="int8_weight", dtype=dtype, bias=dtype == "fp16", **common),
                    Product(operator="fp8_weight", dtype=dtype, per_tensor=dtype != "fp16", **common),
                    Product(operator="int4_weight", dtype=dtype, group=32, zero=dtype != "fp16", bias=dtype == "bf16", **common),
                    Product(operator="int4_weight", dtype=dtype, group=512, **common),
                ]
    return found


class Recorder:
    """Takes a launch's place and keeps what it was given."""

    def __init__(self) -> None:
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            self.args, self.kwargs = args, kwargs

        return run


def launch(product: Product, device: str = "cpu") -> None:
    """Calls the operator's own launch with tensors of these sizes."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[product.dtype]
    x = torch.zeros(product.rows, product.columns, dtype=dtype, device=device)
    bias = torch.zeros(product.outputs, dtype=dtype, device=device) if product.bias else None
    scale = torch.ones((1 if product.per_tensor else product.outputs, 1), device=device)
    module = importlib.import_module(f"optforge.kernels.{product.operator}")
    if product.operator == "int4_weight":
        groups = -(-product.columns // product.group)
        weight = torch.zeros(product.outputs, -(-product.columns // 2), dtype=torch.uint8, device=device)
        zero = torch.zeros(product.outputs, groups, dtype=torch.uint8, device=device) if product.zero else None
        module._launch(x, weight, torch.ones(product.outputs, groups, device=device), zero, bias, product.group)
    elif product.operator == "fp8_weight":
        weight = torch.zeros(product.outputs, product.columns, dtype=torch.uint8, device=device)
        module._launch(x, weight, scale, bias, OCP.name)
    else:
        weight = torch.zeros(product.outputs, product.columns, dtype=torch.int8, device=device)
        module._launch(x, weight, scale, bias)


def as_source(kernel: Any, signature: dict[str, str], constants: dict[Any, Any], attributes: dict[Any, Any]) -> tuple[Any, ...]:
    """Comparable: what `triton.compiler.ASTSource` is made of."""
    return (
        kernel.fn.__name__,
        dict(signature),
        {key: int(value) for key, value in constants.items()},
        {k: v for k, v in attributes.items() if v},
    )


@pytest.mark.parametrize("arch", ARCHES)
def test_what_is_declared_is_what_tritons_launcher_makes_of_a_launch(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch's arguments go through Triton's own binder, which is what decides the compilation on a device."""
    recorders = {name: Recorder() for name in weight_only.KERNELS}
    kernels = dict(weight_only.KERNELS)
    monkeypatch.setattr(weight_only, "KERNELS", recorders)
    backend = make_backend(compiler.target(arch))
    binders = {name: create_function_from_signature(kernel.signature, kernel.params, backend) for name, kernel in kernels.items()}
    seen = set()
    for product in forms():
        launch(product)
        configuration = declared(product)
        kernel, recorded = kernels[configuration.name], recorders[configuration.name]
        bound, specialization, options = binders[configuration.name](*recorded.args, **recorded.kwargs)
        _, signature, constants, attributes = kernel._pack_args(backend, dict(recorded.kwargs), bound, specialization, options)
        ours = compiler.source(configuration, arch)
        assert as_source(kernel, ours.signature, ours.constants, ours.attrs) == as_source(kernel, signature, constants, attributes), product
        assert options == dict(configuration.options), "options that the launch sets must be declared"
        seen.add(configuration.name)
    assert seen == set(kernels)


def test_large_storages_are_declared_without_32_bit_offsets() -> None:
    small = declared(Product(operator="int8_weight", dtype="bf16", rows=1, outputs=32768, columns=65535))
    large = declared(Product(operator="int8_weight", dtype="bf16", rows=1, outputs=32768, columns=65536))
    assert "w_ptr" in small.small and "w_ptr" not in large.small  # 2^31 - 32768 and 2^31 bytes
    assert "x_ptr" in large.small


def test_every_kernel_of_the_package_is_declared() -> None:
    """A kernel that is launched and not declared would be missing from every plan."""
    launched = set()
    for module in pkgutil.iter_modules(optforge.kernels.__path__, "optforge.kernels."):
        found = vars(importlib.import_module(module.name)).values()
        launched |= {f"{kernel.fn.__module__}:{kernel.fn.__name__}" for kernel in found if isinstance(kernel, JITFunction)}
    helpers = {name for name in launched if name.partition(":")[2].startswith("_")}
    others = {name for name in launched if name.partition(":")[0].rpartition(".")[2] in OTHERS}
    assert {name.partition(":")[0].rpartition(".")[2] for name in others} == set(OTHERS), "test_fused_compiles.py compiles these"
    assert launched - helpers - others == {declared(product).kernel for product in forms()}
    assert {product.operator for product in forms()} == set(DECLARED)


@pytest.mark.gpu
def test_on_a_device_a_launch_compiles_what_is_declared_and_gets_what_was_foretold(tmp_path: Any, monkeypatch: Any) -> None:
    """Signature, constants and attributes of the real compilation, then its registers, spills and shared memory."""
    from triton import knobs

    monkeypatch.setenv("OPTFORGE_CACHE", str(tmp_path))
    major, minor = torch.cuda.get_device_capability()
    arch = str(torch.cuda.get_device_properties(0).gcnArchName).partition(":")[0] if torch.version.hip else f"sm_{major}{minor}"
    products = [product for product in forms() if product.columns == 512 and product.rows in (1, 16, 256) and product.dtype != "fp16"]
    foretold = cross_compile.compile_all([(declared(product), arch) for product in products])
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **said: asked.append(said["compile"]))
    for product, expected in zip(products, foretold, strict=True):
        configuration = declared(product)
        kernel = weight_only.KERNELS[configuration.name]
        kernel.device_caches.clear()
        asked.clear()
        launch(product, "cuda")
        torch.cuda.synchronize()
        (compiled,) = asked
        ours = compiler.source(configuration, arch)
        real = as_source(kernel, compiled["signature"], compiled["constants"], compiled["configs"][0])
        assert as_source(kernel, ours.signature, ours.constants, ours.attrs) == real, product
        (built,) = kernel.device_caches[torch.cuda.current_device()][0].values()
        found = (built.n_regs, built.n_spills, built.metadata.shared)
        assert found == (expected.registers, expected.spills, expected.shared_memory_bytes), product
