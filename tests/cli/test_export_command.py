"""`optforge export` and the run key `export`, on a tiny checkpoint that transformers wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commandline import Optforge
from llamas import module

from optforge.cli.export import Request, export_command
from optforge.errors import Problem, TrustError

RUN = ("hardware=cpu", "workload=prefill", "workload.prompt_tokens=16", "data=random_tokens", "measure.max_s=0.2", "quality.enabled=false")
RECIPE = "name: small\ndescription: int8 weights\ngoal: size\nsteps:\n  weights: {use: quantize/int8_weight, ignore: [lm_head]}\n"


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Overrides of a run of a tiny Llama from a folder."""
    module().save_pretrained(tmp_path / "checkpoint")
    (tmp_path / "small.yaml").write_text(RECIPE, encoding="utf-8")
    return ["recipe=./small.yaml", "model=hf", "model.path=checkpoint", "model.dtype=fp32", *RUN, "hydra.run.dir=run"]


def test_a_format_that_does_not_exist_is_refused_before_anything_is_loaded(optforge: Optforge) -> None:
    done = optforge("export", "nowhere", "--format", "onx")
    assert done.returncode == 2
    assert "error: --format: 'onx' is no format; did you mean onnx?" in done.stderr
    done = optforge("export", "nowhere", "--format", "huggingface")
    assert done.returncode == 2
    assert "nowhere: holds no artifact; run again with save=true" in done.stderr


def test_code_of_the_run_is_trusted_by_an_option_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise TrustError(Problem(where="run.yaml", what="would run code", fix="add trust=true if you trust the file"))

    monkeypatch.setattr("optforge.export.export_saved", refuses)
    with pytest.raises(TrustError, match="add --trust if you trust the file"):
        export_command(Request(run=tmp_path, format="huggingface"))


@pytest.mark.slow
def test_a_saved_run_is_exported_and_its_report_says_so(optforge: Optforge, tiny: list[str], tmp_path: Path) -> None:
    done = optforge("run", *tiny, "save=true", "export=[compressed_tensors]")
    assert done.returncode == 0, done.stderr
    done = optforge("export", "run", "--format", "huggingface")
    assert done.returncode == 0, done.stderr
    assert "checked in a fresh process (transformers" in done.stdout
    report = json.loads((tmp_path / "run/report.json").read_text(encoding="utf-8"))
    assert [record["format"] for record in report["exports"]] == ["compressed_tensors", "huggingface"]
    for record in report["exports"]:
        assert json.loads((Path(record["path"]) / "export.json").read_text(encoding="utf-8"))["check"] == record["check"]
    done = optforge("export", "run", "--format", "huggingface", "--out", "checkpoint")
    assert done.returncode == 2
    assert "which the export reads" in done.stderr


@pytest.mark.slow
def test_what_a_format_cannot_hold_is_told_before_the_model_is_loaded(optforge: Optforge, tiny: list[str], tmp_path: Path) -> None:
    done = optforge("run", *tiny, "export=[compressed_tensors]", "~steps.weights")
    assert done.returncode == 2
    assert "no layer is quantized, and compressed-tensors holds quantized ones" in done.stderr
    assert not (tmp_path / "run/export").exists()
