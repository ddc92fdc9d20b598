"""What a million tokens (or items) cost: the user's own price per hour over the throughput.

The price belongs to the target. So a throughput that was measured on a stand-in has no cost, and the cost that follows
from a predicted throughput is itself a prediction.
"""

from __future__ import annotations

from optforge.report import figures
from optforge.spec import Json, Measurement, Report

MILLION, SECONDS_PER_HOUR = 1e6, 3600


def per_million(rate_per_s: Json, price_per_hour: Json) -> float | None:
    """Price of a million units at `rate_per_s` units a second, the machine paid by the hour; None where either is unknown."""
    if not (figures.exists(rate_per_s) and figures.exists(price_per_hour)) or rate_per_s <= 0:
        return None
    return float(price_per_hour) * MILLION / (float(rate_per_s) * SECONDS_PER_HOUR)


def priced(report: Report) -> bool:
    """Whether the user gave the target's price."""
    return figures.exists(report.target.get("price_per_hour"))


def measured(report: Report, row: Measurement | None) -> float | None:
    """Cost of a million units at a measured throughput; None on a stand-in."""
    if row is None or report.device.get("is_target") is False:
        return None
    rate = row.tokens_per_s if row.tokens_per_s is not None else row.items_per_s
    return per_million(rate, report.target.get("price_per_hour"))


def predicted(report: Report, values: Json) -> float | None:
    """Cost of a million units at the throughput that was predicted for the target."""
    rate = values.get("tokens_per_s") if values.get("tokens_per_s") is not None else values.get("items_per_s")
    return per_million(rate, report.target.get("price_per_hour"))


def text(report: Report, value: float | None) -> str:
    """`0.421 EUR`, or n/a."""
    if value is None:
        return figures.NONE
    currency = report.target.get("currency")
    return f"{figures.significant(value)} {currency}" if currency else figures.significant(value)


def title(report: Report) -> str:
    """Head of a column of costs: `cost per M tokens`."""
    return f"cost per M {report.workload.get('unit') or 'units'}"
