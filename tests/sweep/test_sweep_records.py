"""What a sweep writes down and reads again: records, folder names, and what makes it the same sweep."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from optforge import config, environment
from optforge.errors import ConfigError, UserError
from optforge.spec import Report, Run
from optforge.sweep import definition, names, outcome, store
from optforge.sweep.store import Job, Sweep


def _job(**values: object) -> Job:
    return Job(**{"index": 0, "name": "a", "overrides": ["seed=1"], "folder": "0_a", **values})  # type: ignore[arg-type]


def _run(tmp_path: Path, *overrides: str) -> Run:
    return config.compose(config.parse(["recipe=baseline", "hardware=cpu", *overrides], cwd=tmp_path), cwd=tmp_path)


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    sweep = Sweep(jobs=[_job(), _job(index=1, folder="1_b", status="failed", exit_code=-9, seconds=1.5, error="killed", objective=0.5)])
    (tmp_path / "1_b").mkdir()
    store.write(sweep, tmp_path)
    store.write_status(sweep.jobs[1], tmp_path)
    assert store.read(tmp_path) == sweep == store.read(tmp_path / "sweep.json")
    assert store.read_status(tmp_path / "1_b") == sweep.jobs[1]
    assert json.loads((tmp_path / "sweep.json").read_text(encoding="utf-8"))["schema_version"] == 1
    assert store.is_sweep(tmp_path) and not store.is_sweep(tmp_path / "1_b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no such record"),
        ('{"schema_version": 1', "cannot be read"),
        ('{"schema_version": 2}', "has schema_version 2; this OptForge reads 1"),
        ('{"schema_version": 1, "jobs": [{"index": 0}]}', "jobs.0.name: is missing"),
        ('{"schema_version": 1, "colour": "red"}', "colour: unknown key"),
    ],
)
def test_a_damaged_record_is_refused_in_one_line(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "sweep.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=said) as refused:
        store.read(tmp_path)
    assert len(refused.value.problems) == 1


@pytest.mark.case("B144")
@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["recipe=llama_fp8", "hardware=h200"], "llama_fp8-h200"),
        (["recipe=file/home/me/my%20team.yaml"], "my-team"),
        (["++recipe.steps.weights.group_size=64"], "group_size-64"),
        (["~recipe.steps.compile"], "no-compile"),
        (["++recipe.steps.weights.ignore=[a,b]"], "ignore-a-b"),
        (["++model.path=a/b"], "path-a-b"),
        (["++model.arguments={note: 'ä/..'}"], "arguments-note-6eac35dc"),
        ([], "job"),
    ],
)
def test_b144_a_job_has_a_folder_name_that_says_what_sets_it_apart(overrides: list[str], name: str) -> None:
    assert names.folder_name(12, overrides) == f"12_{name}"


@pytest.mark.case("B144")
def test_b144_long_override_text_makes_a_short_name_of_its_own(tmp_path: Path) -> None:
    long = ["++model.arguments={note: " + "x" * 300 + end + "}" for end in "ab"]
    made = [names.folder_name(1234, [text]) for text in long]
    assert made[0] != made[1]
    for name in made:
        assert len(name.encode()) <= 60
        (tmp_path / name).mkdir()  # one folder, below none
    assert sorted(os.listdir(tmp_path)) == sorted(made)


@pytest.mark.case("B145")
def test_b145_a_changed_definition_is_refused_with_the_keys_that_differ(tmp_path: Path) -> None:
    definition.write(tmp_path, [definition.of(_run(tmp_path, f"seed={seed}")) for seed in (0, 1)])
    definition.require_same(tmp_path, [definition.of(_run(tmp_path, f"seed={seed}")) for seed in (0, 1)])
    changed = [definition.of(_run(tmp_path, f"seed={seed}", "quality.tokens=128")) for seed in (0, 2)]
    with pytest.raises(ConfigError) as refused:
        definition.require_same(tmp_path, changed)
    told = [problem.what for problem in refused.value.problems]
    assert [what.split(" in the sweep")[0] for what in told] == [
        "quality.tokens is 128 in job 0 and was 4096",
        "seed is 2 in job 1 and was 1",
    ]
    with pytest.raises(ConfigError, match="has 2 jobs, this one 1 job"):
        definition.require_same(tmp_path, changed[:1])


@pytest.mark.case("B145")
def test_b145_where_the_output_goes_is_no_part_of_the_definition(tmp_path: Path) -> None:
    assert definition.of(_run(tmp_path, "output_dir=elsewhere")) == definition.of(_run(tmp_path))


@pytest.mark.case("B145")
@pytest.mark.case("B87")
def test_b145_a_result_counts_only_while_versions_and_files_are_what_they_were(tmp_path: Path) -> None:
    weights = tmp_path / "checkpoint"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"first")
    hf = ("model=hf", f"model.path={weights}", "data=random_tokens")
    before = definition.of(_run(tmp_path, *hf))
    good = Report(status="complete", environment={"versions": environment.versions()})
    assert definition.stale(good, before, definition.of(_run(tmp_path, *hf))) is None
    other = {**environment.versions(), "torch": "2.0.0"}
    assert "torch 2.0.0" in str(definition.stale(dataclasses.replace(good, environment={"versions": other}), before, before))
    assert "incomplete" in str(definition.stale(dataclasses.replace(good, status="incomplete"), before, before))
    assert definition.stale(None, before, before) is not None
    (weights / "model.safetensors").write_bytes(b"other")  # the same path, name and size
    os.utime(weights / "model.safetensors", ns=(1, 1))
    assert definition.stale(good, before, definition.of(_run(tmp_path, *hf))) == f"{weights} has changed"


def test_a_damaged_report_is_no_report(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"schema_version": 1, "status": "comp', encoding="utf-8")
    assert definition.finished(tmp_path) is None


@pytest.mark.parametrize(
    ("endings", "code"),
    [
        ([("done", 0), ("done", 0)], 0),
        ([("done", 0), ("done", 3)], 3),
        ([("done", 3), ("failed", 2)], 2),
        ([("failed", 2), ("failed", 1)], 1),
        ([("oom", 1), ("done", 0)], 1),
        ([("timeout", 143), ("done", 0)], 1),
        ([("failed", -9)], 1),
        ([("failed", 1), ("not_started", None)], 1),
    ],
)
def test_the_exit_code_of_a_sweep_comes_from_its_worst_job(endings: list[tuple[str, int | None]], code: int) -> None:
    assert outcome.exit_code([_job(status=status, exit_code=ended) for status, ended in endings]) == code


@pytest.mark.case("B107")
def test_b107_a_job_that_left_nothing_says_how_its_process_ended(tmp_path: Path) -> None:
    killed, left = _job(), _job()
    outcome.conclude(killed, tmp_path, -9)
    outcome.conclude(left, tmp_path, 7)
    assert (killed.status, killed.exit_code, killed.error) == ("failed", -9, "the process was killed by SIGKILL (9)")
    assert (left.status, left.exit_code, left.error) == ("failed", 7, "the process ended with exit code 7 and left no result")
    for_memory = _job()
    outcome.conclude(for_memory, tmp_path, -9, killed_for_memory=True)
    assert for_memory.status == "oom"
