"""`optforge doctor`: what this machine has, what is missing, what that costs, and the command that brings it.

Whatever may crash or hang (importing torch, asking a driver) runs in a process of its own, so that the doctor survives
the patient.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from packaging.requirements import Requirement

from optforge import __version__, isolate, registry, toolchain
from optforge.cli import tables
from optforge.cli.failures import plural
from optforge.errors import EXIT_OK, EXIT_USER, ChildFailed

PROBE_S = 120.0
"""Seconds that one probe may take; importing torch from a cold disk takes most of it."""

PACKAGES = ("torch", "triton", "transformers", "lightning", "hydra-core", "omegaconf", "torchao", "safetensors", "numpy")

EXTRAS = {
    "hf": "GGUF checkpoints cannot be read, the default model smollm2_135m among them",
    "nvidia": "no energy per token and no driver facts on NVIDIA devices",
    "vision": "no photos, so efficientnet_lite0 has no quality figures",
    "thunder": "no `engine: thunder` in compile steps",
    "xla": "plans for TPUs hold no program compiled by XLA, and runs for TPUs are refused",
    "sweep": "no optuna search and no Slurm launcher for sweeps",
    "export": "no compressed-tensors and no ONNX exports, and exports of them cannot be checked",
    "dev": "the test suite, the linters and the package build do not run",
}
"""What the absence of each extra of pyproject.toml costs."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked for. `state` is `ok`, `missing` or `broken`; `cost` and `fix` are empty when it is ok."""

    section: str
    name: str
    state: str
    value: str = ""
    cost: str = ""
    fix: str = ""
    required: bool = False


def doctor_command(*, as_json: bool) -> int:
    """Prints all findings; 2 when something that every run needs is not there."""
    findings = list(_findings())
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    return EXIT_USER if any(finding.required and finding.state != "ok" for finding in findings) else EXIT_OK


def _findings() -> Iterator[Finding]:
    yield Finding(section="versions", name="optforge", state="ok", value=__version__)
    yield Finding(section="versions", name="python", state="ok", value=f"{platform.python_version()} ({sys.executable})")
    yield from map(_package, PACKAGES)
    yield _torch()
    yield from map(_device, registry.names("backends"))
    yield from map(_compiler, ("C++", "C"))
    yield from _extras()
    yield from _assets()


def _package(name: str) -> Finding:
    try:
        return Finding(section="versions", name=name, state="ok", value=version(name))
    except PackageNotFoundError:
        return Finding(
            section="versions", name=name, state="missing", cost="OptForge needs it", fix=f"pip install {name}", required=name != "triton"
        )


def _torch() -> Finding:
    try:
        value = isolate.call(probe_torch, timeout_s=PROBE_S)
    except ChildFailed as error:
        return Finding(
            section="versions",
            name="import torch",
            state="broken",
            value=str(error),
            cost="nothing can run",
            fix="pip install --force-reinstall torch",
            required=True,
        )
    return Finding(section="versions", name="import torch", state="ok", value=value)


def probe_torch() -> str:
    """Runs in a process of its own: what torch was built for."""
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" if torch.version.hip else "CPU only"
    return f"built for {built}, {plural(torch.get_num_threads(), 'thread')}"


def _device(backend: str) -> Finding:
    try:
        found = isolate.call(probe_device, backend, timeout_s=PROBE_S)
    except ChildFailed as error:
        return Finding(
            section="devices",
            name=backend,
            state="broken",
            value=str(error),
            cost=f"runs for {backend} hardware use a stand-in",
            fix="repair what the message names",
            required=backend == "cpu",
        )
    if found is None:
        cost = f"runs for {backend} hardware are planned and predicted, and measured on a stand-in"
        return Finding(section="devices", name=backend, state="missing", cost=cost, fix="run on a machine that has one")
    return Finding(section="devices", name=backend, state="ok", value=found)


def probe_device(backend: str) -> str | None:
    """Runs in a process of its own: the device that a backend finds, in one line."""
    hardware = registry.get("backends", backend)().detect()
    if hardware is None:
        return None
    memory = f", {hardware.memory_bytes / 2**30:.0f} GiB" if hardware.memory_bytes else ""
    return f"{hardware.description or hardware.name} ({hardware.arch}{memory})"


def _compiler(language: str) -> Finding:
    if language == "C++":
        compiler, variable, package = toolchain.cxx_compiler(), "CXX", "g++"
        cost = "compile steps cannot run on the cpu backend"
    else:
        compiler, variable, package = toolchain.cc_compiler(), "CC", "gcc"
        cost = "Triton kernels cannot be launched"
    if compiler.path is not None:
        return Finding(section="compilers", name=language, state="ok", value=f"{compiler.path} ({compiler.version})")
    looked = f"looked for {', '.join(compiler.looked_for)}"
    fix = f"unset {variable}" if variable in os.environ else f"apt-get install {package}"
    return Finding(section="compilers", name=language, state="missing", value=looked, cost=cost, fix=fix)


def _extras() -> Iterator[Finding]:
    for extra, cost in EXTRAS.items():
        absent = [requirement for requirement in extra_requirements(extra) if _absent(requirement.name)]
        yield Finding(
            section="extras",
            name=extra,
            state="missing" if absent else "ok",
            value=f"without {', '.join(requirement.name for requirement in absent)}" if absent else "",
            cost=cost if absent else "",
            fix=f"pip install {shlex.join(f'{r.name}{r.specifier}' for r in absent)}" if absent else "",
        )


def extra_requirements(extra: str) -> list[Requirement]:
    """What an extra brings, from the installed package's own metadata."""
    parsed = map(Requirement, requires("optforge") or [])
    return [r for r in parsed if r.marker and r.marker.evaluate({"extra": extra}) and not r.marker.evaluate({"extra": ""})]


def _absent(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return True
    return False


def _assets() -> Iterator[Finding]:
    from optforge import fetch

    for name, asset in fetch.ASSETS.items():
        folder = fetch.find(name)
        if folder is not None:
            yield Finding(section="models and data", name=name, state="ok", value=asset.what)
        else:
            cost = f"no figures on {asset.what}"
            yield Finding(section="models and data", name=name, state="missing", cost=cost, fix=fetch.command(name))


def _print(findings: list[Finding]) -> None:
    for section in dict.fromkeys(finding.section for finding in findings):
        rows: list[tuple[Any, ...]] = [
            (finding.name, finding.state, _explained(finding)) for finding in findings if finding.section == section
        ]
        tables.show(rows, title=section)


def _explained(finding: Finding) -> str:
    """`what was found; what its absence costs; what to type`."""
    return "; ".join(filter(None, (finding.value, finding.cost, finding.fix and f"to get it: {finding.fix}")))
