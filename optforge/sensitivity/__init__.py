"""Which layers bear being rounded, and which do not.

measure     one pass of gradients for all layers and schemes, checked by measuring the worst of them and the whole
advice      the layers to leave out, as few bytes as the limits allow, in the shortest spelling
record      the findings as JSON, csv, Markdown and rows for a terminal
page        one page with a map of the layers
"""

from __future__ import annotations
