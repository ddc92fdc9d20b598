"""The first checks of a run: folder, space, compiler cache."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from optforge import preflight
from optforge.errors import OutputError

NOW = datetime(2026, 3, 4, 5, 6, 7)
NOBODY = 65534


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine whose compiler caches lie in a folder of the test's own."""
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield tmp_path


@pytest.fixture
def read_only_folder() -> Iterator[Path]:
    """A folder with mode 0555, under the rights of a user whom permission bits stop, which they do not do to root."""
    folder = Path(tempfile.mkdtemp(prefix="optforge-readonly-"))
    folder.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield folder
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)
        folder.rmdir()


@pytest.mark.case("B143")
def test_b143_runs_of_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    folders = [preflight.run_folder(tmp_path, "llama_fp8", "a100", NOW) for _ in range(3)]
    assert [folder.relative_to(tmp_path).as_posix() for folder in folders] == [
        "llama_fp8/a100/2026-03-04_05-06-07",
        "llama_fp8/a100/2026-03-04_05-06-07-2",
        "llama_fp8/a100/2026-03-04_05-06-07-3",
    ]


@pytest.mark.case("B143")
def test_b143_four_processes_at_once_get_four_folders(tmp_path: Path) -> None:
    code = (
        "import sys; from datetime import datetime; from pathlib import Path; from optforge import preflight;"
        "print(preflight.run_folder(Path(sys.argv[1]), 'r', 'cpu', datetime(2026, 3, 4, 5, 6, 7)))"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    folders = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert len(folders) == 4
    assert all(Path(folder).is_dir() for folder in folders)


@pytest.mark.case("B88")
def test_b88_proc_is_refused_with_path_reason_and_override() -> None:
    with pytest.raises(OutputError) as caught:
        preflight.claim(Path("/proc/x"))
    line = str(caught.value)
    assert line.startswith("/proc/x: ")
    assert "No such file or directory" in line
    assert "hydra.run.dir=" in line
    assert "\n" not in line


@pytest.mark.case("B88")
def test_b88_a_file_in_the_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    for path in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with pytest.raises(OutputError, match="is a file"):
            preflight.claim(path)
        with pytest.raises(OutputError, match="is a file"):
            preflight.run_folder(path, "r", "cpu", NOW)
    assert (tmp_path / "taken").read_text() == "a file"


@pytest.mark.case("B88")
def test_b88_a_read_only_folder(read_only_folder: Path) -> None:
    with pytest.raises(OutputError, match="Permission denied"):
        preflight.claim(read_only_folder)
    with pytest.raises(OutputError, match="Permission denied"):
        preflight.run_folder(read_only_folder, "r", "cpu", NOW)


def test_claim_leaves_a_folder_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    assert preflight.claim(tmp_path) == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("llama_fp8", "llama_fp8"), ("a/b c", "a-b-c"), ("../..", "unnamed"), ("ü=[1,2]", "1-2"), ("x" * 300, "x" * 80)],
)
def test_folder_names_are_safe(name: str, expected: str) -> None:
    assert preflight.slug(name) == expected


@pytest.mark.case("B84")
def test_b84_space_is_asked_of_the_output_volume_and_both_figures_are_told(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there" / "yet"
    free = preflight.space(path, 1)
    stat = os.statvfs(tmp_path)
    assert free == pytest.approx(stat.f_bavail * stat.f_frsize, rel=0.05)
    with pytest.raises(OutputError, match=r"needs 1048576\.0 TiB, but only .* are free") as caught:
        preflight.space(path, 2**60)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "not").exists()


@pytest.mark.case("B89")
def test_b89_writable_caches_stay_where_they_are(environment: Path) -> None:
    before = dict(os.environ)
    with preflight.compiler_cache(environment / "out") as notes:
        assert notes == []
        assert dict(os.environ) == before
    assert not (environment / "out").exists()


@pytest.mark.case("B89")
def test_b89_no_home_and_no_cache_get_a_private_cache(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc/nonexistent")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/x")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/y")
    with preflight.compiler_cache(environment / "out") as notes:
        assert os.environ["TRITON_CACHE_DIR"] == str(environment / "out/.cache/triton")
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(environment / "out/.cache/torchinductor")
        assert Path(os.environ["TRITON_CACHE_DIR"]).is_dir()
        assert len(notes) == 2
        assert "/proc/x" in notes[0]
    assert os.environ["TRITON_CACHE_DIR"] == "/proc/x"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/proc/y"


@pytest.mark.case("B89")
def test_b89_home_alone_decides_tritons_default(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc/nonexistent")
    with preflight.compiler_cache(environment) as notes:
        assert "TRITON_CACHE_DIR" in os.environ
    assert "TRITON_CACHE_DIR" not in os.environ
    assert len(notes) == 1


@pytest.mark.case("B89")
def test_b89_nothing_can_be_written(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/x")
    with pytest.raises(OutputError, match="export TRITON_CACHE_DIR="), preflight.compiler_cache(Path("/proc/out")):
        pass
