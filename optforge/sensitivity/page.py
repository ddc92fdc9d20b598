"""The findings as one page without script: advice, a map of the layers, what leaving layers out buys, and the whole table.

The map has a row for each kind of layer and a column for each block, darker where rounding costs more. Positions and colours are
worked out here; the template draws them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from optforge import __version__
from optforge.report import figures
from optforge.sensitivity import record
from optforge.sensitivity.findings import Layer, Sensitivity

CELL, GAP, LEFT, HEAD = 18, 2, 130, 18
"""Size of a cell of the map, the space between two, the room for the rows' names and for the columns' numbers."""
CURVE_WIDTH, CURVE_HEIGHT, MARGIN = 620, 260, 54


@cache
def _environment() -> Environment:
    """The template of this package, and the report page's style sheet, so that both look alike."""
    loader = ChoiceLoader([PackageLoader("optforge.sensitivity"), PackageLoader("optforge.report")])
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.globals.update(record=record, figures=figures)
    return found


def render(found: Sensitivity) -> str:
    """The page as HTML text. Every string is escaped; the page loads nothing and runs nothing."""
    drawn = [(scheme, layer_map(found, scheme), curve(found, scheme)) for scheme in found.schemes]
    return _environment().get_template("sensitivity.html.j2").render(f=found, drawn=drawn, headline=headline(found), version=__version__)


def headline(found: Sensitivity) -> str:
    """The verdict on the best of the schemes, in words."""
    free = [one for one in found.advice if one.within]
    if free:
        best = min(free, key=lambda one: one.weight_bytes)
        return f"Every layer bears {best.scheme}"
    part = [(left.weight_bytes, one.scheme, len(left.layers)) for one in found.advice if (left := one.best) is not None]
    if not part:
        return "No layer bears any of these schemes within the limits"
    _, scheme, count = min(part)
    return f"{scheme} is within the limits when {count} layers are left out"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One layer on the map. `weight` is how dark it is, from 0 to 1."""

    x: float
    y: float
    weight: float
    left_out: bool
    title: str


@dataclass(frozen=True, kw_only=True)
class Map:
    width: float
    height: float
    cells: list[Cell]
    rows: list[tuple[float, str]]
    """y and name of each row."""
    columns: list[tuple[float, str]]
    scale: list[tuple[float, str]]
    """Darkness and cost of the steps of the legend."""


def layer_map(found: Sensitivity, scheme: str) -> Map:
    """Rows are kinds of layers (the path without numbers), columns are the numbers."""
    pairs = record.worst_first(found, scheme)
    out = record.left_out(found, scheme)
    costs = [max(figure.cost, 1e-12) for _, figure in pairs]
    high = math.log10(max(costs, default=1.0))
    low = min(max(math.log10(min(costs, default=1.0)), high - 4), high - 1)
    names = [layer.name for layer in found.layers if scheme in layer.figures]
    kinds = list(dict.fromkeys(_place(name)[0] for name in names))
    numbers = sorted({_place(name)[1] for name in names})
    cells = [
        Cell(
            x=LEFT + numbers.index(_place(layer.name)[1]) * (CELL + GAP),
            y=HEAD + kinds.index(_place(layer.name)[0]) * (CELL + GAP),
            weight=round(min(1.0, max(0.0, (math.log10(max(figure.cost, 1e-12)) - low) / (high - low))), 3),
            left_out=layer.name in out,
            title=_title(found, scheme, layer),
        )
        for layer, figure in pairs
    ]
    every = max(1, len(numbers) // 15)
    return Map(
        width=LEFT + max(len(numbers), 8) * (CELL + GAP),
        height=HEAD + len(kinds) * (CELL + GAP) + 4,
        cells=cells,
        rows=[(HEAD + index * (CELL + GAP) + 13, kind.rpartition(".")[2]) for index, kind in enumerate(kinds)],
        columns=[
            (LEFT + index * (CELL + GAP) + CELL / 2, str(number))
            for index, number in enumerate(numbers)
            if number >= 0 and number % every == 0
        ],
        scale=[(step / 4, record.number(10 ** (low + (high - low) * step / 4))) for step in range(5)],
    )


def _title(found: Sensitivity, scheme: str, layer: Layer) -> str:
    figure = layer.figures[scheme]
    said = f"{layer.name}: {found.unit} {record.number(figure.cost)}, {figures.percent(layer.share)} of the weights"
    if figure.measured_cost is not None:
        said += f", measured {record.number(figure.measured_cost)}"
    return said + (", left out" if layer.name in record.left_out(found, scheme) else "")


def _place(name: str) -> tuple[str, int]:
    """Path without its first number, and that number; -1 where there is none."""
    parts = name.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    if at is None:
        return name, -1
    return ".".join([*parts[:at], *parts[at + 1 :]]), int(parts[at])


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Cost over the bytes that are saved, layers added cheapest first; in the drawing's coordinates."""

    line: str
    points: list[tuple[float, float, str]]
    """Where the lists to paste stand, each with its words."""
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


def curve(found: Sensitivity, scheme: str) -> Curve:
    """The sum of estimated costs against the size of all weights, from nothing rounded to everything rounded."""
    pairs = [(figure.cost, figure.saved_bytes, layer.name) for layer, figure in record.worst_first(found, scheme)]
    pairs.sort(key=lambda pair: pair[0] / max(pair[1], 1))
    full = float(found.weight_bytes)
    points = [(full, 0.0)]
    for cost, saved, _ in pairs:
        points.append((points[-1][0] - saved, points[-1][1] + cost))
    most, span = max(points[-1][1], 1e-12), max(full - min(size for size, _ in points), 1.0)

    def at(size: float, cost: float) -> tuple[float, float]:
        x = MARGIN + (full - size) / span * (CURVE_WIDTH - MARGIN - 20)
        return round(x, 1), round(CURVE_HEIGHT - 36 - cost / most * (CURVE_HEIGHT - 60), 1)

    advised = next(one for one in found.advice if one.scheme == scheme)
    dots = [
        (*at(left.weight_bytes, sum(cost for cost, _, name in pairs if name not in set(left.layers))), words)
        for left, words in record.choices(advised)
    ]
    steps = [index / 4 for index in range(5)]
    return Curve(
        line=" ".join(f"{x},{y}" for x, y in (at(*point) for point in _thinned(points))),
        points=dots,
        x_ticks=[(at(full - span * step, 0)[0], figures.nbytes(full - span * step)) for step in steps],
        y_ticks=[(at(full, most * step)[1], record.number(most * step) if step else "0") for step in steps],
    )


def _thinned(points: Sequence[tuple[float, float]], most: int = 200) -> list[tuple[float, float]]:
    """At most so many of the points, the last among them."""
    every = max(1, len(points) // most)
    return [*points[:-1:every], points[-1]]
