"""Where exports are written: whole or not at all, over nothing that is not theirs."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from subjects import subject
from torch import nn

from optforge import atomic, spec
from optforge.config import build
from optforge.errors import ConfigError, MissingDependency, OutputError
from optforge.export import FORMATS, check, export, require
from optforge.export.write import require_place
from optforge.models.base import Loaded

HERE = Path(__file__).parent


def toy(seed: int = 0) -> Loaded:
    torch.manual_seed(seed)
    return Loaded(module=nn.Linear(64, 64).eval(), family="module", name="toy", example=((torch.randn(2, 64),), {}))


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fresh process: what is tested here is where files go, and the check has tests of its own."""
    figures = {"relative_error": 0.0, "allowed": 1e-3, "sizes": []}
    monkeypatch.setattr(check, "reloaded", lambda folder, written, given: figures)


def test_names_are_the_same_wherever_they_stand() -> None:
    assert tuple(FORMATS) == spec.EXPORT_FORMATS
    (choices, _) = get_args(get_type_hints(build.Settings)["export"])
    assert get_args(choices) == spec.EXPORT_FORMATS


def test_unknown_formats_and_missing_packages_are_told_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'onx' is no format; did you mean onnx\?"):
        require(["onx"])
    monkeypatch.setattr("optforge.export.formats.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"needs onnx, onnxscript, onnxruntime.*pip install 'optforge\[export\]'"):
        require(["onnx"])


@pytest.mark.case("B84")
def test_b84_a_device_node_is_never_written_to() -> None:
    with pytest.raises(OutputError, match="is a device, and an export is a folder"):
        require_place(Path("/dev/null"))
    assert Path("/dev/null").is_char_device()


def test_files_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(OutputError, match="is a file"):
        require_place(file)
    with pytest.raises(OutputError, match="holds files that no export wrote"):
        require_place(tmp_path)
    assert file.read_text() == "mine"


def test_what_an_export_reads_is_not_written_over(tmp_path: Path) -> None:
    artifact = tmp_path / "run/artifact"
    artifact.mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(artifact)
    for place in (artifact, artifact / "below", tmp_path / "run", link):
        with pytest.raises(OutputError, match="which the export reads"):
            require_place(place, (artifact,))
    require_place(tmp_path / "run/export/onnx", (artifact,))


@pytest.mark.usefixtures("unchecked")
def test_an_older_export_is_replaced_and_its_record_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for seed in (0, 1):
        record = export(subject(toy(seed), facts={"model": f"seed {seed}"}), "torch_export", out)
    written = json.loads((out / "export.json").read_text())
    assert written["model"] == "seed 1"
    assert written["check"]["relative_error"] <= written["check"]["allowed"]
    assert set(written["files"]) == {"model.pt2"}
    assert {"path": str(out), **written} == record
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.case("B84")
@pytest.mark.usefixtures("unchecked")
def test_b84_a_full_volume_is_told_and_leaves_the_old_export(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(subject(toy()), "torch_export", out)
    before = (out / "export.json").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OutputError, match=r"out: cannot be written.*needs [\d,]+ bytes, [\d,]+ bytes are free"):
            export(subject(toy(1)), "torch_export", out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert (out / "export.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


KILLED = """
import sys, time
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from test_export_places import toy
from subjects import subject
from optforge.export import check, export
def wait(folder, written, given):
    print("ready", flush=True)
    time.sleep(60)
check.reloaded = wait
export(subject(toy(1)), "torch_export", Path(sys.argv[1]))
"""


@pytest.mark.case("B82")
@pytest.mark.usefixtures("unchecked")
def test_b82_a_kill_before_the_check_has_passed_leaves_the_old_export(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(subject(toy(), facts={"model": "old"}), "torch_export", out)
    command = [sys.executable, "-c", KILLED, str(out), str(HERE), str(HERE.parent)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert writer.stdout is not None and writer.stdout.readline().strip() == "ready"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert list(tmp_path.glob(f".out{atomic.TEMPORARY}*"))
    assert json.loads((out / "export.json").read_text())["model"] == "old"
    export(subject(toy(1), facts={"model": "new"}), "torch_export", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert json.loads((out / "export.json").read_text())["model"] == "new"


@pytest.mark.case("B84")
def test_a_second_writer_of_a_folder_leaves_the_first_alone_and_takes_away_what_a_killed_one_left(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as alive:
        living, dead = (tmp_path / f".out{atomic.TEMPORARY}{pid}" for pid in (alive.pid, 2**22 + 1))  # Linux gives no number above 2^22
        living.mkdir()
        dead.mkdir()
        with atomic.folder(tmp_path / "out", 0) as own:
            (own / "file").write_text("whole")
        assert living.is_dir() and not dead.exists()
        alive.communicate(b"\n")
    assert atomic.remove_stale(tmp_path, "out") == [living.name]
    assert (tmp_path / "out" / "file").read_text() == "whole"
