"""Which layers bear rounding: the lists to paste, what they hold, the page, and the command."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from optforge import config
from optforge.errors import ConfigError
from optforge.select import select
from optforge.sensitivity import advice, measure, page, record, terminal
from optforge.sensitivity.findings import Advice, Figure, Layer, Left, Sensitivity
from optforge.spec import QualityResult

NAMES = [f"model.layers.{i}.{kind}" for i in range(3) for kind in ("attn.q_proj", "mlp.down_proj")] + ["lm_head"]


class Named(nn.Module):
    """A model with the layers NAMES."""

    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            parent: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.add_module(last, nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("left_out", "short"),
    [
        (["lm_head"], ["lm_head"]),
        ([name for name in NAMES if "down_proj" in name], ["down_proj"]),
        (["model.layers.1.mlp.down_proj"], ["layers.1.mlp.down_proj"]),
        ([name for name in NAMES if ".1." in name], ["layers.1.attn.q_proj", "layers.1.mlp.down_proj"]),
        ([name for name in NAMES if "down_proj" in name] + ["model.layers.0.attn.q_proj"], ["down_proj", "layers.0.attn.q_proj"]),
        ([], []),
    ],
)
def test_the_list_to_paste_covers_what_is_left_out_and_nothing_else(left_out: list[str], short: list[str]) -> None:
    """Held against the selector that a recipe's `ignore` goes through."""
    found = advice.selectors(left_out, NAMES)
    assert found == short
    chosen = select(Named(), ["Linear"], found, step="x", eligible=lambda _, module: isinstance(module, nn.Linear))
    assert sorted(chosen.ignored) == sorted(left_out)


def layers(costs: Sequence[float]) -> list[Layer]:
    return [
        Layer(
            name=name,
            shape=[8, 4],
            bytes=64,
            share=1 / 7,
            figures={"s": Figure(cost=cost, loss_change=cost / 2, sqnr_db=30.0, saved_bytes=32)},
        )
        for name, cost in zip(NAMES, costs, strict=True)
    ]


COSTS = (1.0, 9.0, 2.0, 7.0, 1.0, 8.0, 30.0)
"""q, down, q, down, q, down, head."""


def strain(limit: float) -> Callable[[Sequence[str]], float]:
    costs = dict(zip(NAMES, COSTS, strict=True))
    return lambda names: sum(costs[name] for name in names) / limit


def test_as_few_layers_as_the_limit_asks_for_are_left_out() -> None:
    found = layers(COSTS)
    assert set(advice.rounded(found, "s", strain(100)) or []) == set(NAMES)
    assert set(NAMES) - set(advice.rounded(found, "s", strain(28.5)) or []) == {"lm_head"}
    assert set(NAMES) - set(advice.rounded(found, "s", strain(12)) or []) == {"lm_head", NAMES[1], NAMES[5]}
    assert advice.rounded(found, "s", strain(0.5)) is None


def test_whole_kinds_go_together() -> None:
    found = layers(COSTS)
    assert sorted(advice.rounded_kinds(found, "s", strain(28.5)) or []) == sorted(NAMES[:-1])
    assert sorted(advice.rounded_kinds(found, "s", strain(12)) or []) == [name for name in NAMES if "q_proj" in name]


def findings() -> Sensitivity:
    out = [NAMES[1], "lm_head"]
    left = Left(
        ignore=advice.selectors(out, NAMES),
        layers=out,
        quality=QualityResult(kl=0.004, perplexity_increase=0.003, agreement=0.98),
        weight_bytes=300,
    )
    whole = QualityResult(kl=0.05, perplexity_increase=0.04, agreement=0.9)
    return Sensitivity(
        model="toy <b>",
        data="text",
        target="cpu",
        device="cpu",
        family="causal_lm",
        samples=2,
        positions=64,
        weight_bytes=448,
        floor=0.001,
        limits={"max_perplexity_increase": 0.01},
        schemes=["s"],
        layers=layers([cost / 1000 for cost in COSTS]),
        advice=[Advice(scheme="s", count=7, whole=whole, weight_bytes=224, within=False, fewest=left)],
    )


def test_json_csv_and_markdown_say_the_same() -> None:
    found = findings()
    tree = json.loads(record.to_json(found))
    assert tree["layers"][6]["figures"]["s"]["cost"] == 0.03
    rows = list(csv.DictReader(io.StringIO(record.to_csv(found))))
    assert [row["layer"] for row in rows] == NAMES
    assert {row["layer"] for row in rows if row["left_out"] == "True"} == {NAMES[1], "lm_head"}
    assert float(rows[6]["estimated_perplexity_change"]) == pytest.approx(0.01511, rel=1e-3), "exp(0.015) - 1"
    text = record.to_markdown(found)
    assert "ignore: [layers.0.mlp.down_proj, lm_head]" in text
    assert text.index("| lm_head |") < text.index("| model.layers.0.mlp.down_proj |") < text.index("| model.layers.0.attn.q_proj |")


