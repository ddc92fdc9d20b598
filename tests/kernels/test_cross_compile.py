"""Kernels compiled for devices that are not here: what is read off them, and what a compiler that fails costs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("triton")
from optforge import isolate
from optforge.errors import MissingDependency, OutputError
from optforge.kernels import cross_compile
from optforge.kernels.compiler import COMPILED, REFUSED, reason_of
from optforge.kernels.cross_compile import compile_all, compile_for
from optforge.kernels.launches import Configuration, Product, declared


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPTFORGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def product(rows: int, operator: str = "int8_weight", dtype: str = "fp16") -> Configuration:
    return declared(Product(operator=operator, dtype=dtype, rows=rows, outputs=512, columns=512))


def hostile(name: str, x: str = "*fp16", y: str = "*fp16") -> Configuration:
    return Configuration(
        kernel=f"hostile_kernels:{name}",
        label=name,
        signature={"x_ptr": x, "y_ptr": y},
        constants={},
        aligned=("x_ptr", "y_ptr"),
        small=(),
    )


class Counted:
    """Counts what is told of the progress."""

    def __init__(self) -> None:
        self.done = 0

    def stage(self, name: str, total: int | None = None) -> object:
        raise AssertionError("stages are the caller's")

    def advance(self, count: int = 1) -> None:
        self.done += count

    def note(self, text: str) -> None:
        raise AssertionError(text)


def test_registers_and_spills_are_those_that_the_assembler_reports(tmp_path: Path) -> None:
    """Held against `ptxas -v`, which tells them in its own words; the kernel is one that spills."""
    kernel = product(16, dtype="fp32")
    found = compile_for(kernel, "sm_80")
    script = (
        "import sys, triton\nfrom triton import knobs\n"
        "from optforge.kernels.compiler import source, target\nfrom optforge.kernels.launches import *\n"
        "kernel = declared(Product(operator='int8_weight', dtype='fp32', rows=16, outputs=512, columns=512))\n"
        "open(sys.argv[1], 'w').write(triton.compile(source(kernel, 'sm_80'), target=target('sm_80')).asm['ptx'])\n"
        "print(knobs.nvidia.ptxas.path)"
    )
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "triton")}
    ptx = tmp_path / "kernel.ptx"
    ptxas = subprocess.run([sys.executable, "-c", script, str(ptx)], capture_output=True, text=True, check=True, env=environment).stdout
    command = [ptxas.strip(), "-v", "-lineinfo", "--regAllocOptLevel=2", "--gpu-name=sm_80", str(ptx), "-o", str(tmp_path / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, stack = (int(re.search(pattern, said)[1]) for pattern in (r"Used (\d+) registers", r"(\d+) bytes stack frame"))
    assert stack > 0, said
    assert (found.status, found.registers, found.spills, found.units) == (COMPILED, registers, stack // 4, "ordinary")


def test_fp16_uses_the_matrix_units_where_triton_does() -> None:
    arches = ("sm_80", "sm_90", "gfx942", "sm_75")
    found = compile_all([(product(128), arch) for arch in arches])
    # Triton multiplies on the ordinary cores below sm_80 since 3.3 (triton-lang/triton#5066)
    assert [(result.arch, result.status, result.units) for result in found] == [
        ("sm_80", COMPILED, "matrix"),
        ("sm_90", COMPILED, "matrix"),
        ("gfx942", COMPILED, "matrix"),
        ("sm_75", COMPILED, "ordinary"),
    ]
    assert all(result.warps == 4 and result.registers and result.shared_memory_bytes and result.seconds for result in found)
    assert compile_for(product(1), "sm_80").units is None, "a kernel without a product"


def test_a_refusal_is_the_compilers_own_line() -> None:
    old, new = compile_all([(hostile("fp8_kernel", y="*fp8e4nv"), arch) for arch in ("sm_80", "sm_90")])
    assert old.status == REFUSED and "fp8e4nv not supported" in old.reason and "\n" not in old.reason
    assert old.registers is None and old.shared_memory_bytes is None
    assert new.status == COMPILED and new.reason == ""


def test_a_compiler_that_aborts_costs_its_kernel_alone_and_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM ends the process where it finds no instruction: no warp shuffle before sm_30."""
    jobs = [
        (product(1), "sm_20"),
        (product(1), "sm_80"),
        (product(2, "fp8_weight"), "sm_20"),
        (product(16), "sm_20"),
        (product(1), "sm_90"),
    ]
    jobs.append(jobs[1])
    counted = Counted()
    found = compile_all(jobs, counted)
    assert [result.status for result in found] == [REFUSED, COMPILED, REFUSED, REFUSED, COMPILED, COMPILED]
    assert found[0].reason.startswith("LLVM ERROR: ") and "SIGABRT" in found[0].reason
    assert found[3].reason.startswith("ptxas fatal") and "sm_20" in found[3].reason
    assert counted.done == len(jobs)
    monkeypatch.setattr(isolate, "call", None)  # nothing may be started
    assert compile_all(jobs) == found


