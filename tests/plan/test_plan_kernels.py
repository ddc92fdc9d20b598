"""The kernels of a pass: which ones, how often, and what became of them on the target."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

pytest.importorskip("triton")
from optforge import config
from optforge.kernels import cross_compile
from optforge.plan import kernels as subject
from optforge.plan.graph import ATTENTION, POINTWISE, PRODUCT, UNKNOWN, Graph, Operator
from optforge.plan.kernels import check, launched, notes

H100 = config.hardware("h100")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTFORGE_CACHE", str(tmp_path_factory.getbasetemp() / "plan_kernels"))


def product(name: str, module: str, *size: int, detail: str = "", dtype: str = "bf16") -> Operator:
    """`size` is rows, outputs, inputs."""
    return Operator(name=name, kind=PRODUCT, module=module, dtype=dtype, size=(1, *size), detail=detail)


def decode_step() -> Graph:
    """Two layers of a small decoder, one row: int8 products of three shapes, int4 ones, a head in bf16, attention, two adds."""
    operators = []
    for layer in ("layers.0", "layers.1"):
        operators += [
            product("optforge.int8_weight", f"{layer}.q", 1, 512, 512),
            product("optforge.int8_weight", f"{layer}.k", 1, 128, 512),
            Operator(name="aten.scaled_dot_product_attention", kind=ATTENTION, module=layer, dtype="bf16", size=(1, 4, 1, 1, 64, 128)),
            product("optforge.int8_weight", f"{layer}.odd", 1, 515, 512),
            product("optforge.int4_weight", f"{layer}.up", 1, 1024, 512, detail="zero,bias,group=64"),
            product("optforge.int4_weight", f"{layer}.down", 1, 512, 1024, detail="group=128"),
            Operator(name="aten.add", kind=POINTWISE, module=layer, dtype="bf16", size=(1, 512)),
        ]
    return Graph(operators=[*operators, product("aten.mm", "lm_head", 1, 32000, 512)])


def test_kernels_are_told_apart_as_the_launcher_does() -> None:
    """q and k differ in sizes alone; an N of 515 is no multiple of 16; int4's two forms differ in constants."""
    found = [(item.kernel, item.count, item.example) for item in launched(decode_step(), H100)]
    assert found == [
        ("matvec_kernel", 4, "layers.0.q"),
        ("aten.scaled_dot_product_attention", 2, "layers.0"),
        ("matvec_kernel", 2, "layers.0.odd"),
        ("matvec_kernel", 2, "layers.0.up"),
        ("matvec_kernel", 2, "layers.0.down"),
        ("aten.mm", 1, "lm_head"),
    ]
    int4 = [
        item.configuration for item in launched(decode_step(), H100) if item.configuration and item.configuration.constants["KIND"] == 2
    ]
    assert [(dict(c.constants)["GROUP"], bool(c.constants["HAS_ZERO"]), bool(c.constants["HAS_BIAS"])) for c in int4] == [
        (64, True, True),
        (128, False, False),
    ]


@pytest.mark.parametrize("name", ["h100", "mi300x"])
def test_each_is_compiled_for_the_target_and_libraries_have_nothing_to_compile(name: str) -> None:
    hardware = config.hardware(name)
    reports = check(launched(decode_step(), hardware), hardware)
    assert [report.status for report in reports] == ["compiled", "library", "compiled", "compiled", "compiled", "library"]
    for report in reports:
        assert report.arch == hardware.arch
        if report.status == "compiled":
            assert report.registers and report.spills == 0 and report.warps == 4 and report.seconds
            assert report.shared_memory_limit == hardware.shared_memory_bytes and 0 < (report.shared_memory_bytes or 0) < 4096
        else:
            assert report.registers is None and report.reason == "nothing to compile"
    assert json.loads(json.dumps([report.describe() for report in reports])) == [asdict(report) for report in reports]


