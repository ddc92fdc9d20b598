"""The page, the Markdown and the terminal: the right words, every figure labelled, hostile text harmless."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import samples
from rich.console import Console

from optforge.report import charts, diff, figures, html, markdown, terminal, view
from optforge.spec import Measurement, Ratio, Report

EVERY = pytest.mark.parametrize("build", samples.ALL.values(), ids=samples.ALL)
FIGURE = re.compile(r"\d (ms|[kMGT]?B|tok/s|tokens/s|items/s|m?J|[GTP]FLOP/s)\b|\d\.\d\dx")
LABEL = re.compile(r"measured on|predicted for")
CSS = (Path(html.__file__).parent / "templates/page.css.j2").read_text()


class Page(HTMLParser):
    """A page's tags, its text, and the text of each section, tile and receipt."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[tuple[str, list[str]]] = []
        self.blocks: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "line", "circle", "polyline"):
            self.open.append((tag, []))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        opened, inside = self.open.pop()
        assert opened == tag
        if tag in ("section", "header"):
            self.blocks.append(" ".join(inside))

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1][0] != "style":
            self.text += data
            for _, inside in self.open:
                inside.append(data)


def shown(report: Report, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    terminal.print_report(report, console)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (
            samples.ok_stand_in,
            "1.46x faster than the compiled baseline, 95% interval 1.43x to 1.49x, perplexity +0.7%, measured on cpu, a stand-in for a100",
        ),
        (samples.on_target, "1.46x faster than the compiled baseline, 95% interval 1.43x to 1.49x, perplexity +0.7%, measured on h200"),
        (
            samples.regression,
            "1.18x slower than the compiled baseline, 95% interval 1.15x to 1.20x, perplexity +0.7%, measured on cpu, a stand-in for a100",
        ),
        (
            samples.failed_quality,
            "A quality limit was missed, though 1.46x faster than the compiled baseline, 95% interval 1.43x to 1.49x, perplexity +24.5%, "
            "measured on cpu, a stand-in for a100; perplexity increase is 24.5%, the limit is 3.0%; "
            "KL of logits is 0.211, the limit is 0.05",
        ),
        (
            samples.out_of_memory,
            "The run ran out of memory, no quality figures, measured on cpu, a stand-in for a100; cpu ran out of memory",
        ),
        (samples.empty, "The run is not finished: there is no verdict yet, no quality figures"),
    ],
)
def test_the_verdict_in_one_plain_line(build: Callable[[], Report], line: str) -> None:
    assert view.verdict_line(build()) == line


def test_no_gain_and_memory_are_told_in_their_own_words() -> None:
    report = samples.ok_stand_in()
    report.verdict, report.speedup = "no_gain", {"vs_baseline": samples.ratio(1.01), "vs_compiled_baseline": None}
    assert view.headline(report) == "No measurable gain over the baseline as loaded: 1.01x (0.99 to 1.03)"
    report.verdict, report.speedup = "ok", {"vs_baseline": Ratio(value=1.8, low=1.8, high=1.8, unit="memory")}
    assert view.headline(report) == "1.80x less peak memory than the baseline as loaded"


@EVERY
def test_the_page_loads_nothing_and_runs_nothing(build: Callable[[], Report]) -> None:
    page = Page(html.render(build()))
    assert not {tag for tag, _ in page.tags} & {"script", "img", "link", "iframe", "object", "a", "form"}
    for _, attributes in page.tags:
        assert not {"src", "href", "srcset", "action"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
    assert "url(" not in CSS and "@import" not in CSS
    assert any(a.get("http-equiv") == "Content-Security-Policy" and "default-src 'none'" in (a.get("content") or "") for _, a in page.tags)


def test_hostile_text_is_shown_as_text() -> None:
    page = Page(html.render(samples.hostile()))
    assert page.text.count("<script>alert(1)</script>") > 10
    harmless = Page(html.render(samples.ok_stand_in()))
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in harmless.tags}
    text = markdown.render(samples.hostile())
    outside_fences = re.sub(r"(`{3,})\n.*?\n\1", "", text, flags=re.DOTALL)
    assert "<" not in outside_fences and "[x](" not in outside_fences
    assert "[red]x[/red]" in html.render(samples.hostile())


@EVERY
def test_every_figure_on_the_page_is_labelled(build: Callable[[], Report]) -> None:
    report = build()
    quoted = [
        report.target.get("description"),
        report.baseline_reason,
        (report.error or {}).get("message"),
    ]  # names and sentences, not figures
    for block in Page(html.render(report)).blocks:
        own = re.sub("|".join(re.escape(text) for text in quoted if text) or "$^", "", block)
        assert LABEL.search(own) or not FIGURE.search(own), own


