"""The NVIDIA backend without a device (fakes that record arguments), and on one (`-m gpu`)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from optforge.backends.base import Backend, Candidate, CompileOptions
from optforge.backends.nvidia import NvidiaBackend
from optforge.measure import nvml
from optforge.measure.size import weight_bytes
from optforge.spec import Measure


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine whose `torch.cuda` answers with one device of capability 9, as Hopper does and MI350 under ROCm too."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 5))
    monkeypatch.setattr(torch.cuda, "_get_nvml_device_index", lambda index: index)
    monkeypatch.setattr(nvml, "describe", lambda index: nvml.Description(name="NVIDIA H200", memory_bytes=141 * 10**9, capability=(9, 0)))
    return monkeypatch


def test_it_is_a_backend() -> None:
    assert isinstance(NvidiaBackend(), Backend)


def test_a_device_is_described_by_name_arch_and_memory(one_device: pytest.MonkeyPatch) -> None:
    found = NvidiaBackend().detect()
    assert found is not None
    assert (found.name, found.backend, found.arch, found.memory_bytes) == ("NVIDIA H200", "nvidia", "sm_90", 141 * 10**9)


@pytest.mark.case("B41")
@pytest.mark.parametrize("cuda", [None, "12.8"])
def test_b41_a_rocm_build_is_not_nvidia_whatever_its_capability(one_device: pytest.MonkeyPatch, cuda: str | None) -> None:
    one_device.setattr(torch.version, "hip", "6.2")
    one_device.setattr(torch.version, "cuda", cuda)
    assert NvidiaBackend().detect() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_no_device_is_none_and_a_problem() -> None:
    assert NvidiaBackend().detect() is None
    (problem, *_) = NvidiaBackend().preflight(compiles=False)
    assert str(problem) == "hardware: there is no usable nvidia device here; hardware=auto"


def test_a_rank_takes_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert NvidiaBackend().torch_device() == torch.device("cuda", 3)
    assert NvidiaBackend(index=1).torch_device() == torch.device("cuda", 1)


class FakeParameter:
    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


class FakeModel:
    """A model that lies on cuda:1, in a machine that has no such device."""

    def parameters(self):
        return iter([FakeParameter("cuda:1")])

    def to(self, device: torch.device):
        self.moved_to = device
        return self


@pytest.mark.case("B99")
def test_b99_the_models_own_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    backend = NvidiaBackend()
    backend.synchronize()
    model = FakeModel()
    backend.place(model)  # type: ignore[arg-type]  # a stand-in with the two methods that place uses
    backend.synchronize()
    assert waited == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert model.moved_to == torch.device("cuda", 1)


@pytest.mark.case("B102")
def test_b102_every_counter_is_read_and_reset_on_that_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 1)
    log: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda d: log.append(("reset", d)))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda d: log.append(("allocated", d)) or 1)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda d: log.append(("reserved", d)) or 2)
    backend = NvidiaBackend(index=1)
    monkeypatch.setattr(NvidiaBackend, "process_bytes", lambda self: None)
    backend.reset_memory()
    assert backend.memory() == {"allocated": 1, "reserved": 2, "process": None}
    assert log == [("reset", device), ("allocated", device), ("reserved", device)]


def test_out_of_memory_is_known_from_other_errors() -> None:
    backend = NvidiaBackend()
    assert backend.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert backend.is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"))
    assert not backend.is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_looking_for_a_device_opens_no_context() -> None:
    code = (
        "import torch; from optforge.backends.nvidia import NvidiaBackend; NvidiaBackend().detect();"
        "print(torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork())"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.fixture
def device() -> NvidiaBackend:
    backend = NvidiaBackend()
    if backend.detect() is None:
        pytest.skip("no NVIDIA device")
    return backend


@pytest.mark.gpu
@pytest.mark.case("B103")
def test_b103_resident_weights_stay_in_the_peak_after_a_reset(device: NvidiaBackend) -> None:
    with device.session(0):
        model = device.place(nn.Linear(4096, 4096))
        x = torch.randn(1, 4096, device=device.torch_device())
        device.reset_memory()
        model(x)
        device.synchronize()
        found = device.memory()
    assert found["reserved"] >= found["allocated"] >= weight_bytes(model)
    assert found["process"] is None or found["process"] >= found["reserved"]


@pytest.mark.gpu
@pytest.mark.case("B102")
def test_b102_a_small_section_after_a_large_one_has_its_own_peak(device: NvidiaBackend) -> None:
    def peak(mebibytes: int) -> int:
        device.reset_memory()
        torch.ones(mebibytes * 2**20, dtype=torch.uint8, device=device.torch_device())
        return device.memory()["allocated"]

    assert [peak(512), peak(16)] == [peak(16), peak(512)][::-1]


@pytest.mark.gpu
@pytest.mark.case("B97")
def test_b97_a_product_takes_at_least_what_the_peak_allows(device: NvidiaBackend) -> None:
    size = 8192
    with device.session(0):
        a = torch.randn(size, size, device=device.torch_device(), dtype=torch.bfloat16)
        found = device.measure(Candidate(name="product", call=lambda: a @ a), None, Measure(max_s=2.0))
    # no device of today multiplies bf16 at more than 5 PFLOP/s; a launch alone would read as 50 and more
    assert found.latency_ms["p50"] > 1e3 * 2 * size**3 / 5e15
    assert found.energy_j is None or found.energy_j > 0


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_blocks_give_the_eager_result(device: NvidiaBackend, mode: str) -> None:
    from optforge.workloads.base import begin_pass

    with device.session(0):
        blocks = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)]).eval()
        device.place(blocks)
        x = torch.randn(8, 64, device=device.torch_device())
        expected = blocks(x).clone()
        for block in blocks:
            device.compile(block, CompileOptions(mode=mode))
        for _ in range(4):
            begin_pass(x.device)
            found = blocks(x).clone()
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
