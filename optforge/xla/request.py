"""What goes to the process that compiles, and what comes back: plain data that loads neither torch nor jax."""

from __future__ import annotations

from dataclasses import dataclass, field

from optforge.data.base import DataSource
from optforge.models.base import ModelSource
from optforge.transforms.base import Receipt, Transform
from optforge.workloads.base import Workload

PACKAGES = ("jax", "torchax", "libtpu")
"""What the extra `xla` brings and the compile imports."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A set of chips as libtpu knows it. The program is compiled for one device of it."""

    name: str
    chip_config: str | None = None
    """libtpu's name of a mode of the chip; `megacore` makes the two cores of a chip one device."""
    devices_per_chip: int = 1


TOPOLOGIES = {
    "v4": Topology(name="v4:2x2x1", chip_config="megacore"),
    "v5e": Topology(name="v5e:2x2"),
    "v5p": Topology(name="v5p:2x2x1"),
    "v6e": Topology(name="v6e:2x2"),
    "tpu7x": Topology(name="tpu7x:2x2x1", devices_per_chip=2),
}
"""`arch` of a hardware profile -> the smallest topology that libtpu describes for it."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One program: the model's structure after the recipe's steps, and the pass of the workload over it."""

    model: ModelSource
    workload: Workload
    data: DataSource
    """Never read; workloads take it to make inputs, which on meta have no content."""
    steps: tuple[tuple[Transform, Receipt], ...] = ()
    """The steps that rewrite the module tree, in their order, with what the plan found that they do."""
    topology: Topology


@dataclass(kw_only=True)
class Compiled:
    """What XLA says of the program. `cost` and `memory` carry XLA's own keys, untouched."""

    device: str
    """What libtpu calls the device: `TPU v5 lite`."""
    versions: dict[str, str] = field(default_factory=dict)
    refusal: str | None = None
    """The compiler's own words, where it refused the program (it needs more memory than the chip has)."""
    cost: dict[str, float] = field(default_factory=dict)
    """`cost_analysis()` without the entries of single operands: flops, bytes accessed, optimal_seconds, ..."""
    memory: dict[str, int] = field(default_factory=dict)
    """`memory_analysis()`: argument_size_in_bytes, temp_size_in_bytes, ..."""
    seconds: dict[str, float] = field(default_factory=dict)
    """structure, export, lower, compile: what each stage took here."""
    peak_memory_bytes: int = 0
    """The compiling process's own peak."""
    notes: list[str] = field(default_factory=list)
