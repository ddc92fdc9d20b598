"""report.json: strict, complete, in the schema's order, and whole after any kill."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import samples
import torch

from optforge import atomic
from optforge.errors import OutputError, UserError
from optforge.report import schema, store
from optforge.spec import Measurement, QualityResult, Ratio, Report, StepReport

DOCS = Path(__file__).parents[2] / "docs"
EVERY = pytest.mark.parametrize("build", samples.ALL.values(), ids=samples.ALL)


def strict(text: str) -> dict:
    """Parses like a reader that rejects NaN and Infinity."""

    def refuse(name: str) -> None:
        raise ValueError(f"not JSON: {name}")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.case("B62")
def test_b62_nonfinite_figures_become_null_and_are_listed() -> None:
    report = Report(
        baseline=Measurement(latency_ms={"p50": math.nan, "n": 3}, samples_s=[0.1, math.inf]),
        steps=[StepReport(name="a", kind="fuse", use="fuse/x", quality=QualityResult(kl=-math.inf))],
        speedup={"vs_baseline": Ratio(value=math.inf, low=1.0, high=math.inf)},
        environment={"name": "BaNaNa", "note": "NaN, Infinity and -Infinity", "Infinity": 1},
        nonfinite=["found.before"],
    )
    values = strict(store.to_json(report))
    assert values["nonfinite"] == [
        "baseline.latency_ms.p50",
        "baseline.samples_s.1",
        "found.before",
        "speedup.vs_baseline.high",
        "speedup.vs_baseline.value",
        "steps.0.quality.kl",
    ]
    assert values["baseline"]["latency_ms"]["p50"] is None and values["baseline"]["samples_s"] == [0.1, None]
    assert values["speedup"]["vs_baseline"] == {"value": None, "low": 1.0, "high": None, "unit": "latency"}
    assert values["environment"] == {"name": "BaNaNa", "note": "NaN, Infinity and -Infinity", "Infinity": 1}


@pytest.mark.case("B62")
def test_b62_numpy_and_torch_scalars_become_numbers() -> None:
    report = Report(
        seconds=np.float32(0.5),
        environment={
            "int": np.int64(7),
            "bool": np.bool_(True),
            "nan": np.float64("nan"),
            "tensor": torch.tensor(2.5),
            "inf": torch.tensor(math.inf),
            "zero_d": np.array(3),
            "text": np.str_("BaNaNa"),
        },
    )
    values = strict(store.to_json(report))
    assert values["seconds"] == 0.5
    assert values["environment"] == {"int": 7, "bool": True, "nan": None, "tensor": 2.5, "inf": None, "zero_d": 3, "text": "BaNaNa"}
    assert values["nonfinite"] == ["environment.inf", "environment.nan"]


def test_what_json_cannot_hold_is_named() -> None:
    with pytest.raises(TypeError, match=r"environment\.dtype is a dtype"):
        store.to_json(Report(environment={"dtype": torch.float32}))
    with pytest.raises(TypeError, match=r"environment\.many is a Tensor"):
        store.to_json(Report(environment={"many": torch.zeros(2)}))


@EVERY
def test_what_is_written_reads_back_the_same(build: Callable[[], Report], tmp_path: Path) -> None:
    report = build()
    store.write(report, tmp_path)
    again = store.read(tmp_path)
    assert store.to_json(again) == store.to_json(report)
    assert [type(step) for step in again.steps] == [StepReport] * len(report.steps)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json", "report.md"]


def test_key_order_is_that_of_the_issue() -> None:
    keys = list(strict(store.to_json(samples.ok_stand_in())))
    first = "status verdict recipe target device model workload baseline steps optimized speedup"
    named = f"{first} quality predicted downgrades environment command".split()
    assert [key for key in keys if key in named] == named
    assert keys[0] == "schema_version"


def test_figures_that_do_not_exist_are_null() -> None:
    values = strict(store.to_json(Report(baseline=Measurement())))
    assert values["speedup"] == {"vs_baseline": None, "vs_compiled_baseline": None}
    assert values["baseline"]["latency_ms"] == {"p50": None, "p90": None, "mean": None, "stdev": None, "n": None}
    assert values["baseline"]["mfu"] is None and values["optimized"] is None and values["quality"] is None


def test_lone_surrogates_of_file_names_survive(tmp_path: Path) -> None:
    report = Report(folder=os.fsdecode(b"run-\xff"), command="größer als 本")
    store.write(report, tmp_path)
    assert store.read(tmp_path).folder == report.folder and store.read(tmp_path).command == report.command


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "schema_version None"),
        ('{"schema_version": 2}', "has schema_version 2; this OptForge reads 1"),
        ('{"schema_version": 1, "surprise": 3}', "surprise: unknown key"),
        ('{"schema_version": 1, "steps": [{"name": 3, "kind": "a", "use": "b"}]}', r"steps\.0\.name: expected str, found int"),
        ('{"schema_version": 1, "steps": [{"name": "a"}]}', r"steps\.0\.kind: is missing"),
    ],
)
def test_a_report_that_cannot_be_read_says_why(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(UserError, match=message) as error:
        store.read(tmp_path)
    assert str(tmp_path / "report.json") in str(error.value)


def test_no_report_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no report here"):
        store.read(tmp_path)


@pytest.mark.case("B84")
def test_b84_a_failed_write_leaves_the_old_report_and_no_litter(tmp_path: Path) -> None:
    store.write(samples.incomplete(), tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OutputError, match=r"report\.json: cannot be written \(File too large\): needs [\d,]+ bytes"):
            store.write(samples.ok_stand_in(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert store.read(tmp_path).verdict == "incomplete"
    assert not [path for path in tmp_path.iterdir() if atomic.TEMPORARY in path.name]


@pytest.mark.case("B82")
def test_b82_a_killed_writers_temporary_file_is_removed_by_the_next(tmp_path: Path) -> None:
    store.write(samples.incomplete(), tmp_path)
    (tmp_path / f".report.json{atomic.TEMPORARY}{2**22 + 1}").write_text('{"half')
    assert store.read(tmp_path).verdict == "incomplete"
    store.write(samples.ok_stand_in(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json", "report.md"]


def test_the_committed_schema_is_the_generated_one() -> None:
    assert json.loads((DOCS / "report.schema.json").read_text()) == schema.report_schema()


def test_the_schema_requires_every_field_of_every_dataclass() -> None:
    generated = schema.report_schema()
    assert generated["required"] == [field.name for field in dataclasses.fields(Report)]
    assert {"Measurement", "StepReport", "Ratio", "QualityResult", "Downgrade", "TrainingResult", "LossCurve"} == set(generated["$defs"])
    assert generated["$defs"]["Ratio"]["properties"]["value"] == {"type": ["number", "null"]}
    assert "alternating" in generated["$defs"]["Measurement"]["properties"]["baseline_samples_s"]["description"]


@EVERY
def test_reports_validate_against_the_schema(build: Callable[[], Report]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(schema.report_schema())
    validator.validate(strict(store.to_json(build())))
    broken = strict(store.to_json(build())) | {"verdict": "great"}
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(broken)