@pytest.mark.parametrize("width", [72, 100, 140])
def test_a_terminal_of_any_width_shows_the_list_in_one_piece(width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    terminal.show(findings(), console, "outputs/x")
    text = console.export_text()
    assert "  ignore: [layers.0.mlp.down_proj, lm_head]" in text.splitlines()
    table = [line for line in text.splitlines() if line.startswith(("layer ", "lm_head", "model."))]
    assert len(table) == 8 and max(map(len, table)) <= width


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_draws_every_layer_and_runs_nothing() -> None:
    text = page.render(findings())
    tags = Tags()
    tags.feed(text)
    kinds = [tag for tag, _ in tags.found]
    assert "script" not in kinds and "img" not in kinds and "link" not in kinds
    assert "toy <b>" not in text and "toy &lt;b&gt;" in text
    drawn = page.layer_map(findings(), "s")
    assert len(drawn.cells) == 7 and sum(cell.left_out for cell in drawn.cells) == 2
    assert [name for _, name in drawn.rows] == ["q_proj", "down_proj", "lm_head"]
    by_cost = sorted(drawn.cells, key=lambda cell: -cell.weight)
    assert by_cost[0].title.startswith("lm_head") and by_cost[0].weight == 1.0
    assert all(0 <= cell.x < drawn.width and 0 <= cell.y < drawn.height for cell in drawn.cells)
    assert page.headline(findings()) == "s is within the limits when 2 layers are left out"


def test_the_curve_ends_at_all_layers() -> None:
    found = page.curve(findings(), "s")
    points = [tuple(map(float, point.split(","))) for point in found.line.split()]
    assert len(points) == 8
    assert [x for x, _ in points] == sorted(x for x, _ in points) and [y for _, y in points] == sorted((y for _, y in points), reverse=True)
    assert found.y_ticks[-1][1] == record.number(sum(COSTS) / 1000)


def test_random_weights_and_random_data_are_refused_before_any_weight_is_loaded(tmp_path: Path) -> None:
    def composed(*words: str) -> config.Arguments:
        return config.parse(["recipe=baseline", "hardware=cpu", *words], cwd=tmp_path)

    random = config.compose(composed("model=llama3_1b", "model.layers=2"), cwd=tmp_path)
    with pytest.raises(ConfigError, match="cannot be measured: the weights are random") as refused:
        measure.require(random, measure.Options(schemes=("int8_wait",), samples=0, check=-1))
    told = [problem.where for problem in refused.value.problems]
    assert told == ["sensitivity", "--schemes", "--samples", "--check"], "all at once"
    with pytest.raises(ConfigError, match="names no scheme"):
        measure.require(random, replace(measure.Options(), schemes=()))


FACTORY = """
import torch
from torch import nn


def made():
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    with torch.no_grad():
        blocks[2].weight[3] *= 3
        blocks[2].weight[:, 5] *= 3
    return Stack(blocks), torch.randn(32, 64)


class Stack(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x
"""


def test_the_command_on_a_module_of_the_users_own(tmp_path: Path) -> None:
    """What it writes, and estimates against measurements."""
    (tmp_path / "mine.py").write_text(FACTORY)
    words = ["sensitivity", "model=module", "model.factory=mine:made", "hardware=cpu", "--schemes", "int8_weight,int4_weight"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-m", "optforge", *words], cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "outputs" / "sensitivity" / "module" / "cpu").iterdir()
    assert {path.name for path in folder.iterdir()} == {"sensitivity.json", "sensitivity.csv", "sensitivity.md", "sensitivity.html"}
    assert str(folder.relative_to(tmp_path)) in done.stdout
    tree = json.loads((folder / "sensitivity.json").read_text())
    assert [layer["name"] for layer in tree["layers"]] == [f"blocks.{i}" for i in range(4)]
    for scheme in tree["schemes"]:
        worst = max(tree["layers"], key=lambda layer: layer["figures"][scheme]["cost"])
        checked = [layer["figures"][scheme] for layer in tree["layers"] if layer["figures"][scheme]["measured_cost"] is not None]
        assert len(checked) == 3 and worst["figures"][scheme] in checked
        for figure in checked:
            assert 0.4 < figure["cost"] / figure["measured_cost"] < 2.5, "32 rows and one draw of signs: a scatter of 1.3 times"
    assert re.search(r"int8_weight: every layer rounded: relative error", done.stdout)


@pytest.mark.slow
def test_on_smollm2_the_estimates_agree_with_what_is_measured(tmp_path: Path) -> None:
    """On trained weights and real text: each layer that was measured alone, and the lists within their limits."""
    words = ["recipe=baseline", "model=smollm2_135m", "data=wikipedia", "hardware=cpu"]
    run = config.compose(config.parse(words, cwd=tmp_path), cwd=tmp_path)
    from optforge import engine
    from optforge.progress import SilentProgress

    options = measure.Options(schemes=("int8_dynamic",), samples=2, sample_tokens=256, check=3)
    measure.require(run, options)
    found = measure.measure(engine.plan(run), options, SilentProgress())
    checked = [layer.figures["int8_dynamic"] for layer in found.layers if layer.figures["int8_dynamic"].measured_cost is not None]
    assert len(checked) == 3
    for figure in checked:
        assert figure.measured_cost is not None
        # the floor is what bf16 makes of a change at the beginning; a layer near the end moves fewer sums, and has less of it in its figure
        assert 0.5 * (figure.measured_cost - found.floor) < figure.cost < 1.5 * figure.measured_cost
    (one,) = found.advice
    assert not one.within and one.fewest is not None and one.fewest.quality.perplexity_increase is not None
    assert one.fewest.quality.perplexity_increase <= 0.01 and len(one.fewest.layers) < one.count / 2
    assert torch.is_grad_enabled()