def test_more_shared_memory_than_the_target_has_is_told_with_both_numbers() -> None:
    small = replace(H100, shared_memory_bytes=16384)
    graph = Graph(operators=[product("optforge.int8_weight", "q", 256, 512, 512)])
    (report,) = check(launched(graph, small), small)
    # a tile of 128 x 64 bf16 activations alone takes 16,384 bytes
    assert report.status == "over_shared_memory" and (report.shared_memory_bytes or 0) > 16384
    assert "16,384" in report.reason and f"{report.shared_memory_bytes:,}" in report.reason
    (report,) = check(launched(graph, H100), H100)
    assert (report.status, report.units, report.reason) == ("compiled", "matrix", "")
    unknown = replace(H100, shared_memory_bytes=None)
    (report,) = check(launched(graph, unknown), unknown)
    assert report.status == "compiled" and report.shared_memory_limit is None


def test_a_product_off_the_matrix_units_is_told() -> None:
    t4, b200 = config.hardware("t4"), config.hardware("b200")
    (turing,) = check(launched(Graph(operators=[product("optforge.int8_weight", "q", 16, 512, 512, dtype="fp16")]), t4), t4)
    assert turing.status == "compiled" and "ordinary cores" in turing.reason and "spill" in turing.reason
    (blackwell,) = check(launched(Graph(operators=[product("optforge.int8_weight", "q", 256, 512, 512, dtype="fp32")]), b200), b200)
    assert blackwell.status == "compiled" and "tf32" in blackwell.reason


@pytest.mark.parametrize(("name", "said"), [("cpu", "oneDNN"), ("tpu_v5e", "XLA")])
def test_a_backend_without_triton_kernels_says_so_in_one_line(name: str, said: str) -> None:
    hardware = config.hardware(name)
    assert launched(decode_step(), hardware) == [] and check([], hardware) == []
    (line,) = notes(decode_step(), hardware, compiled=True)
    assert name in line and said in line


def test_without_triton_nothing_is_taken_for_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "triton_version", lambda: None)
    monkeypatch.setattr(cross_compile, "compile_all", None)
    reports = check(launched(decode_step(), H100), H100)
    assert [report.status for report in reports] == ["not_checked", "library", "not_checked", "not_checked", "not_checked", "library"]
    said = notes(decode_step(), H100, compiled=False)
    assert sum("pip install triton" in line for line in said) == 1
    library_only = Graph(operators=[product("aten.mm", "lm_head", 1, 512, 512)])
    assert notes(library_only, H100, compiled=False) == []


def test_what_is_not_checked_is_listed() -> None:
    graph = decode_step()
    (line,) = notes(graph, H100, compiled=True)
    assert "Inductor" in line and "2 small operators" in line
    (line,) = notes(graph, H100, compiled=False)
    assert "PyTorch's own" in line
    graph.operators.append(Operator(name="mylib.magic", kind=UNKNOWN, module="layers.1", dtype="bf16", why="no fake implementation"))
    graph.operators.append(product("optforge.new_weight", "layers.1.q", 1, 512, 512))
    assert [line for line in notes(graph, H100, compiled=True) if "not known" in line] == [
        "not checked: mylib.magic, whose kernel is not known",
        "not checked: optforge.new_weight, whose kernel is not known",
    ]


def test_a_traced_model_launches_one_kernel_for_each_quantized_layer() -> None:
    """From the recipe's transform and the plan's trace, not from a graph made by hand."""
    import torch
    from toys import TinyLM, context

    from optforge.data.inputs import Inputs
    from optforge.models.base import Loaded
    from optforge.plan.trace import trace
    from optforge.transforms.quantize import Quantize, SchemeName
    from optforge.workloads.forward import Forward

    with torch.device("meta"):
        model = TinyLM(layers=3, width=64, heads=4).to(torch.bfloat16).eval()
    ids = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    Quantize(scheme=SchemeName.int4_weight, group_size=32, symmetric=False).apply(model, context())
    graph = trace(Loaded(module=model, family="module", name="tiny", example=((ids,), {})), Forward(), Inputs(), H100)
    own = [item for item in launched(graph, H100) if item.configuration]
    assert sum(item.count for item in own) == 3 * 7 + 1, "seven linears a block, and the head"
    assert {item.kernel for item in own} == {"matmul_kernel"}
    assert all(
        item.configuration.constants["GROUP"] == 32 and item.configuration.constants["HAS_ZERO"] for item in own if item.configuration
    )
    assert {report.status for report in check(launched(graph, H100), H100)} == {"compiled", "library"}