@EVERY
def test_every_section_of_the_markdown_with_figures_is_labelled(build: Callable[[], Report]) -> None:
    for section in re.split(r"^#+ ", markdown.render(build()), flags=re.MULTILINE):
        assert LABEL.search(section) or not FIGURE.search(section), section


def test_predictions_are_never_drawn_as_measurements() -> None:
    page = html.render(samples.ok_stand_in())
    section = next(part for part in page.split("<section") if "What else could run there" in part)
    assert section.startswith(' class="card dashed">') and "rail hollow" in section and 'class="rail"' not in section
    assert "measured on" not in section
    uses = re.findall(r'class="who">(quantize/\w+)', section)
    assert uses == ["quantize/int4_weight", "quantize/int8_dynamic", "quantize/int8_weight"]


def test_nulls_are_written_as_not_available() -> None:
    text = Page(html.render(samples.incomplete())).text
    assert "the baseline does not fit: 28.1 GB needed, 16 GB free" in text
    assert "n/a" in text and "None" not in text and "nan" not in text.lower().split()
    assert "None" not in shown(samples.incomplete(), 140) and "None" not in markdown.render(samples.incomplete())


@pytest.mark.case("B17")
def test_b17_an_artifact_that_grew_is_warned_about_everywhere() -> None:
    report = samples.ok_stand_in()
    report.artifact = {"path": "artifact", "bytes": 3, "warnings": ["not smaller: tie broken: head.weight"]}
    for text in (html.render(report), markdown.render(report), shown(report, 140)):
        assert "not smaller: tie broken: head.weight" in text


def test_the_waterfall_is_to_scale() -> None:
    bars = charts.waterfall(samples.ok_stand_in())
    assert [bar.row.name for bar in bars] == ["baseline", "compile", "fuse", "weights"]
    full = 143.0 * 1.06
    assert [bar.width for bar in bars] == pytest.approx([100 * t / full for t in (143.0, 129.0, 121.3, 88.4)], abs=0.01)
    last = bars[-1]
    assert last.change_left == pytest.approx(last.width) and last.change_width == pytest.approx(100 * (121.3 - 88.4) / full, abs=0.01)
    assert last.tone == "good" and last.low < last.width < last.high
    assert last.low == pytest.approx(last.width / 1.02, abs=0.02)
    slow = charts.waterfall(samples.regression())[-1]
    assert slow.tone == "bad" and slow.change_left == pytest.approx(100 * 121.3 / (151.7 * 1.06), abs=0.01)


def test_a_dropped_step_is_no_base_for_the_next() -> None:
    report = samples.ok_stand_in()
    report.steps[1].kept = False
    assert charts.waterfall(report)[-1].change_width == pytest.approx(100 * (129.0 - 88.4) / (143.0 * 1.06), abs=0.01)
    assert "dropped from the result" in html.render(report)


def test_the_roofline_needs_a_published_peak() -> None:
    assert charts.rooflines(samples.ok_stand_in())[0] == "n/a: no published peak for this device"
    assert "n/a: no published peak for this device" in html.render(samples.ok_stand_in())
    measured, predicted = charts.rooflines(samples.on_target())
    assert isinstance(measured, charts.Roofline) and isinstance(predicted, charts.Roofline)
    assert measured.peak == "bf16 peak 989 TFLOP/s" and measured.bandwidth == "memory 4.80 TB/s"
    assert [point.text for point in measured.points] == ["22.3 TFLOP/s", "53.1 TFLOP/s"]  # 69 GFLOP in 3.1 and in 1.3 ms
    roof_top = min(float(corner.split(",")[1]) for corner in measured.roof.split())
    assert all(point.y > roof_top and not point.predicted for point in measured.points)
    assert all(point.predicted for point in predicted.points)


def test_energy_per_token() -> None:
    row = Measurement(latency_ms={"p50": 2.0}, tokens_per_s=128_000.0, energy_j=0.64)
    assert view.energy_per_token_j(row) == pytest.approx(0.64 / 256)
    assert view.energy_per_token_j(Measurement(latency_ms={"p50": 2.0}, tokens_per_s=5.0)) is None
    assert "3.12 mJ" in html.render(samples.on_target())  # 0.8 J over 256 tokens
    assert "Energy" not in Page(html.render(samples.ok_stand_in())).text