def test_a_kernel_that_never_ends_is_stopped_and_not_remembered(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(cross_compile, "LIMIT_S", 3)
    found = compile_for(hostile("endless_kernel"), "sm_80")
    assert (found.status, found.reason) == (REFUSED, "the compiler was still at work after 3 s")
    assert list((cache / "kernels").iterdir()) == [], "another machine may be faster"


def test_shared_memory_is_what_the_tiles_take() -> None:
    found = compile_for(hostile("wide_kernel"), "sm_90")
    assert found.status == COMPILED
    assert found.shared_memory_bytes is not None and found.shared_memory_bytes >= 256 * 256 * 2


def test_a_damaged_result_and_a_changed_source_are_compiled_again(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "elsewhere"
    package.mkdir()
    module = package / "changing_kernels.py"
    text = Path(__file__).with_name("hostile_kernels.py").read_text()
    module.write_text(text)
    monkeypatch.syspath_prepend(str(package))
    kernel = Configuration(
        kernel="changing_kernels:fp8_kernel",
        label="",
        signature={"x_ptr": "*fp16", "y_ptr": "*fp16"},
        constants={},
        aligned=(),
        small=(),
    )
    assert compile_for(kernel, "sm_80").status == REFUSED
    (kept,) = (cache / "kernels").iterdir()
    kept.write_text("{")
    assert compile_for(kernel, "sm_80").status == REFUSED
    module.write_text(text.replace("tl.float8e4nv", "tl.float16"))
    assert compile_for(kernel, "sm_80").status == COMPILED
    assert len(list((cache / "kernels").iterdir())) == 2


def test_the_plans_own_process_loads_neither_triton_nor_torch() -> None:
    script = (
        "import sys\nfrom optforge.kernels.cross_compile import compile_for\nfrom optforge.kernels.launches import *\n"
        "found = compile_for(declared(Product(operator='fp8_weight', dtype='bf16', rows=1, outputs=64, columns=64)), 'gfx950')\n"
        "print(found.status, sorted({'torch', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "compiled []", done.stderr


def test_an_interrupt_ends_it_after_the_kernels_at_work() -> None:
    script = (
        "from optforge.kernels.cross_compile import compile_all\nfrom optforge.kernels.launches import *\n"
        "kernels = [declared(Product(operator='int8_weight', dtype='fp32', rows=r, outputs=512, columns=512)) for r in (256, 250)]\n"
        "print('begin', flush=True)\n"
        "compile_all([(kernel, arch) for kernel in kernels for arch in ('sm_80', 'sm_86', 'sm_89', 'sm_90', 'sm_120') * 2])"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begin\n"
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode not in (0, None) and "KeyboardInterrupt" in said
    kept = list((cross_compile.cache_dir() / "kernels").iterdir())
    assert len(kept) < 10 and not [path for path in kept if path.is_dir()], "all were compiled, or working folders stayed"


def test_without_triton_it_says_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_compile, "triton_version", lambda: None)
    with pytest.raises(MissingDependency, match="pip install triton"):
        compile_for(product(1), "sm_80")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPTFORGE_CACHE", str(tmp_path / "file"))
    with pytest.raises(OutputError, match="OPTFORGE_CACHE"):
        compile_for(product(1), "sm_80")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("noise\nLLVM ERROR: Cannot select: intrinsic\nmore", "LLVM ERROR: Cannot select: intrinsic"),
        ("`ptxas` stderr:\nptxas fatal   : Value 'sm_20' is not defined", "ptxas fatal   : Value 'sm_20' is not defined"),
        ("k.py:3:4: error: operand too large\nnote: x", "operand too large"),
        ("nothing of the kind", "RuntimeError: PassManager::run failed"),
    ],
)
def test_the_line_that_tells_why(text: str, expected: str) -> None:
    assert reason_of(RuntimeError("PassManager::run failed"), text) == expected
