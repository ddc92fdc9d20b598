"""The report as one self-contained page: no script, no font, no picture and no request, so it opens anywhere.

The template holds the layout, `view` the words and rows, `charts` the geometry.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from optforge.report import charts, cost, diff, figures, losses, view
from optforge.spec import Report

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # who only reads reports needs no templates

    found = Environment(
        loader=PackageLoader("optforge.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    found.globals.update(view=view, figures=figures, charts=charts, cost=cost, diff=diff, losses=losses)
    return found


def render(report: Report) -> str:
    """The page as HTML text. Every string of the report is escaped; the page loads nothing and runs nothing."""
    return _environment().get_template("page.html.j2").render(r=report)
