"""`show`, `list` and `version`, as a person and as a script read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from commandline import Optforge

from optforge import __version__

ROOT = Path(__file__).parents[2]


def test_version(optforge: Optforge) -> None:
    assert optforge("version").stdout == f"{__version__}\n"


@pytest.mark.parametrize(
    ("noun", "files"),
    [
        ("recipes", "recipes/*.yaml"),
        ("hardware", "conf/hardware/*.yaml"),
        ("models", "conf/model/*.yaml"),
        ("workloads", "conf/workload/*.yaml"),
        ("data", "conf/data/*.yaml"),
    ],
)
def test_list_names_every_file_with_a_description(optforge: Optforge, noun: str, files: str) -> None:
    done = optforge("list", noun)
    rows = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert {row[0] for row in rows} == {path.stem for path in ROOT.glob(files)}
    assert all(len(row) == 2 for row in rows), done.stdout
    assert "\x1b" not in done.stdout


def test_list_transforms_names_every_option(optforge: Optforge) -> None:
    rows = json.loads(optforge("list", "transforms", "--json").stdout)
    folder = ROOT / "conf/transform"
    assert {row["name"] for row in rows} == {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")}
    assert all(row["description"] for row in rows)


def test_list_backends_reads_descriptions_without_loading_them(optforge: Optforge) -> None:
    rows = json.loads(optforge("list", "backends", "--json").stdout)
    assert {"cpu", "nvidia"} <= {row["name"] for row in rows}
    assert all(row["description"].endswith(".") for row in rows)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["list"], "error: optforge list: needs to know what to list; type one of recipes, transforms, "),
        (["list", "recipe"], "error: optforge list: cannot list 'recipe'; did you mean recipes?"),
        (["list", "--jsn"], "error: optforge list: No such option: --jsn"),
        (["rnu"], "error: optforge: No such command 'rnu'. Did you mean 'run'?; see optforge --help"),
        (["run", "--add"], "error: optforge: Option '--add' requires an argument; see optforge --help"),
        (["show", "-m", "recipe=baseline,llama_int8"], "error: -m: does not go with show, which prints one run; "),
        (["show", "recipe=baseline", "--cfg", "job"], "error: --cfg: does not go with show, which prints one run; "),
    ],
)
def test_a_wrong_command_is_one_line_without_a_frame(optforge: Optforge, typed: list[str], told: str) -> None:
    done = optforge(*typed)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(told)


def test_no_command_is_the_help_and_exit_code_2(optforge: Optforge) -> None:
    done = optforge()
    assert (done.returncode, done.stderr) == (2, "")
    assert "doctor" in done.stdout


def test_flags_show_no_value_in_the_help(optforge: Optforge) -> None:
    """Typer puts `<bool>` beside every flag, which reads as if a value had to follow."""
    texts = [optforge(name, "--help").stdout for name in ("run", "show", "list", "doctor")]
    assert all("--debug" in text for text in texts)
    assert not [line for text in texts for line in text.splitlines() if "<bool>" in line and "--help" not in line]


def test_show_prints_nothing_but_yaml_that_gives_the_same_run(optforge: Optforge, recipe: str, tmp_path: Path) -> None:
    first = optforge("show", recipe, "hardware=a100", "workload.batch_size=3", "seed=7")
    assert first.returncode == 0, first.stderr
    resolved = yaml.safe_load(first.stdout)
    assert (resolved["workload"]["batch_size"], resolved["seed"], resolved["recipe"]["name"]) == (3, 7, "tiny")
    (tmp_path / "run.yaml").write_text(first.stdout, encoding="utf-8")
    (tmp_path / "tiny.yaml").unlink()
    second = optforge("show", "--config", "run.yaml")
    assert second.stdout == first.stdout
    changed = optforge("show", "--config", "run.yaml", "workload.batch_size=5")
    assert yaml.safe_load(changed.stdout) == {**resolved, "workload": {**resolved["workload"], "batch_size": 5}}


def test_show_takes_the_options_that_need_no_quotes(optforge: Optforge, recipe: str) -> None:
    done = optforge("show", recipe, "--set", "compile.fullgraph=true", "--add", "cast=precision/bf16")
    assert done.returncode == 0, done.stderr
    steps = yaml.safe_load(done.stdout)["recipe"]["steps"]
    assert steps["compile"]["fullgraph"] is True
    assert steps["cast"]["use"] == "precision/bf16"
    dropped = optforge("show", recipe, "--drop", "compile", "--add", "cast=precision/bf16")
    assert set(yaml.safe_load(dropped.stdout)["recipe"]["steps"]) == {"cast"}


def test_origins_say_where_each_value_came_from(optforge: Optforge, recipe: str) -> None:
    done = optforge("show", "--origins", recipe, "hardware=a100", "workload.batch_size=3")
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert "3" in rows["workload.batch_size"].split()
    assert rows["workload.batch_size"].endswith("command line")
    assert rows["seed"].endswith("config.yaml")
    assert rows["recipe.steps.compile.use"].endswith("tiny.yaml")
