"""`optforge plan` in this process: a case is a command, its exit code and the lines that it prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from optforge.cli import app

SMALL = ("model=llama3_1b", "model.layers=2", "data=random_tokens")
"""Two layers of a published shape."""
STRANGE = ("model=module", "data=inputs", "workload=forward")


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    errors: list[str]
    """The lines `error: ...` on stderr."""
    folder: Path

    def said(self, label: str) -> str:
        """The last text beside a label, which is the verdict's where it has one."""
        found = [line.removeprefix(label).strip() for line in self.out.splitlines() if line.startswith(label)]
        assert found, f"no {label} in {self.out}"
        return found[-1]

    def lines(self, label: str) -> list[str]:
        return [line for line in self.out.splitlines() if line.startswith(label)]

    @property
    def plans(self) -> list[dict[str, Any]]:
        (path,) = self.folder.rglob("plan.json")
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="ascii"))["plans"]
        return found

    @property
    def wrote(self) -> bool:
        return (self.folder / "outputs").exists()


Plan = Callable[..., Done]


def planner(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Calls the command in `folder`; kernels are left out unless they are asked for."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def call(*arguments: str, kernels: bool = False, columns: int = 200) -> Done:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr("sys.argv", ["optforge", "plan", *arguments, *(() if kernels else ("--no-kernels",))])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            app.main()
        out, err = capsys.readouterr()
        return Done(int(ended.value.code or 0), out, [line for line in err.splitlines() if line.startswith("error: ")], folder)

    return call


def recipe(folder: Path, *steps: str) -> str:
    """A recipe file of these steps, and the override that chooses it."""
    listed = "".join(f"  {name}: {{use: {use}}}\n" for name, _, use in (step.partition("=") for step in steps))
    (folder / "mine.yaml").write_text(f"name: mine\ndescription: One step\ngoal: throughput\nsteps:\n{listed}", encoding="utf-8")
    return "recipe=./mine.yaml"
