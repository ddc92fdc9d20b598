"""The CPU backend: its device, its compiler, its global state, what it compiles and takes away."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from optforge import toolchain
from optforge.backends import cpu
from optforge.backends.base import Backend, CompileOptions
from optforge.backends.cpu import CpuBackend
from optforge.errors import PlanError
from optforge.measure import compiles


@pytest.fixture
def backend() -> CpuBackend:
    return CpuBackend()


def test_it_is_a_backend(backend: CpuBackend) -> None:
    assert isinstance(backend, Backend)


def test_detect_says_what_the_machine_says(backend: CpuBackend) -> None:
    found = backend.detect()
    total = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert (found.name, found.backend) == ("cpu", "cpu")
    assert 0 < found.memory_bytes <= total * 1024
    assert dict(found.peak_flops) == {}, "a CPU publishes no peak that this could read"


def test_a_containers_limit_bounds_memory_and_threads(tmp_path: Path) -> None:
    limit, quota = tmp_path / "memory.max", tmp_path / "cpu.max"
    limit.write_text("1048576\n")
    quota.write_text("150000 100000\n")
    assert cpu._memory_bytes(limit) == 1048576
    assert cpu._quota(quota) == 2
    quota.write_text("max 100000\n")
    assert cpu._quota(quota) >= 1


@pytest.mark.case("B92")
@pytest.mark.parametrize(("cxx", "looked"), [("/nonexistent", "CXX=/nonexistent"), (None, "g++, clang++")])
def test_b92_no_compiler_is_said_before_the_run(
    backend: CpuBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cxx: str | None, looked: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if cxx is not None:
        monkeypatch.setenv("CXX", cxx)
    (problem,) = backend.preflight(compiles=True)
    assert str(problem) == f"compile needs a C++ compiler (looked for {looked}); install one or drop the compile step"
    assert backend.preflight(compiles=False) == []


@pytest.mark.case("B92")
def test_b92_a_program_that_is_no_compiler_is_not_one(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert len(backend.preflight(compiles=True)) == 1


def test_clang_alone_is_found_and_given_to_inductor(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clang = tmp_path / "clang++"
    clang.write_text("#!/bin/sh\necho 'clang version 19.1.0'\n")
    clang.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = toolchain.cxx_compiler()
    assert (found.path, found.version) == (str(clang), "clang version 19.1.0")
    from torch._inductor import config

    before = config.cpp.cxx
    with backend.session(0):
        assert config.cpp.cxx == (None, str(clang))
    assert config.cpp.cxx == before


def test_a_session_leaves_no_trace(backend: CpuBackend) -> None:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="in the middle"), backend.session(3):
        first = torch.rand(4)
        assert not torch.is_grad_enabled()
        torch.set_num_threads(threads + 1)
        torch.set_float32_matmul_precision("medium")
        raise RuntimeError("in the middle")
    assert torch.is_grad_enabled()
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (threads, precision)
    assert torch.equal(torch.get_rng_state(), state)
    with backend.session(3):
        assert torch.equal(torch.rand(4), first), "the same seed draws the same numbers"


def test_threads_follow_omp_num_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert cpu.physical_threads() == torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert 1 <= cpu.physical_threads() <= len(os.sched_getaffinity(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


@pytest.mark.usefixtures("fresh_compiler")
def test_compile_keeps_names_and_lift_takes_it_away(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optforge.compiling._arguments", lambda options, more: {"backend": "eager"})  # no C++ for a test of the switch
    model, x = Block(), torch.randn(2, 4)
    names = list(model.state_dict())
    backend.compile(model, CompileOptions())
    with compiles.watch() as seen:
        model(x)
    assert seen.graphs == 1
    assert list(model.state_dict()) == names
    backend.lift(model)
    torch._dynamo.reset()
    with compiles.watch() as seen:
        model(x)
    assert seen.graphs == 0


def test_options_beside_a_mode_reach_inductor_together(backend: CpuBackend) -> None:
    from optforge.compiling import _arguments

    found = _arguments(CompileOptions(mode="max-autotune-no-cudagraphs", options={"epilogue_fusion": False}), {})
    assert "mode" not in found, "torch.compile refuses a mode beside options"
    assert found["options"]["max_autotune"] is True
    assert found["options"]["epilogue_fusion"] is False


def test_an_engine_of_other_hardware_is_refused(backend: CpuBackend) -> None:
    with pytest.raises(PlanError, match="'cudagraphs' does not run on the CPU; use engine: inductor"):
        backend.compile(Block(), CompileOptions(engine="cudagraphs"))


def test_place_keeps_ties(backend: CpuBackend) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    backend.place(model)
    assert model["head"].weight is model["embed"].weight


def test_out_of_memory_is_known_from_other_errors(backend: CpuBackend) -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**55, dtype=torch.uint8)
    assert backend.is_out_of_memory(refused.value)
    assert backend.is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as other:
        torch.randn(2, 3) @ torch.randn(2, 3)
    assert not backend.is_out_of_memory(other.value)


def test_profile_names_the_operator_that_takes_the_time(backend: CpuBackend, tmp_path: Path) -> None:
    a = torch.randn(512, 512)
    trace = tmp_path / "trace.json.gz"
    found = backend.profile(lambda: [a @ a for _ in range(8)], str(trace))
    assert found.operators[0]["name"] == "aten::mm"
    assert found.operators[0]["calls"] == 8
    assert 0.5 < found.operators[0]["share"] <= 1
    assert trace.stat().st_size > 0


def test_environment_says_what_a_figure_needs(backend: CpuBackend) -> None:
    found = backend.environment()
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))), "").split()
    assert found["isa"] == [flag for flag in cpu.ISA_FLAGS if flag in flags]
    assert found["threads"] == torch.get_num_threads()
    assert found["process_memory_counter"] in ("VmHWM", "sampled")


def test_a_session_leaves_pythons_own_generator_alone(backend: CpuBackend) -> None:
    random.seed(0)
    before = random.getstate()
    with backend.session(1):
        pass
    assert random.getstate() == before