def test_differences_of_generations_are_marked() -> None:
    left, right = diff.words("the cat sat here", "the dog sat  here")
    assert "".join(text for text, _ in left) == "the cat sat here" and "".join(text for text, _ in right) == "the dog sat  here"
    assert [text for text, changed in left if changed] == ["cat", " "]
    assert [text for text, changed in right if changed] == ["dog", "  "]
    assert diff.words("", "") == ([], [])
    assert "<mark>completing the square.</mark>" in html.render(samples.ok_stand_in())


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("latency_ms", 0.0312, "0.0312 ms"),
        ("latency_ms", 1234.5, "1,234 ms"),
        ("weight_bytes", 269_060_352, "269 MB"),
        ("weight_bytes", 999, "999 B"),
        ("bandwidth_bytes_per_s", 4.8e12, "4.80 TB/s"),
        ("flops", 6.9e10, "69.0 GFLOP"),
        ("tokens_per_s", 888_889.0, "889,000 tokens/s"),
        ("mfu", 0.6123, "61.2%"),
        ("mfu", None, "n/a"),
        ("kl", float("nan"), "n/a"),
        ("predicted_speedup", 1.5, "1.50x"),
        ("compile_s", 200.4, "3 min 20 s"),
        ("count", 4096, "4,096"),
        ("is_target", False, "no"),
        ("max_kl", 0.05, "0.05"),
    ],
)
def test_figures_carry_their_units(name: str, value: object, text: str) -> None:
    assert figures.named(name, value) == text


def _contrast(first: str, second: str) -> float:
    """WCAG 2.2 contrast ratio of two #rrggbb colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa(scheme: int) -> None:
    blocks = re.findall(r":root \{(.*?)\}", CSS, flags=re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", blocks[scheme]))
    pairs = [(text, back) for text in ("ink", "soft", "good", "bad", "warn") for back in ("card", "page")]
    pairs += [
        ("good", "good-fill"),
        ("bad", "bad-fill"),
        ("warn", "warn-fill"),
        ("ink", "bad-fill"),
        ("ink", "good-fill"),
        ("ink", "warn-fill"),
    ]
    pairs += [("soft", "fill"), ("ink", "fill"), ("mark-ink", "mark")]
    assert {
        pair: _contrast(colours[pair[0]], colours[pair[1]]) for pair in pairs if _contrast(colours[pair[0]], colours[pair[1]]) < 4.5
    } == {}


@EVERY
@pytest.mark.parametrize("width", [80, 140])
def test_the_terminal_shows_every_report(build: Callable[[], Report], width: int) -> None:
    report = build()
    text = shown(report, width)
    assert view.BADGES[report.verdict] in text and "measured on" in text
    table = text[text.index("row ") :].splitlines()[: 2 + len(report.steps)] if report is not None else []
    assert all(len(line.rstrip()) <= width for line in table)


def test_a_piped_report_keeps_long_lines_whole() -> None:
    lines = shown(samples.failed_quality(), 40).splitlines()
    assert any(view.verdict_line(samples.failed_quality()) in line for line in lines)


def test_the_plan_in_a_terminal_tolerates_missing_keys() -> None:
    console = Console(file=io.StringIO(), width=140)
    terminal.print_plan({}, console)
    plan = {
        "order": [
            {"name": "weights", "use": "quantize/fp8_weight", "moved": "fuse comes first"},
            {"name": "c[x]", "use": "compile/inductor"},
        ],
        "selected": [{"step": "weights", "touched": 210, "skipped": 1, "ignored": 2}],
        "bytes": [{"step": "baseline", "weight_bytes": 269_060_352}, {"step": "weights", "weight_bytes": 163_000_000}],
        "predicted": {"baseline": {"latency_ms": 0.41}, "steps": [{"name": "weights", "latency_ms": None}]},
        "downgrades": [
            {
                "step": "weights",
                "requested": "quantize/fp8_dynamic",
                "runs_as": "quantize/fp8_weight",
                "reason": "a100 has no fp8 matrix units: fp8_dynamic runs as fp8_weight",
            }
        ],
        "warnings": ["look [here]"],
        "target": {"name": "a100"},
        "device": {"name": "cpu", "is_target": False},
    }
    terminal.print_plan(plan, console)
    text = console.file.getvalue()
    for part in (
        "measured on cpu, a stand-in for a100",
        "210",
        "163 MB",
        "(0.410 ms)",
        "fp8_dynamic runs as",
        "look [here]",
        "c[x]",
        "fuse comes first",
    ):
        assert part in text


def test_progress_names_stages_and_failures_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), width=20)
    with terminal.Progress(console) as progress:
        with progress.stage("load a model with a long [name]", total=2):
            progress.advance()
            progress.note("quality of weights")
        with pytest.raises(ValueError, match="broken"), progress.stage("second"):
            raise ValueError("broken")
    lines = console.file.getvalue().splitlines()
    assert lines[0].strip() == "quality of weights"
    assert re.fullmatch(r"done load a model with a long \[name\] <0.01 s", lines[1])
    assert re.fullmatch(r"failed second <0.01 s", lines[2])
