"""The table in docs/kernels.md is what the compilers of the installed Triton say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cross_compile_script", ROOT / "benchmarks" / "cross_compile.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(text: str) -> dict[tuple[str, str], str]:
    """(kernel, arch) -> status and what multiplies; numbers are left out, which another release of the compiler may change."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    start = next(number for number, cells in enumerate(lines) if cells[0] == "kernel")
    arches = lines[start][1:]
    return {(cells[0], arch): verdict(cell) for cells in lines[start + 2 :] for arch, cell in zip(arches, cells[1:], strict=True)}


def verdict(cell: str) -> str:
    if "/" not in cell:
        return cell.partition(" (")[0]
    return "compiled" + {"†": ", ordinary cores", "‡": ", tf32"}.get(cell[-1], "")


def committed() -> dict[tuple[str, str], str]:
    return read((ROOT / "docs" / "kernels.md").read_text(encoding="utf-8"))


def test_the_table_holds_for_two_arches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTFORGE_CACHE", str(tmp_path))
    fresh = read(script().table(["sm_80", "gfx942"], dtypes=["bf16"]))
    assert len(fresh) == 2 * 3 * 4
    assert {key: committed().get(key) for key in fresh} == fresh


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_table_holds_for_every_arch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTFORGE_CACHE", str(tmp_path))
    module = script()
    fresh = read(module.table(list(module.PROFILES)))
    assert len(fresh) == len(module.PROFILES) * 3 * 4 * 3
    assert fresh == committed()


def test_every_gpu_profile_has_a_column() -> None:
    from optforge import config

    columns = {arch for _, arch in committed()}
    for path in sorted((ROOT / "conf" / "hardware").glob("*.yaml")):
        if path.stem in ("auto", "cpu"):
            continue
        profile = config.hardware(path.stem)
        assert profile.backend not in ("nvidia", "amd") or profile.arch in columns, path.stem
