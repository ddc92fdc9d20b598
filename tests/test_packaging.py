"""The package as a stranger gets it: built, installed into a clean environment, used from another folder.

The heavy dependencies are lent by the environment of the tests; OptForge itself must come from the built file alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULE = """\
import torch
from torch import nn

def build():
    return nn.Linear(8, 8), torch.zeros(2, 8)
"""
SMALL_RUN = ("recipe=baseline", "hardware=cpu", "model=module", "model.factory=small_module:build", "workload=forward", "data=inputs")


def _run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sdist and wheel; the wheel is built from the unpacked sdist, as installers do."""
    folder = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module", params=["*.whl", "*.tar.gz"], ids=["wheel", "sdist"])
def installed(request: pytest.FixtureRequest, dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The `bin` folder of an environment that holds nothing but this one built file."""
    built = next(dist.glob(request.param))
    venv = tmp_path_factory.mktemp("venv")
    _run(sys.executable, "-m", "venv", venv, cwd=venv)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))
    # a plain path in a .pth file comes after the environment's own packages, and its own .pth files, such as that of
    # an editable install, are not read
    (site / "lent.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    _run(
        venv / "bin/python",
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--ignore-installed",
        built,
        cwd=venv,
    )
    yield venv / "bin"


def _clean_environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "HYDRA"))}
    return {**kept, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}


def test_every_entry_point_names_a_file_that_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    addresses = [*project["scripts"].values(), *(value for group in project["entry-points"].values() for value in group.values())]
    for address in addresses:
        module, attribute = address.split(":")
        path = ROOT.joinpath(*module.split("."))
        file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        assert attribute in file.read_text(encoding="utf-8"), address


@pytest.mark.slow
@pytest.mark.case("B129")
def test_b129_wheel_and_sdist_hold_every_config(dist: Path) -> None:
    configs = {path.relative_to(ROOT).as_posix() for folder in ("conf", "recipes") for path in (ROOT / folder).rglob("*.yaml")}
    assert configs
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    assert {f"optforge/{name}" for name in configs} <= names
    assert {"optforge/py.typed", "hydra_plugins/optforge_launcher/launcher.py"} <= names
    assert "hydra_plugins/__init__.py" not in names  # a namespace that other distributions share
    assert not any(name.startswith(("tests/", "conf/", "recipes/")) for name in names)
    with tarfile.open(next(dist.glob("*.tar.gz"))) as sdist:
        members = {name.split("/", 1)[-1] for name in sdist.getnames()}
    assert configs <= members
    assert {"LICENSE", "README.md", "Makefile", "constraints.txt"} <= members


@pytest.mark.slow
@pytest.mark.case("B129")
def test_b129_installed_files_are_the_built_ones(installed: Path, tmp_path: Path) -> None:
    env = _clean_environment(tmp_path)
    done = _run(installed / "python", "-c", "import optforge; print(optforge.__file__)", cwd=tmp_path, env=env)
    assert Path(done.stdout.strip()).is_relative_to(installed.parent)


@pytest.mark.slow
@pytest.mark.case("B129")
def test_b129_installed_package_lists_every_recipe_from_another_folder(installed: Path, tmp_path: Path) -> None:
    done = _run(installed / "optforge", "list", "recipes", cwd=tmp_path, env=_clean_environment(tmp_path))
    listed = {line.split()[0] for line in done.stdout.splitlines()}
    assert listed == {path.stem for path in (ROOT / "recipes").glob("*.yaml")}


@pytest.mark.slow
@pytest.mark.case("B129")
def test_b129_installed_package_runs_from_another_folder(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "small_module.py").write_text(MODULE, encoding="utf-8")
    env = {**_clean_environment(tmp_path), "PYTHONPATH": str(tmp_path)}
    _run(installed / "optforge", "run", *SMALL_RUN, "measure.max_s=0.5", cwd=tmp_path, env=env)
    reports = list((tmp_path / "outputs").rglob("report.json"))
    assert len(reports) == 1
    assert json.loads(reports[0].read_text(encoding="utf-8"))["status"] == "complete"
