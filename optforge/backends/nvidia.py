"""The NVIDIA backend: how such a device is found, and the counters of its driver.

AMD's build of PyTorch answers as `torch.cuda` too and may report a capability of 9, so the vendor is read from how
PyTorch was built, never from the capability.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from optforge.backends.cuda import CudaBackend
from optforge.measure import nvml
from optforge.spec import Hardware, Json


class NvidiaBackend(CudaBackend):
    """Runs on one NVIDIA GPU; see `Backend` for what each method keeps to."""

    name: ClassVar[str] = "nvidia"

    def detect(self) -> Hardware | None:
        """The device as a profile with its name, arch (`sm_90`) and memory; peaks come from the profile of that name.

        Asks the driver through NVML where it can, since opening a CUDA context would break a later fork.
        """
        if torch.version.hip is not None or torch.version.cuda is None or self.index >= torch.cuda.device_count():
            return None
        found = self._described() or self._opened()
        if found is None:
            return None
        major, minor = found.capability
        return Hardware(
            name=found.name,
            description=found.name,
            backend=self.name,
            arch=f"sm_{major}{minor}",
            memory_bytes=found.memory_bytes,
        )

    def _described(self) -> nvml.Description | None:
        """What NVML says of the device; None where it does not know it, such as a slice of a partitioned one."""
        try:
            return nvml.describe(torch.cuda._get_nvml_device_index(self.index))
        except RuntimeError:
            return None

    def _opened(self) -> nvml.Description | None:
        """The same through a CUDA context, for a machine without NVML; None when the driver refuses one."""
        try:
            properties = torch.cuda.get_device_properties(self.index)
        except (RuntimeError, AssertionError):  # torch's words for: no driver, too old a driver, a broken device
            return None
        return nvml.Description(
            name=properties.name,
            memory_bytes=properties.total_memory,
            capability=(properties.major, properties.minor),
        )

    @property
    def _uuid(self) -> str:
        return f"GPU-{torch.cuda.get_device_properties(self.torch_device()).uuid}"

    def process_bytes(self) -> int | None:
        return nvml.process_bytes(self._uuid)

    def energy_j(self) -> float | None:
        """Joules since the driver was loaded, of the whole board."""
        return nvml.energy_j(self._uuid)

    def environment(self) -> Mapping[str, Json]:
        major, minor = torch.cuda.get_device_capability(self.torch_device())
        return {
            **super().environment(),
            "arch": f"sm_{major}{minor}",
            "driver": nvml.driver_version(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]  # torch ships it untyped
            "power_limit_w": nvml.power_limit_w(self._uuid),
        }
