"""Typer outside, Hydra inside: which argument reaches whom, whatever the order."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from optforge.cli.app import app
from optforge.cli.run import Request

ROWS = [
    # what is typed                                what is passed through, in order       OptForge's own options
    (["recipe=a"], ["recipe=a"], {}),
    (["-m", "recipe=a,b"], ["-m", "recipe=a,b"], {}),
    (["--multirun", "recipe=a,b"], ["--multirun", "recipe=a,b"], {}),
    (["recipe=a,b", "-m"], ["recipe=a,b", "-m"], {}),
    (["+x=1", "~ignore"], ["+x=1", "~ignore"], {}),
    (["++x=1", "~steps.compile"], ["++x=1", "~steps.compile"], {}),
    (["--cfg", "job"], ["--cfg", "job"], {}),
    (["recipe=a", "--cfg", "job", "x=1"], ["recipe=a", "--cfg", "job", "x=1"], {}),
    (["--cfg=job", "recipe=a"], ["--cfg=job", "recipe=a"], {}),
    (["-cn", "other", "recipe=a"], ["-cn", "other", "recipe=a"], {}),
    (["recipe=a", "--verbose"], ["recipe=a"], {"verbose": True}),
    (["--verbose", "recipe=a"], ["recipe=a"], {"verbose": True}),
    (["recipe=a", "--debug", "-m", "x=1,2"], ["recipe=a", "-m", "x=1,2"], {"debug": True}),
    (["--debug", "-m", "recipe=a,b", "-v"], ["-m", "recipe=a,b"], {"debug": True, "verbose": True}),
    (["--", "--multirun"], ["--multirun"], {}),
    (["recipe=a", "--", "-m", "--debug"], ["recipe=a", "-m", "--debug"], {}),
    (["--config", "run.yaml", "x=1"], ["x=1"], {"config": Path("run.yaml")}),
    (["x=1", "--config=run.yaml"], ["x=1"], {"config": Path("run.yaml")}),
    (["--set", "a.b=1", "recipe=r", "--set", "c.d=[1,2]"], ["recipe=r"], {"set_": ("a.b=1", "c.d=[1,2]")}),
    (["recipe=r", "--drop", "compile", "--drop", "fuse"], ["recipe=r"], {"drop": ("compile", "fuse")}),
    (["--add", "prune=prune/wanda", "recipe=r"], ["recipe=r"], {"add": ("prune=prune/wanda",)}),
    (["steps.p={use: prune/wanda, before: w}"], ["steps.p={use: prune/wanda, before: w}"], {}),
    (["model.path=./a b/c", "x='1'"], ["model.path=./a b/c", "x='1'"], {}),
    ([], [], {}),
]


@pytest.mark.case("B133")
@pytest.mark.parametrize(("typed", "passed", "own"), ROWS, ids=[" ".join(row[0]) or "nothing" for row in ROWS])
def test_b133_each_argument_reaches_its_owner(
    typed: list[str], passed: list[str], own: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = _requests(monkeypatch, ["run", *typed])
    assert [list(request.argv) for request in requests] == [passed]
    defaults: dict[str, object] = {"config": None, "set_": (), "drop": (), "add": (), "debug": False, "verbose": False}
    assert {name: getattr(requests[0], name) for name in defaults} == {**defaults, **own}


@pytest.mark.case("B132")
def test_b132_the_name_of_the_command_is_no_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """Typer drops the sub-command of an application that has only one, unless it has a callback."""
    assert app.registered_callback is not None
    monkeypatch.setattr(app, "registered_commands", [command for command in app.registered_commands if command.name == "run"])
    requests = _requests(monkeypatch, ["run", "recipe=a"])
    assert [request.argv for request in requests] == [("recipe=a",)]


def _requests(monkeypatch: pytest.MonkeyPatch, typed: list[str]) -> list[Request]:
    """What the command line hands to `run_command`, whose work is recorded instead of done."""
    seen: list[Request] = []

    def record(request: Request) -> int:
        seen.append(request)
        return 0

    monkeypatch.setattr("optforge.cli.run.run_command", record)
    result = CliRunner().invoke(app, typed)
    assert result.exit_code == 0, result.output
    return seen
