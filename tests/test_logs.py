"""Log records of a run end in its file, and the terminal stays free for the report."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest

from optforge import logs


def test_records_and_warnings_go_to_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "optforge.log"
    before = list(logging.getLogger().handlers)
    with logs.to_file(path, verbose=False), warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.getLogger("some.package").info("a record")
        warnings.warn("a warning", stacklevel=1)
    text = path.read_text(encoding="utf-8")
    assert "INFO    some.package: a record" in text
    assert "a warning" in text
    assert logging.getLogger().handlers == before
    logging.getLogger("some.package").error("after the run")
    assert "after the run" not in path.read_text(encoding="utf-8")
    assert "a record" not in capsys.readouterr().err


def test_verbose_shows_them_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with logs.to_file(tmp_path / "optforge.log", verbose=True):
        logging.getLogger("some.package").info("a record")
    assert "a record" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [False, True])
def test_a_logger_that_prints_by_itself_is_adopted_unless_torch_logs_asks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    if asked:
        monkeypatch.setenv("TORCH_LOGS", "+dynamo")
    else:
        monkeypatch.delenv("TORCH_LOGS", raising=False)
    logger = logging.getLogger("torch.a_test_of_logs")
    handler = logging.StreamHandler()
    logger.addHandler(handler)
    logger.propagate = False
    try:
        with logs.to_file(tmp_path / "optforge.log", verbose=False), logs.adopted("torch"):
            logger.warning("look here")
        assert ("look here" in capsys.readouterr().err) is asked
        assert ("look here" in (tmp_path / "optforge.log").read_text(encoding="utf-8")) is not asked
        assert handler in logger.handlers
        assert not logger.propagate
    finally:
        logger.removeHandler(handler)
