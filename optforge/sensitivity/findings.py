"""What is found out of a model's layers, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from optforge.spec import Json, QualityResult


@dataclass(kw_only=True)
class Figure:
    """One layer under one scheme. Estimates are to second order (transforms/choose/costs.py); `measured_*` are measured by rounding
    this layer alone, and None where that was not done."""

    cost: float
    """Estimated KL of the predictions in nats; for a model without classes the squared relative error of its outputs. `measured_cost` is
    the same figure, measured."""
    loss_change: float | None
    """Estimated change of the mean loss in nats, by its first and second order; None without true labels."""
    sqnr_db: float | None
    """Signal to noise of the layer's own output, measured."""
    saved_bytes: int
    measured_cost: float | None = None
    measured_perplexity_change: float | None = None


@dataclass(kw_only=True)
class Layer:
    """One layer and its figures by scheme."""

    name: str
    shape: list[int]
    bytes: int
    share: float
    """Of the bytes of all weights."""
    figures: dict[str, Figure] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """Scheme -> why it does not fit this layer."""


@dataclass(kw_only=True)
class Left:
    """Some layers left out, and what that gives."""

    ignore: list[str]
    """Selectors, ready to paste."""
    layers: list[str]
    """The layers that they cover."""
    quality: QualityResult
    """Of the model with the others rounded, measured."""
    weight_bytes: int


@dataclass(kw_only=True)
class Advice:
    """What to leave out under one scheme. Where every layer may be rounded, nothing is left out and both lists are None."""

    scheme: str
    count: int
    """Layers that the scheme fits."""
    whole: QualityResult
    """With every one of them rounded, measured."""
    weight_bytes: int
    within: bool
    fewest: Left | None = None
    """As few layers as the limits ask for; None where not even one layer may be rounded."""
    kinds: Left | None = None
    """Whole kinds of layers, a shorter list; None where no kind may be rounded, or where it is no shorter."""

    @property
    def best(self) -> Left | None:
        """What the limits leave of this scheme with the smallest weights."""
        return min((one for one in (self.fewest, self.kinds) if one is not None), key=lambda one: one.weight_bytes, default=None)


@dataclass(kw_only=True)
class Sensitivity:
    """All that `optforge sensitivity` found."""

    model: str
    data: str
    target: str
    device: str
    family: str
    samples: int
    positions: int
    weight_bytes: int
    floor: float
    """KL of the least change that was measured: what the arithmetic of the model's dtype makes of any change."""
    limits: dict[str, float]
    schemes: list[str]
    layers: list[Layer]
    advice: list[Advice]
    notes: list[str] = field(default_factory=list)
    command: str = ""
    made: str = ""
    environment: dict[str, Json] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        """What `Figure.cost` is."""
        return "squared relative error" if self.family == "module" else "KL, nats"
