"""Cost per million: the arithmetic, who has one, and that every view of a run shows it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from samples import ok_stand_in

from optforge import config
from optforge.errors import ConfigError
from optforge.report import cost, html, markdown, terminal
from optforge.spec import Report


def _on_its_target(**target: object) -> Report:
    report = ok_stand_in()
    return replace(report, device={**report.device, "is_target": True}, target={**report.target, **target})


def test_a_million_tokens_at_a_thousand_a_second_are_1000_seconds() -> None:
    assert cost.per_million(1000.0, 3.6) == pytest.approx(1.0)  # 3.6 an hour is 0.001 a second
    assert cost.per_million(None, 3.6) is None
    assert cost.per_million(1000.0, None) is None
    assert cost.per_million(0.0, 3.6) is None
    assert cost.per_million(float("nan"), 3.6) is None


def _texts(report: Report) -> dict[str, str]:
    console = Console(file=io.StringIO(), width=200)
    terminal.print_report(report, console)
    assert isinstance(console.file, io.StringIO)
    return {"terminal": console.file.getvalue(), "markdown": markdown.render(report), "html": html.render(report)}


def test_every_view_of_a_run_shows_it() -> None:
    """256 tokens in 88.4 ms are 2,896 a second: at 7.2 an hour a million costs 0.691, at the baseline's 143 ms 1.12."""
    for text in _texts(_on_its_target(price_per_hour=7.2, currency="EUR")).values():
        assert "ost per M tokens" in text
        assert "0.691 EUR" in text and "1.12 EUR" in text


def test_without_a_price_there_is_no_column_and_without_a_currency_a_bare_figure() -> None:
    for text in _texts(_on_its_target(price_per_hour=None)).values():
        assert "ost per M" not in text
    for text in _texts(_on_its_target(price_per_hour=7.2)).values():
        assert "0.691" in text and "0.691 EUR" not in text


def test_what_a_stand_in_measured_has_no_cost_and_the_prediction_has() -> None:
    report = replace(ok_stand_in(), target={**ok_stand_in().target, "price_per_hour": 7.2, "currency": "EUR"})
    for name, text in _texts(report).items():
        assert "0.691 EUR" not in text
        if name != "terminal":
            assert "0.00200 EUR" in text  # a million tokens a second, predicted: 7.2 / 3600


def test_a_price_is_given_like_any_other_setting_and_is_above_zero() -> None:
    arguments = ["recipe=baseline", "hardware=h200"]
    run = config.compose(config.parse([*arguments, "hardware.price_per_hour=3.5", "hardware.currency=EUR"], cwd=Path.cwd()), cwd=Path.cwd())
    assert (run.hardware.price_per_hour, run.hardware.currency) == (3.5, "EUR")
    with pytest.raises(ConfigError, match="price_per_hour"):
        config.compose(config.parse([*arguments, "hardware.price_per_hour=0"], cwd=Path.cwd()), cwd=Path.cwd())


def test_no_profile_ships_a_price() -> None:
    assert all(config.hardware(option.name).price_per_hour is None for option in config.options("hardware"))
