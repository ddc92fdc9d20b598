"""Writes a figure the way a reader expects it, from the unit that its name carries.

The same figure looks the same in the terminal, in Markdown and on the page. What does not exist is `n/a`, never 0.
"""

from __future__ import annotations

import math

from optforge.spec import Json, Ratio

NONE = "n/a"
FRACTIONS = ("mfu", "mbu", "agreement", "top1", "baseline_top1", "top1_drop", "perplexity_increase", "share")
"""Names of figures that are fractions of one and read better in percent."""


def exists(value: Json) -> bool:
    """Whether there is a figure: neither null nor NaN."""
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def significant(value: float, digits: int = 3) -> str:
    """`value` to so many significant digits, with thousands separators and without an exponent where it can be read."""
    if not exists(value):
        return NONE
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size < -4 or size > 14:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - size)}f}"


def rounded(value: float) -> str:
    """`value` to three significant digits, zeros after them: `889,000`."""
    return significant(float(f"{value:.3g}"))


def milliseconds(value: Json) -> str:
    return f"{significant(value)} ms" if exists(value) else NONE


def nbytes(value: Json) -> str:
    """Bytes in the largest decimal unit that gives at least 1: `134 MB`."""
    if not exists(value):
        return NONE
    amount = float(value)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(amount) < 1000:
            return f"{significant(amount)} {unit}"
        amount /= 1000
    return f"{significant(amount)} TB"


def rate(value: Json, unit: str) -> str:
    """A rate with a metric prefix: `782 TFLOP/s`."""
    return f"{prefixed(value)}{unit}" if exists(value) else NONE


def count(value: Json) -> str:
    """A large count in words: `135 M`."""
    return prefixed(value).rstrip() if exists(value) else NONE


def prefixed(value: float, digits: int = 3) -> str:
    """A number and its metric prefix: `782 T`, ready for a unit."""
    amount = float(value)
    for prefix in ("", "k", "M", "G", "T"):
        if abs(amount) < 1000:
            return f"{significant(amount, digits)} {prefix}"
        amount /= 1000
    return f"{significant(amount, digits)} P"


def percent(value: Json, *, signed: bool = False) -> str:
    """A fraction as percent; with `signed`, a difference: `+0.7%`."""
    if not exists(value):
        return NONE
    return f"{value * 100:+.1f}%" if signed else f"{value * 100:.1f}%"


def seconds(value: Json) -> str:
    """A duration: `0.42 s`, `12.3 s`, `3 min 20 s`."""
    if not exists(value):
        return NONE
    if value < 0.01:
        return "<0.01 s" if value > 0 else "0 s"
    if value < 120:
        return f"{significant(value)} s" if value >= 0.1 else f"{value:.2f} s"
    return f"{int(value // 60)} min {int(value % 60)} s"


def ratio(value: Ratio | None, *, interval: bool = True) -> str:
    """`1.46x (1.44 to 1.48)`: times better, with its 95% interval."""
    if value is None or not exists(value.value):
        return NONE
    text = f"{value.value:.2f}x"
    return f"{text} ({value.low:.2f} to {value.high:.2f})" if interval and exists(value.low) and exists(value.high) else text


def named(name: str, value: Json) -> str:
    """Any figure by its name: the unit is read off the last part (`_ms`, `_bytes`, `_per_s`, `mfu`, `speedup`)."""
    key = name.rsplit(".", 1)[-1]
    if not exists(value):
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return ", ".join(str(item) for item in value) if isinstance(value, list) else str(value)
    return _unit(key, value)


def _unit(key: str, value: float) -> str:  # noqa: PLR0911  one line per unit reads better than a table of lambdas
    if key.endswith("bytes_per_s"):
        return rate(value, "B/s")
    if key.endswith(("flops", "flops_per_s")):
        return rate(value, "FLOP/s" if key.endswith("_s") else "FLOP")
    if key.endswith("bytes"):
        return nbytes(value)
    if key.endswith("_ms"):
        return milliseconds(value)
    if key.endswith("_per_s"):
        return f"{rounded(value)} {key.removesuffix('_per_s').replace('_', ' ')}/s"
    if key.endswith(("seconds", "_s")):
        return seconds(value)
    if key.endswith("speedup"):
        return f"{value:.2f}x"
    if key in FRACTIONS or key.endswith("_share"):
        return percent(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
