"""What may be typed after `compare`, and what becomes of runs that ended badly."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleets import CPU, named, read, write

from optforge.compare import compare, load
from optforge.errors import ConfigError
from optforge.sweep import store as sweeps


def _names(arguments: list[str], cwd: Path) -> list[str]:
    return [entry.report.recipe["name"] for entry in load(arguments, cwd=cwd).entries]


def test_a_folder_a_file_and_a_folder_of_folders_mean_runs(tmp_path: Path) -> None:
    write(named("llama_int8"), tmp_path / "outputs/llama_int8/cpu/one")
    write(named("llama_bf16"), tmp_path / "outputs/llama_bf16/cpu/two")
    assert _names(["outputs/llama_int8/cpu/one"], tmp_path) == ["llama_int8"]
    assert _names(["outputs/llama_bf16/cpu/two/report.json"], tmp_path) == ["llama_bf16"]
    assert _names(["outputs"], tmp_path) == ["llama_bf16", "llama_int8"]
    assert _names([str(CPU[0])], tmp_path) == [read(CPU[0])["recipe"]["name"]]


def test_what_is_named_twice_is_taken_once(tmp_path: Path) -> None:
    write(named("llama_int8"), tmp_path / "run")
    assert _names(["run", "run/report.json", str(tmp_path / "run")], tmp_path) == ["llama_int8"]


def test_a_recipe_stands_for_its_newest_finished_run_per_hardware_and_workload(tmp_path: Path) -> None:
    tree = named("llama_int8")
    for day, change in (
        ("01", {}),
        ("03", {"status": "failed", "reason": "broken"}),
        ("02", {}),
        ("04", {"optimized": None, "status": "incomplete"}),
    ):
        write({**tree, **change, "started": f"2026-11-{day}T10:00:00+00:00"}, tmp_path / f"outputs/llama_int8/cpu/{day}")
    longer = {**tree["workload"], "prompt_tokens": 512}
    write({**tree, "workload": longer, "started": "2026-10-01T10:00:00+00:00"}, tmp_path / "outputs/llama_int8/cpu/longer")
    target = {**tree["target"], "name": "a100"}
    write({**tree, "target": target, "started": "2026-09-01T10:00:00+00:00"}, tmp_path / "outputs/llama_int8/a100/old")
    loaded = load(["llama_int8"], cwd=tmp_path)
    assert {entry.path for entry in loaded.entries} == {f"outputs/llama_int8/{name}" for name in ("cpu/02", "cpu/longer", "a100/old")}
    assert any("took outputs/llama_int8/cpu/02" in note for note in loaded.notes)
    assert any("left out 3 older or unfinished" in note for note in loaded.notes)


def test_a_recipe_file_stands_for_the_recipe_in_it(tmp_path: Path) -> None:
    write(named("llama_int8"), tmp_path / "outputs/team/cpu/one")
    (tmp_path / "mine.yaml").write_text("name: team\nsteps: {}\n", encoding="utf-8")
    assert [entry.path for entry in load(["mine.yaml"], cwd=tmp_path).entries] == ["outputs/team/cpu/one"]


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("llama_int8", ["no run under outputs/llama_int8", "type optforge run recipe=llama_int8 hardware=NAME"]),
        ("llama_int9", ["is no folder, no report and no recipe", "did you mean llama_int8"]),
        ("./nowhere", ["is no folder, no report and no recipe"]),
        ("empty", ["holds no run and no sweep"]),
        ("crashed", ["none of the 1 runs", "out of luck"]),
        ("notes.json", ["is not JSON"]),
    ],
)
def test_what_means_nothing_is_said_with_what_to_type(tmp_path: Path, argument: str, said: list[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.json").write_text("not a report", encoding="utf-8")
    failed = {**named("llama_int8"), "status": "failed", "optimized": None, "reason": "out of luck"}
    write(failed, tmp_path / "outputs/crashed/cpu/one")
    with pytest.raises(ConfigError) as caught:
        load([argument], cwd=tmp_path)
    (problem,) = caught.value.problems
    assert all(part in str(problem) for part in said)


def test_every_wrong_argument_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["./here", "./there"], cwd=tmp_path)
    assert [problem.where for problem in caught.value.problems] == ["./here", "./there"]


def _sweep(folder: Path) -> None:
    """Six jobs: a good one, a crash without a report, a kill that left half of one, out of memory, a timeout, one never started."""
    good = named("llama_int8")
    half = folder / "2_half"
    write(good, folder / "0_good")
    write(good, half)
    text = (half / "report.json").read_text(encoding="utf-8")
    (half / "report.json").write_text(text[: len(text) // 2], encoding="utf-8")
    oom = {**good, "status": "oom", "verdict": "oom", "optimized": None, "reason": "cpu ran out of memory"}
    write(oom, folder / "3_oom")
    ended = [
        ("good", sweeps.DONE, 0, None),
        ("crash", sweeps.FAILED, 3, "it called exit with 3"),
        ("half", sweeps.FAILED, -9, "killed by signal 9"),
        ("oom", sweeps.OOM, 1, "cpu ran out of memory"),
        ("slow", sweeps.TIMEOUT, None, "stopped after 60 s"),
        ("later", sweeps.NOT_STARTED, None, None),
    ]
    jobs = [
        sweeps.Job(
            index=index,
            name=name,
            overrides=["recipe=llama_int8", "hardware=cpu", f"seed={index}"],
            folder=f"{index}_{name}",
            status=status,
            exit_code=code,
            error=error,
        )
        for index, (name, status, code, error) in enumerate(ended)
    ]
    sweeps.write(sweeps.Sweep(jobs=jobs), folder)


@pytest.mark.case("B107")
@pytest.mark.case("B138")
@pytest.mark.case("B139")
@pytest.mark.case("B145")
@pytest.mark.parametrize("argument", ["sweep", "sweep/sweep.json", "."])
def test_every_job_of_a_sweep_has_a_place_however_it_ended(tmp_path: Path, argument: str) -> None:
    folder = tmp_path / "sweep"
    folder.mkdir()
    _sweep(folder)
    entries = load([argument], cwd=tmp_path).entries
    assert [entry.finished for entry in entries] == [True, False, False, False, False, False]
    reasons = [entry.reason for entry in entries]
    assert reasons[0] == ""
    assert reasons[1] == "it called exit with 3"
    assert "is not JSON" in reasons[2]
    assert reasons[3:5] == ["cpu ran out of memory", "stopped after 60 s"]
    assert reasons[5] == "not_started"
    assert [entry.report.verdict for entry in entries[1:]] == ["failed", "failed", "oom", "failed", "incomplete"]
    assert [entry.overrides[-1] for entry in entries] == [f"seed={index}" for index in range(6)]


@pytest.mark.case("B144")
def test_jobs_without_a_report_are_named_by_what_their_sweep_varied(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    folder.mkdir()
    _sweep(folder)
    (job,) = [job for job in sweeps.read(folder).jobs if job.name == "crash"]
    long = "re:" + "x" * 300
    jobs = [
        sweeps.Job(
            **{
                **vars(job),
                "index": index,
                "folder": f"{index}_job",
                "overrides": ["recipe=a/b", f"++recipe.steps.weights.ignore=[{value}]"],
            }
        )
        for index, value in enumerate((long, "lm_head"))
    ]
    sweeps.write(sweeps.Sweep(jobs=jobs), folder)
    found = compare(load(["sweep"], cwd=tmp_path).entries)
    (first, _), (second, _) = found.failed
    assert second == "a/b ignore=[lm_head]"
    assert first.startswith("a/b ignore=[re:xxxx") and len(first) <= 80
    assert found.settings[first]["steps.weights.ignore"] == f"[{long}]"
