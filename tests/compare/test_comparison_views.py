"""The table, Markdown, csv and JSON say what the reports say, and nothing is ranked that must not be."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from fleets import Compare, Tree, faster, fleet, named, settings, write
from rich.console import Console

from optforge.compare import Comparison, compare, load, page, records, table
from optforge.errors import ConfigError

WITHIN_S = 10.0


def _terminal(comparison: Comparison, width: int = 400) -> str:
    console = Console(file=io.StringIO(), width=width)
    table.show(comparison, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _csv(comparison: Comparison) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(records.to_csv(comparison))))


def _strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_csv_and_json_hold_the_reports_own_figures(five: Comparison) -> None:
    for lines in (_csv(five), _strict(records.to_json(five))["rows"]):
        measured = [line for line in lines if line["figures"] == "measured"]
        assert len(measured) == 5
        for line in measured:
            tree = named(line["recipe"])
            best = tree["optimized"]
            ratio = tree["speedup"]["vs_compiled_baseline"] or tree["speedup"]["vs_baseline"] or {"value": None}
            expected = {
                "latency_ms": best["latency_ms"]["p50"],
                "latency_p90_ms": best["latency_ms"]["p90"],
                "tokens_per_s": best["tokens_per_s"],
                "peak_memory_bytes": best["peak_memory_bytes"],
                "weight_bytes": best["weight_bytes"],
                "kl": tree["quality"]["kl"] if tree["quality"] else None,
                "perplexity_increase": tree["quality"]["perplexity_increase"] if tree["quality"] else None,
                "speedup": ratio["value"],
                "reference_ms": (tree["compiled_baseline"] or tree["baseline"])["latency_ms"]["p50"],
            }
            found = {key: float(line[key]) if line[key] not in ("", None) else None for key in expected}
            assert found == pytest.approx(expected)


def test_predicted_figures_are_ranked_apart_and_labelled(five: Comparison) -> None:
    predicted = named("llama_fp8")["predicted"]["optimized"]["latency_ms"]
    lines = _csv(five)
    assert [line["place"] for line in lines if line["figures"] == "measured"] == ["1", "2", "3", "4", "5"]
    (guess,) = [line for line in lines if line["figures"] == "predicted"]
    assert float(guess["latency_ms"]) == predicted < min(float(line["latency_ms"]) for line in lines if line["figures"] == "measured")
    assert guess["place"] == "1" and guess["target"] == "a100"
    assert guess["kl"] == guess["speedup"] == guess["verdict"].replace("regression", "") == ""
    text = _terminal(five)
    assert "Predicted for a100, lowest latency first; never ranked with measured figures" in text
    measured, _, after = text.partition("Predicted for")
    assert "(0.357 ms)" in after and "0.357" not in measured
    assert "## Predicted for a100" in table.to_markdown(five)


def test_predictions_share_a_place_within_their_error_band_and_say_what_they_lack(side_by_side: Compare) -> None:
    trees = []
    for name, low, ms, high in (("first", 0.3, 0.4, 0.5), ("second", 0.45, 0.6, 0.8), ("third", 0.7, 0.9, 1.2)):
        tree = named("llama_fp8")
        tree["recipe"]["name"] = name
        tree["predicted"]["optimized"].update(latency_ms=ms, low_ms=low, high_ms=high, tokens_per_s=256_000 / ms)
        trees.append(tree)
    trees[2]["predicted"]["optimized"].update(partial=True, fits=False, basis="another")
    found = side_by_side(*trees)
    assert [(row.name, row.place) for row in found.predicted] == [("first", 1), ("second", 1), ("third", 3)]
    notes = "; ".join(found.notes)
    assert "not all made the same way: another; roofline" in notes
    assert "lower bounds, since some work could not be counted: third" in notes
    assert "not to fit the target's memory: third" in notes


def test_a_stand_in_is_named_at_every_figure_of_its_own(five: Comparison) -> None:
    (line,) = [line for line in _terminal(five).splitlines() if line.split()[1:2] == ["llama_fp8"] and "regression" in line]
    assert "cpu, a stand-in for a100" in line
    (row,) = [line for line in table.to_markdown(five).splitlines() if "| llama\\_fp8 | regression" in line]
    assert "a stand-in for a100" in row


@pytest.mark.case("B102")
def test_the_order_of_the_runs_changes_no_figure_and_no_place(five: Comparison) -> None:
    entries = [row.entry for row in five.measured]
    for order in (entries, entries[::-1], entries[2:] + entries[:2]):
        assert records.to_csv(compare(order)).splitlines()[1:] == records.to_csv(five).splitlines()[1:]


@pytest.mark.case("B45")
def test_a_slower_run_is_a_regression_with_both_times_and_the_ratio(five: Comparison) -> None:
    tree = named("llama_fp8")
    assert tree["speedup"]["vs_compiled_baseline"]["value"] < 1
    (line,) = [line for line in _terminal(five).splitlines() if "stand-in for a100" in line and "regression" in line]
    assert "239 ms" in line and "120 ms" in line and "0.49x (0.49 to 0.50)" in line


def test_a_ratio_of_memory_is_not_shown_as_one_of_time(five: Comparison) -> None:
    """The int4 recipe is for memory: its 1.11x is memory, while it is slower than its reference."""
    (line,) = [line for line in _terminal(five).splitlines() if "llama_int4" in line and "ms" in line]
    assert "1.11x memory" in line


def test_by_ranks_by_what_was_asked_for(side_by_side: Compare) -> None:
    trees = [named(name) for name in ("llama_int8", "llama_int4", "llama_bf16")]
    sizes = sorted(tree["optimized"]["weight_bytes"] for tree in trees)
    found = side_by_side(*trees, by="size")
    assert [row.values["size"].value for row in found.measured] == sizes
    drops = sorted(tree["quality"]["perplexity_increase"] for tree in trees)
    assert [row.values["quality"].value for row in side_by_side(*trees, by="quality").measured] == drops
    with pytest.raises(ConfigError, match="no figure 'latancy'; did you mean latency"):
        side_by_side(*trees, by="latancy")
    with pytest.raises(ConfigError, match=r"hardware\.price_per_hour"):
        side_by_side(*trees, by="cost")


def test_the_goal_that_all_recipes_share_ranks_them(side_by_side: Compare) -> None:
    assert side_by_side(named("llama_int4"), named("llama_int4")).by.key == "memory"
    assert side_by_side(named("llama_int4"), named("llama_int8")).by.key == "latency"


def _priced(tree: Tree, price: float, currency: str | None = "EUR") -> Tree:
    return {**tree, "target": {**tree["target"], "price_per_hour": price, "currency": currency}}


def test_cost_per_million_by_hand(side_by_side: Compare) -> None:
    """3.6 an hour is 0.001 a second; at 2,985.9 tokens a second a million takes 334.9 s."""
    found = side_by_side(_priced(named("llama_int8"), 3.6), _priced(named("llama_bf16"), 3.6), by="cost")
    assert found.measured[0].values["cost"].value == pytest.approx(1e6 / 2985.8779868081574 * 0.001)
    assert "0.335 EUR" in _terminal(found)
    assert "cost per M tokens" in table.to_markdown(found)
    assert "0.335 EUR" in page.render(found)
    assert _csv(found)[0]["currency"] == "EUR"


def test_a_stand_in_has_no_cost_and_its_target_a_predicted_one(side_by_side: Compare) -> None:
    tree = named("llama_fp8")
    rate = tree["predicted"]["optimized"]["tokens_per_s"]
    found = side_by_side(_priced(tree, 2.0, None))
    assert "cost" not in found.measured[0].values
    assert found.predicted[0].values["cost"].value == pytest.approx(2.0 / 3600 * 1e6 / rate)


def test_names_are_made_of_what_tells_the_runs_apart(side_by_side: Compare) -> None:
    trees = []
    for recipe, group, rounds in (("llama_int8", 32, 8), ("llama_int8", 64, 8), ("llama_int4", 64, 8), ("llama_int4", 64, 8)):
        tree = named(recipe)
        tree["settings"] = settings(tree, recipe__steps__weights__group_size=group, measure__min_rounds=rounds)
        trees.append(tree)
    found = side_by_side(*trees)
    assert sorted(found.settings) == [
        "llama_int4 group_size=64 #1",
        "llama_int4 group_size=64 #2",
        "llama_int8 group_size=32",
        "llama_int8 group_size=64",
    ]
    assert found.deciding == ["recipe.name", "steps.weights.group_size"]
    assert {"recipe.goal", "steps.weights.use", "recipe.limits.max_kl"} <= set(found.differing) - set(found.deciding)


@pytest.mark.case("B138")
def test_failures_are_listed_with_their_reason_and_counted_by_it(side_by_side: Compare) -> None:
    good = named("llama_int8")
    failed = [{**good, "status": "failed", "verdict": "failed", "optimized": None, "reason": "boom"} for _ in range(3)]
    found = side_by_side(good, *failed)
    assert "3 without figures: failed: boom" in _terminal(found)
    assert [line["reason"] for line in _csv(found)[1:]] == ["boom"] * 3
    assert len(_strict(records.to_json(found))["failed"]) == 3
    assert "failed: boom" in page.render(found)


def test_nothing_but_failures_is_still_a_comparison(side_by_side: Compare) -> None:
    tree = {**named("llama_int8"), "status": "failed", "verdict": "failed", "optimized": None, "reason": "boom"}
    found = side_by_side(tree, tree)
    assert "2 without figures: failed: boom" in _terminal(found)
    assert "No run was measured to the end" in page.render(found)
    assert len(_csv(found)) == 2
    assert _strict(records.to_json(found))["rows"] == []


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, float]:
    """300 runs, and the seconds it took to compare and to draw them."""
    folder = tmp_path_factory.mktemp("fleet")
    for index, tree in enumerate(fleet(300)):
        write(tree, folder / str(index))
    start = time.process_time()
    found = compare(load([str(folder)], cwd=Path.cwd()).entries)
    for make in (_terminal, table.to_markdown, records.to_csv, records.to_json, page.render):
        make(found)
    return found, time.process_time() - start


def test_300_runs_in_under_ten_seconds(many: tuple[Comparison, float]) -> None:
    """Time of this process alone, so that a busy machine does not decide; the command's wall time stands in docs/log.md."""
    found, seconds = many
    assert len(found.measured) == 300
    assert seconds < WITHIN_S


