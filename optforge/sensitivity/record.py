"""The findings as JSON, csv and Markdown, and as rows for a terminal: the same words and figures in all of them."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from dataclasses import asdict

from optforge.report import figures
from optforge.sensitivity.findings import Advice, Figure, Layer, Left, Sensitivity
from optforge.spec import Json, QualityResult

SCHEMA_VERSION = 1
SHOWN = 12
"""Layers that a terminal shows."""
COLUMNS = (
    "layer",
    "shape",
    "bytes",
    "share",
    "scheme",
    "estimated_cost",
    "estimated_perplexity_change",
    "sqnr_db",
    "saved_bytes",
    "measured_cost",
    "measured_perplexity_change",
    "left_out",
    "skipped",
)


def to_json(found: Sensitivity) -> str:
    """Everything, as strict JSON."""
    return json.dumps({"schema_version": SCHEMA_VERSION, **_finite(asdict(found))}, indent=1, allow_nan=False) + "\n"


def _finite(value: Json) -> Json:
    """The same with null for what is not finite."""
    if isinstance(value, dict):
        return {key: _finite(own) for key, own in value.items()}
    if isinstance(value, list):
        return [_finite(own) for own in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_csv(found: Sensitivity) -> str:
    """A line for each layer and scheme."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    out = {scheme: left_out(found, scheme) for scheme in found.schemes}
    for layer in found.layers:
        own = {"layer": layer.name, "shape": "x".join(map(str, layer.shape)), "bytes": layer.bytes, "share": layer.share}
        for scheme in found.schemes:
            figure = layer.figures.get(scheme)
            if figure is None:
                writer.writerow({**own, "scheme": scheme, "skipped": layer.skipped.get(scheme, "")})
                continue
            values = {
                "estimated_cost": figure.cost,
                "estimated_perplexity_change": perplexity_change(figure),
                "sqnr_db": figure.sqnr_db,
                "saved_bytes": figure.saved_bytes,
                "measured_cost": figure.measured_cost,
                "measured_perplexity_change": figure.measured_perplexity_change,
                "left_out": layer.name in out[scheme],
            }
            writer.writerow({**own, "scheme": scheme, **values})
    return text.getvalue()


def to_markdown(found: Sensitivity) -> str:
    """Advice first, then the layers, the most sensitive first, one table for each scheme."""
    parts = [f"# Sensitivity of {found.model}", " ".join(lead(found)), "## Layers to leave out"]
    for one in found.advice:
        parts.append(f"**{one.scheme}**: {said(one)}")
        for left, words in choices(one):
            parts += [f"{words[:1].upper()}{words[1:]}:", f"```yaml\n{ignore(left)}\n```"]
    for scheme in found.schemes:
        parts += [f"## {scheme}, layer by layer", _table(HEADS, [tuple(row) for row in rows(found, scheme)])]
    parts += ["## Notes", "\n".join(f"- {note}" for note in notes(found))]
    return "\n\n".join(parts) + "\n"


HEADS = ("layer", "share", "est. cost", "est. ppl", "SQNR dB", "meas. cost", "meas. ppl", "")


def rows(found: Sensitivity, scheme: str) -> Iterator[tuple[str, ...]]:
    """Cells under HEADS, the costliest layer first."""
    out = left_out(found, scheme)
    for layer, figure in worst_first(found, scheme):
        yield (
            layer.name,
            figures.percent(layer.share),
            number(figure.cost),
            change(perplexity_change(figure)),
            "n/a" if figure.sqnr_db is None else f"{figure.sqnr_db:.1f}",
            number(figure.measured_cost) if figure.measured_cost is not None else "",
            change(figure.measured_perplexity_change) if figure.measured_perplexity_change is not None else "",
            "left out" if layer.name in out else "",
        )


def worst_first(found: Sensitivity, scheme: str) -> list[tuple[Layer, Figure]]:
    pairs = [(layer, layer.figures[scheme]) for layer in found.layers if scheme in layer.figures]
    return sorted(pairs, key=lambda pair: -pair[1].cost)


def lead(found: Sensitivity) -> list[str]:
    """What was measured, on what."""
    limits = ", ".join(f"{name} {bound:g}" for name, bound in found.limits.items())
    where = found.device if found.device == found.target else f"{found.device}, a stand-in for {found.target}"
    return [
        f"{len(found.layers)} layers, {found.samples} samples of {found.data}, {found.positions:,} positions, on {where}.",
        f"Limits: {limits}.",
        f"Any change at all makes a KL of {number(found.floor)} here." if found.floor > 0 else "",
    ]


def said(one: Advice) -> str:
    """What comes of rounding all layers."""
    whole = f"every layer rounded: {quality(one.whole)}, weights {figures.nbytes(one.weight_bytes)}"
    if one.within:
        return f"{whole}. Within the limits: nothing has to be left out."
    if one.best is None:
        return f"{whole}. No choice of layers was found within the limits."
    few = (
        ""
        if 2 * len(one.best.layers) <= one.count
        else " Most layers would be left out: another scheme, or algorithm: gptq, may serve better."
    )
    return f"{whole}, over the limits.{few}"


def choices(one: Advice) -> Iterator[tuple[Left, str]]:
    """Each list to paste, and what it gives."""
    for left, words in ((one.fewest, "the fewest layers"), (one.kinds, "whole kinds of layers")):
        if left is not None:
            found = f"{quality(left.quality)}, weights {figures.nbytes(left.weight_bytes)}"
            yield left, f"{words}, {len(left.layers)} of {one.count} left out: {found}"


def ignore(left: Left) -> str:
    """Ready to paste into a step."""
    return f"ignore: [{', '.join(left.ignore)}]"


def left_out(found: Sensitivity, scheme: str) -> set[str]:
    """Layers that the first list leaves out."""
    one = next(one for one in found.advice if one.scheme == scheme)
    chosen = one.fewest or one.kinds
    return set(chosen.layers) if chosen is not None else set()


def quality(result: QualityResult) -> str:
    parts = []
    if result.perplexity_increase is not None:
        parts.append(f"perplexity {result.perplexity_increase:+.2%}")
    if result.kl is not None:
        parts.append(f"KL {number(result.kl)}")
    if result.agreement is not None:
        parts.append(f"agreement {result.agreement:.1%}")
    if result.relative_error is not None:
        parts.append(f"relative error {result.relative_error:.2%}")
    return ", ".join(parts)


def notes(found: Sensitivity) -> list[str]:
    """How to read the figures, and what else there is to know."""
    kind = "KL of the predictions in nats" if found.family != "module" else "squared relative error of the outputs"
    told = [
        f"est. cost is the {kind} with this layer alone rounded, to second order, from a pass of gradients; est. ppl adds the first order",
        "meas. is measured, with this layer alone rounded; a measured KL holds what any change at all makes here",
        "SQNR is that of the layer's own output",
    ]
    skipped = [f"{layer.name} under {scheme}: {why}" for layer in found.layers for scheme, why in layer.skipped.items()]
    return [*told, *skipped[:20], *([f"and {len(skipped) - 20} more"] if len(skipped) > 20 else []), *found.notes]


def perplexity_change(figure: Figure) -> float | None:
    """Of the estimated change of the loss."""
    return None if figure.loss_change is None else math.expm1(min(figure.loss_change, 700.0))


def number(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:.2g}" if value < 1e-3 else f"{value:.4f}"


def change(value: float | None) -> str:
    return "n/a" if value is None else f"{value:+.2%}"


def _table(heads: tuple[str, ...], cells: list[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
