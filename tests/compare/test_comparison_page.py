"""The page's HTML: complete without its script, safe with it, and with the reports' own figures in its tables."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from fleets import Compare, named, settings

from optforge.compare import Comparison, page

VOID = {"meta", "input", "br", "link", "img", "hr"}
HOSTILE = '</script><script>alert(1)</script><img src=x onerror=alert(1)>"&'


class Page(HTMLParser):
    """Rows of the tables as (attributes, cells), scripts, ids, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[tuple[dict[str, str | None], list[tuple[str, str | None, str]]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text = text
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append((values, []))
        if tag == "td":
            self.rows[-1][1].append((values.get("class") or "", values.get("data-value"), ""))
        if tag == "script":
            self.scripts.append((values, ""))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif "td" in self.open:
            name, value, before = self.rows[-1][1][-1]
            self.rows[-1][1][-1] = (name, value, before + data)

    @property
    def data(self) -> dict[str, Any]:
        (found,) = [json.loads(text) for attributes, text in self.scripts if attributes.get("id") == "data"]
        return dict(found)

    def runs(self) -> list[dict[str, tuple[str | None, str]]]:
        """Each run's row: column -> (raw figure, text)."""
        return [
            {name.split()[0]: (value, text.strip()) for name, value, text in cells if name}
            for attributes, cells in self.rows
            if "data-row" in attributes
        ]


def test_every_figure_of_the_tables_is_the_reports_own(five: Comparison) -> None:
    read = Page(page.render(five))
    rows = read.runs()
    assert len(rows) == 6
    for cells in rows[:5]:
        tree = named(cells["run"][1])
        best = tree["optimized"]
        raw = {key: float(cells[key][0] or "nan") for key in ("latency", "throughput", "memory", "size")}
        assert raw == pytest.approx(
            {
                "latency": best["latency_ms"]["p50"],
                "throughput": best["tokens_per_s"],
                "memory": best["peak_memory_bytes"],
                "size": best["weight_bytes"],
            }
        )
        assert _number(cells["latency"][1]) == pytest.approx(best["latency_ms"]["p50"], rel=0.006)
        assert _number(cells["p90"][1]) == pytest.approx(best["latency_ms"]["p90"], rel=0.006)
        assert _number(cells["throughput"][1]) == pytest.approx(best["tokens_per_s"], rel=0.006)
        assert _number(cells["memory"][1]) * 1e6 == pytest.approx(best["peak_memory_bytes"], rel=0.006)
        assert _number(cells["size"][1]) * 1e6 == pytest.approx(best["weight_bytes"], rel=0.006)
        if tree["quality"]:
            assert float(cells["quality"][0] or "nan") == tree["quality"]["perplexity_increase"]
    predicted = named("llama_fp8")["predicted"]["optimized"]
    assert float(rows[5]["latency"][0] or "nan") == predicted["latency_ms"]
    assert rows[5]["where"][1] == "a100"


def _number(text: str) -> float:
    return float(re.sub(r"[^\d.+-]", "", text.split(maxsplit=1)[0]))


def test_the_plots_data_agree_with_the_tables(five: Comparison) -> None:
    read = Page(page.render(five))
    for row, cells in zip(read.data["rows"], read.runs(), strict=True):
        assert row["name"] == cells["run"][1]
        for key, (value, low, high, text) in row["values"].items():
            assert float(cells[key][0] or "nan") == value
            assert cells[key][1] == text
            assert low is None or low <= value <= high
    assert [row["kind"] for row in read.data["rows"]] == ["measured"] * 5 + ["predicted"]


def test_steps_side_by_side_are_those_of_the_reports(five: Comparison) -> None:
    for row in Page(page.render(five)).data["rows"][:5]:
        tree = named(row["name"])
        assert [step["name"] for step in row["steps"]] == ["baseline", *(step["name"] for step in tree["steps"])]
        times = [tree["baseline"], *(step["measured"] for step in tree["steps"])]
        assert [step["ms"] for step in row["steps"]] == [time["latency_ms"]["p50"] for time in times]


def test_the_policy_allows_one_script_by_its_hash_and_no_request(five: Comparison) -> None:
    read = Page(page.render(five))
    (policy,) = [values["content"] for tag, values in read.tags if tag == "meta" and "http-equiv" in values]
    (script,) = [text for attributes, text in read.scripts if attributes.get("type") is None]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert not [tag for tag, values in read.tags if "src" in values or "href" in values or any(key.startswith("on") for key in values)]
    assert not re.search(r"https?:(?!//www\.w3\.org/2000/svg)", read.text)
    assert len(script) < 40_000


def test_no_text_of_a_report_becomes_markup(side_by_side: Compare) -> None:
    trees = [named("llama_int8"), named("llama_bf16")]
    for tree in trees:
        tree["recipe"]["name"] += HOSTILE
        tree["device"]["name"] = HOSTILE
        tree["warnings"] = [HOSTILE]
        tree["settings"] = settings(tree, recipe__steps__weights__use=HOSTILE + tree["recipe"]["goal"])
    read = Page(page.render(side_by_side(*trees)))
    assert len(read.scripts) == 2
    assert not [tag for tag, _ in read.tags if tag == "img"]
    assert HOSTILE in read.data["rows"][0]["name"]
    assert HOSTILE in read.runs()[0]["run"][1]


def test_different_conditions_stand_in_the_head_of_the_page(side_by_side: Compare) -> None:
    first, second = named("llama_int8"), named("llama_bf16")
    second["workload"]["batch_size"] = 4
    text = page.render(side_by_side(first, second, anyway=True))
    assert "Measured under different conditions." in text
    assert "<b>workload</b>: batch_size 1 (" in text
    assert {cells["group"][1] for cells in Page(text).runs()} == {"A", "B"}


def test_one_run_alone_is_a_page_too(side_by_side: Compare) -> None:
    assert len(Page(page.render(side_by_side(named("llama_int8")))).runs()) == 1