def test_300_names_differ_and_places_follow_the_figures(many: tuple[Comparison, float]) -> None:
    found, _ = many
    assert len(set(found.settings)) == 300
    latencies = [row.values["latency"].value for row in found.measured]
    assert latencies == sorted(latencies)
    places = [row.place or 0 for row in found.measured]
    assert places == sorted(places) and places[0] == 1
    assert all(place <= index for index, place in enumerate(places, 1))


def test_a_terminal_shows_the_best_forty_and_says_how_many_more(many: tuple[Comparison, float]) -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    table.show(many[0], console)
    assert isinstance(console.file, io.StringIO)
    assert "and 260 more rows" in console.file.getvalue()


def test_markdown_and_csv_have_a_line_for_each_of_300(many: tuple[Comparison, float]) -> None:
    assert len(_csv(many[0])) == 360  # 60 of them are for an A100 and have a prediction
    assert sum(line.startswith("| ") for line in table.to_markdown(many[0]).splitlines()) == 360 + 4


def test_faster_copies_scale_as_they_say() -> None:
    """The fleet's own arithmetic, since the figures above rest on it."""
    tree = named("llama_int8")
    twice = faster(tree, 2)
    assert twice["optimized"]["latency_ms"]["p50"] == tree["optimized"]["latency_ms"]["p50"] / 2
    assert twice["speedup"]["vs_compiled_baseline"]["value"] == tree["speedup"]["vs_compiled_baseline"]["value"] * 2
