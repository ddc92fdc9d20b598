"""Runs side by side: what each reached, which are better, and what tells them apart.

    load        what was typed -> the runs it means
    metrics     the figures that runs are compared by
    conditions  what must be alike before figures may stand in one ranking
    settings    in which settings runs differ, and what each is called
    ranking     places with ties, and the Pareto front
    comparison  all of it together, as rows
    table       the rows in a terminal, in Markdown, csv and json
    page        the rows on a page, with plots and filters

No torch is loaded: comparing works where nothing can be run.
"""

from optforge.compare.comparison import Comparison, compare
from optforge.compare.load import Entry, Loaded, load

__all__ = ["Comparison", "Entry", "Loaded", "compare", "load"]
