"""The page's script in a real browser: points, fronts, filters, sorting, and the chosen runs side by side."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fleets import CPU, fleet, read, write

from optforge.compare import Comparison, compare, load, page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the path")]

DRIVER = """
const said = {}, $$ = (query) => [...document.querySelectorAll(query)];
const change = (id, value) => { const found = document.getElementById(id); found.value = value; found.dispatchEvent(new Event("change")); };
const is = (mark, name) => mark.classList.contains(name);
const marks = () => $$("#plot path.mark").map((mark) => [+mark.dataset.row, is(mark, "behind"), is(mark, "predicted")]);
const shown = () => $$("tr[data-row]").filter((row) => !row.hidden).map((row) => +row.dataset.row);
const names = () => $$("#falls h3").map((head) => head.textContent);
said.first = { marks: marks(), rows: shown().length, falls: names(), count: document.getElementById("count").textContent };
change("y", "size");
said.size = marks();
$$("[data-facet=recipe]").forEach((select) => { select.value = "llama_int8"; select.dispatchEvent(new Event("change")); });
said.filtered = { rows: shown(), marks: marks() };
$$("[data-facet=recipe]").forEach((select) => { select.value = ""; select.dispatchEvent(new Event("change")); });
$$("tr[data-row] input").slice(0, 2).forEach((box) => box.click());
said.picked = { falls: names(), settings: $$("#settings th").length, differs: $$("#settings td.differs").length };
const button = $$(".runs.measured [data-sort=memory]")[0];
button.click();
const sorted = () => $$(".runs.measured td.memory").map((cell) => +cell.dataset.value);
said.up = sorted(); button.click(); said.down = sorted();
const mark = $$("#plot path.mark")[0];
mark.dispatchEvent(new PointerEvent("pointerenter"));
said.tip = $$("#plot .tip dt").map((term) => term.textContent);
said.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
const result = document.createElement("pre"); result.id = "result"; result.textContent = JSON.stringify(said); document.body.append(result);
"""


def _driven(comparison: Comparison, folder: Path) -> dict[str, Any]:
    """What DRIVER says of the page; the policy of the copy allows the driver's hash beside the page's own."""
    text = page.render(comparison)
    digest = base64.b64encode(hashlib.sha256(DRIVER.encode()).digest()).decode()
    text = text.replace("script-src '", f"script-src 'sha256-{digest}' '", 1).replace("</body>", f"<script>{DRIVER}</script></body>")
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", f"--user-data-dir={folder / 'profile'}"]
    command = [str(CHROMIUM), *flags, "--window-size=1400,1000", "--virtual-time-budget=5000", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, "the script or its driver stopped: " + done.stderr[-2000:]
    return dict(json.loads(html.unescape(found[1])))


def _fronts(comparison: Comparison, x: str, y: str) -> set[int]:
    """Rows that no row of their own kind beats, by the definition; both figures are better when smaller."""
    rows = comparison.rows
    both = {index: row for index, row in enumerate(rows) if x in row.values and y in row.values}
    points = {index: (row.values[x].value, row.values[y].value) for index, row in both.items()}
    return {
        index
        for index, (a, b) in points.items()
        if not any(rows[other].kind == rows[index].kind and c <= a and d <= b and (c, d) != (a, b) for other, (c, d) in points.items())
    }


def _comparison(folder: Path, count: int) -> Comparison:
    trees = list(fleet(count)) if count > len(CPU) else [read(path) for path in CPU]
    for index, tree in enumerate(trees):
        write(tree, folder / "runs" / str(index))
    return compare(load(["runs"], cwd=folder).entries)


@pytest.mark.parametrize("count", [5, 300])
def test_the_page_works_in_a_browser(tmp_path: Path, count: int) -> None:
    found = _comparison(tmp_path, count)
    said = _driven(found, tmp_path)
    rows = found.rows
    with_both = {index for index, row in enumerate(rows) if {"latency", "quality"} <= set(row.values)}
    assert {index for index, _, _ in said["first"]["marks"]} == with_both
    assert {index for index, behind, _ in said["first"]["marks"] if not behind} == _fronts(found, "latency", "quality")
    assert said["first"]["rows"] == len(rows)
    assert said["first"]["count"] == f"{len(rows)} of {len(rows)} shown"
    assert 1 <= len(said["first"]["falls"]) <= 4

    assert {index for index, behind, _ in said["size"] if not behind} == _fronts(found, "latency", "size")
    assert {index for index, _, predicted in said["size"] if predicted} == {i for i, row in enumerate(rows) if row.kind == "predicted"}

    int8 = [index for index, row in enumerate(rows) if row.report.recipe["name"] == "llama_int8"]
    assert said["filtered"]["rows"] == int8
    assert {index for index, _, _ in said["filtered"]["marks"]} == set(int8)

    assert said["picked"]["falls"] == [rows[0].name, rows[1].name]
    assert said["picked"]["settings"] == 3
    assert said["picked"]["differs"] >= 2
    memory = sorted(row.values["memory"].value for row in found.measured)
    assert said["up"] == memory and said["down"] == memory[::-1]
    assert {"latency", "throughput", "peak memory"} <= set(said["tip"])
    assert said["wide"] <= 0
