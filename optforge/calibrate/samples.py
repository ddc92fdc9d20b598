"""Inputs for calibration: as many and as long as a step asks for, and none that quality is measured on.

Figures of quality on the text that a step was fitted to would flatter it, so samples begin where those of the evaluation end.
A sample that holds NaN or Inf would spoil the statistics of every layer behind it: it is counted and left out, or refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from optforge.calibrate.own import fits, own_samples
from optforge.errors import DataError, Problem
from optforge.models.base import Example, Loaded, as_example
from optforge.spec import CalibrationData, Quality, Run

if TYPE_CHECKING:
    from optforge.data.base import DataSource

LANGUAGE = "causal_lm"


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Arguments of one forward pass each, batch 1, on the CPU."""

    examples: list[Example]
    bad: list[int]
    """Indices of samples that were left out, since they hold NaN or Inf."""
    source: str
    """Where they come from, in words."""

    @property
    def note(self) -> str:
        """One sentence for the receipt."""
        left = f", {len(self.bad)} more left out: they hold NaN or Inf" if self.bad else ""
        return f"calibrated on {len(self.examples)} samples of {self.source}{left}"


class Samples:
    """What a run offers for calibration; nothing is read before a step asks."""

    def __init__(
        self,
        *,
        loaded: Loaded,
        data: DataSource,
        data_name: str,
        options: CalibrationData | None = None,
        quality: Quality | None = None,
        seed: int = 0,
    ) -> None:
        self.loaded, self.data, self.data_name, self.seed = loaded, data, data_name, seed
        self.options, self.quality = options or CalibrationData(), quality or Quality()

    @classmethod
    def of(cls, run: Run, loaded: Loaded) -> Samples:
        """Those of a run."""
        return cls(
            loaded=loaded, data=run.data.source, data_name=run.data.name, options=run.calibration, quality=run.quality, seed=run.seed
        )

    @property
    def reason_against(self) -> str | None:
        """Why nothing can be calibrated on this data, or None: random data says nothing of trained weights."""
        if self.options.factory is None and not self.data.real and self.loaded.weights == "trained" and self.loaded.family != "module":
            return f"data={self.data_name} is random"
        return None

    def take(self, count: int, *, tokens: int, step: str, held_out: int = 0) -> Taken:
        """`count` samples; of a language model each has exactly `tokens` tokens.

        Args:
            step: of the error messages.
            held_out: how many of them the step asks for beside its own `samples`.

        Raises:
            ConfigError: what `calibration.factory` names raises, or gives nothing to go through.
            DataError: there are fewer, the data is random, more of them hold NaN or Inf than `max_bad_fraction` allows, or the model
                does not take them.
        """
        if (reason := self.reason_against) is not None:
            fix = "data=wikipedia, or calibration.factory=package.module:callable"
            raise DataError(Problem(where=f"step {step}", what=f"needs data to calibrate on, and {reason}", fix=fix))
        found, bad = [], []
        for index, example in enumerate(islice(self._examples(count, tokens, step), count)):
            if all(bool(leaf.isfinite().all()) for leaf in tree_leaves(example) if isinstance(leaf, Tensor) and leaf.is_floating_point()):
                found.append(example)
            else:
                bad.append(index)
        self._hold(len(found) + len(bad), count, bad, step, held_out)
        if self.options.factory is not None:
            fits(found, self.loaded, str(self.options.factory))
        return Taken(examples=found, bad=bad, source=self._source(tokens))

    def _hold(self, read: int, count: int, bad: list[int], step: str, held_out: int) -> None:
        """Refuses too few samples and too many bad ones."""
        if read < count:
            what = f"{self._source(0)} has {read} samples to calibrate on, {count} are wanted"
            fewer = f"steps.{step}.samples={read - held_out}" if read > held_out else "give more of them"
            if not read:
                fewer = "let it yield some" if self.options.factory else "lower quality.items, or give calibration.factory"
            raise DataError(Problem(where=f"step {step}", what=what, fix=fewer))
        if len(bad) == count:
            what = f"all {count} calibration samples hold NaN or Inf"
            raise DataError(Problem(where=f"step {step}", what=what, fix="correct the data"))
        if len(bad) > self.options.max_bad_fraction * count:
            named = ", ".join(map(str, bad[:5])) + (" ..." if len(bad) > 5 else "")
            what = f"{len(bad)} of {count} calibration samples hold NaN or Inf (sample {named})"
            fix = f"correct the data, or calibration.max_bad_fraction={math.ceil(1000 * len(bad) / count) / 1000:g} to leave them out"
            raise DataError(Problem(where=f"step {step}", what=what, fix=fix))

    def _source(self, tokens: int) -> str:
        name = self.options.factory or self.data_name
        return f"{name}, {tokens} tokens each" if tokens and self.loaded.family == LANGUAGE else name

    def _examples(self, count: int, tokens: int, step: str) -> Iterator[Example]:
        if self.options.factory is not None:
            yield from self._own(tokens)
        elif self.loaded.family == LANGUAGE:
            yield from self._text(count, tokens, step)
        elif self.loaded.family == "module" and not self.data.real:
            if self.loaded.example is not None:
                yield self.loaded.example  # all that is known of a module's inputs
        else:
            source, skip = self._apart()
            for inputs, _ in islice(source.batches(self.loaded, skip + count, 1, self.seed), skip, None):
                yield (inputs,), {}

    def _apart(self) -> tuple[DataSource, int]:
        """Where items lie that quality is not measured on, and how many come before them: in the part that a data set keeps for this,
        or behind those of the figures."""
        keeps = getattr(self.data, "for_calibration", None)
        apart: DataSource | None = keeps() if keeps is not None else None
        return (self.data, self.quality.items) if apart is None else (apart, 0)

    def _text(self, count: int, tokens: int, step: str) -> Iterator[Example]:
        skip = self.quality.tokens
        try:
            ids = self.data.tokens(self.loaded, skip + count * tokens, self.seed)[skip:]
        except DataError as error:
            told = error.problems[0].what
            what = f"{count} samples of {tokens} tokens, after the {skip:,} that quality is measured on, are too many: {told}"
            raise DataError(Problem(where=f"step {step}", what=what, fix=f"steps.{step}.samples={max(1, count // 2)}")) from error
        for row in ids.reshape(count, tokens):
            yield _language(row[None])

    def _own(self, tokens: int) -> Iterator[Example]:
        """What the user's factory yields, called as factory(batch_size=1); token ids are cut to `tokens` and joined up to it."""
        rest: list[Tensor] = []
        for batch in own_samples(str(self.options.factory)):
            inputs = batch[0] if isinstance(batch, tuple) and len(batch) == 2 and self.loaded.family != "module" else batch
            if self.loaded.family != LANGUAGE:
                example = as_example(inputs)
                if example is not None:
                    yield example
                continue
            rest.append(torch.as_tensor(inputs).flatten().long())
            while sum(each.numel() for each in rest) >= tokens:
                joined = torch.cat(rest)
                yield _language(joined[:tokens][None])
                rest = [joined[tokens:]]


def _language(ids: Tensor) -> Example:
    """Token ids [1, tokens] as a pass without a cache."""
    return (), {"input_ids": ids, "use_cache": False}


def to(example: Any, device: torch.device) -> Any:
    """Arguments with every tensor on `device`."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, example)
