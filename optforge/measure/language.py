"""Quality of a language model: perplexity of both, KL of logits, agreement and SQNR in one pass over windows of text.

The baseline runs once. Of it only the inputs of its last layer are kept (a few megabytes), from which its logits are
computed again for each row of the report, bit for bit; where that does not hold the baseline itself runs again.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from optforge.kernels import kv_cache
from optforge.measure import compare, reference
from optforge.measure.mode import evaluating
from optforge.spec import QualityResult

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

log = logging.getLogger("optforge")


def logits_of(module: nn.Module, ids: Tensor) -> Tensor:
    """Logits [batch, tokens, vocabulary] of token ids [batch, tokens]; no KV cache is kept.

    A model whose cache is quantized is run with one, since the rounding of keys and values is what is to be judged.
    """
    options: dict[str, Any] = {"use_cache": False} if hasattr(getattr(module, "config", None), "use_cache") else {}
    if kv_cache.formats(module):
        options = {"use_cache": True, "past_key_values": kv_cache.new_cache(module, ids.shape[1])}
    output = module(input_ids=ids, **options)
    logits: Tensor = getattr(output, "logits", output)
    return logits


@dataclass(kw_only=True)
class LanguageQuality:
    """Judges modules against one baseline on one run of token ids [count], in windows of `window` without overlap.

    `baseline` is None where it does not fit the device; then `folder` must hold what an earlier run cached.
    """

    baseline: nn.Module | None
    ids: Tensor
    window: int
    device: torch.device
    folder: Any = None
    """Where reference outputs are cached, or None for a model without a digest."""
    cached: reference.Reference | None = None
    mean_loss: float | None = None
    _hidden: list[Tensor] = field(default_factory=list)
    """Inputs of the baseline's last layer per window, while they reproduce its logits; else empty."""

    def prepare(self) -> None:
        """Runs the baseline once: its loss, its last layer's inputs, and its cached outputs if there are none yet."""
        if self.folder is not None:
            self.cached = reference.load(self.folder)
            log.info("reference outputs of the baseline: %s, %s", "found" if self.cached else "not there yet", self.folder)
        if self.baseline is None:
            self.mean_loss = self.cached.mean_loss if self.cached is not None else None
            return
        wanted = self.folder is not None and self.cached is None
        likelihood, kept = compare.Likelihood(), []
        with evaluating(self.baseline), _LastLayer(self.baseline) as last:
            for ids in self._windows():
                logits = logits_of(self.baseline, ids)[0]
                self._hidden = last.keep(logits, self._hidden)
                for rows in compare.chunks(*logits.shape):
                    log_probs = compare.log_probabilities(logits[rows])
                    likelihood.add(*_predicted(log_probs, ids[0], rows))
                    if wanted:
                        kept.append(tuple(tensor.cpu() for tensor in log_probs.topk(min(reference.TOP, log_probs.shape[-1]))))
        self.mean_loss = likelihood.mean
        if wanted and self.mean_loss is not None:
            values, indices = (torch.cat(parts) for parts in zip(*kept, strict=True))
            self.cached = reference.Reference(log_probabilities=values, indices=indices.int(), mean_loss=self.mean_loss)
            reference.save(self.folder, self.cached)

    def evaluate(self, module: nn.Module) -> tuple[QualityResult, str | None]:
        """The figures of one module, and a sentence when its outputs are not finite."""
        likelihood, divergence, signal = compare.Likelihood(), compare.Divergence(), compare.Signal()
        with evaluating(module):
            for index, ids in enumerate(self._windows()):
                found = logits_of(module, ids)[0]
                expected = self._expected(index, ids)
                for rows in compare.chunks(*found.shape):
                    log_probs = compare.log_probabilities(found[rows])
                    likelihood.add(*_predicted(log_probs, ids[0], rows))
                    if expected is None:
                        self._against_cached(index, rows, log_probs, divergence)
                        continue
                    signal.add(expected[rows], found[rows])
                    agreeing = compare.same_top(expected[rows], found[rows].argmax(-1))
                    kl = compare.full_kl(compare.log_probabilities(expected[rows]), log_probs)
                    divergence.add(kl, agreeing)
        live = self.baseline is not None
        result = QualityResult(
            kl=divergence.kl,
            kl_kind="full" if live else f"top{reference.TOP}",
            agreement=divergence.agreement,
            sqnr_db=signal.sqnr_db if live else None,
            count=self.ids.numel(),
        )
        self._losses(result, likelihood.mean)
        broken = f"outputs hold NaN or Inf at {divergence.broken} of {divergence.count} positions" if divergence.broken else None
        return result, broken

    def _losses(self, result: QualityResult, loss: float | None) -> None:
        """Perplexities, and how far the candidate's lies above the baseline's."""
        result.perplexity = _perplexity(loss)
        result.baseline_perplexity = _perplexity(self.mean_loss)
        if loss is not None and self.mean_loss is not None:
            result.perplexity_increase = min(math.expm1(min(loss - self.mean_loss, 700.0)), 1e300)
            result.loss_increase = loss / self.mean_loss - 1.0 if self.mean_loss > 0 else None

    def _windows(self) -> Iterator[Tensor]:
        for start in range(0, self.ids.numel(), self.window):
            yield self.ids[None, start : start + self.window].to(self.device)

    def _expected(self, index: int, ids: Tensor) -> Tensor | None:
        """The baseline's logits [tokens, vocabulary] of a window; None where only cached outputs are at hand."""
        if self.baseline is None:
            return None
        with evaluating(self.baseline):
            if self._hidden:
                logits: Tensor = _head(self.baseline)(self._hidden[index])[0]
                return logits
            return logits_of(self.baseline, ids)[0]

    def _against_cached(self, index: int, rows: slice, log_probs: Tensor, divergence: compare.Divergence) -> None:
        assert self.cached is not None, "prepare() was not called"
        values, classes = (tensor[rows].to(self.device) for tensor in self.cached.window(index, self.window))
        chosen = log_probs.argmax(-1, keepdim=True)
        agreeing = ((classes == chosen) & (values == values[:, :1])).any(-1)
        divergence.add(compare.top_kl(values, classes, log_probs), agreeing)


def _perplexity(loss: float | None) -> float | None:
    """exp of a mean loss in nats; None beyond what a float holds."""
    return math.exp(loss) if loss is not None and loss < 700.0 else None


def _predicted(log_probs: Tensor, ids: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Log-probabilities and true next tokens of those rows of a window that have a next token."""
    following = ids[rows.start + 1 : rows.stop + 1]
    return log_probs[: following.numel()], following


def _head(module: nn.Module) -> nn.Module:
    head: nn.Module = module.get_output_embeddings()  # type: ignore[operator]  # nn.Module types every attribute as Tensor or Module
    return head


class _LastLayer:
    """Catches the input of a model's last layer, and says whether that layer alone makes the logits from it."""

    def __init__(self, module: nn.Module) -> None:
        known = callable(getattr(module, "get_output_embeddings", None)) and isinstance(_head(module), torch.nn.Module)
        self.head = _head(module) if known else None
        self.caught: Tensor | None = None
        self.reproduces = known

    def __enter__(self) -> _LastLayer:
        self.handle = self.head.register_forward_pre_hook(self._catch) if self.head is not None else None
        return self

    def __exit__(self, *_: object) -> None:
        if self.handle is not None:
            self.handle.remove()

    def _catch(self, _: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self.caught = arguments[0]

    def keep(self, logits: Tensor, kept: list[Tensor]) -> list[Tensor]:
        """`kept` with the last input added; empty, from then on, once the layer alone does not give `logits`."""
        if self.head is None or self.caught is None or not self.reproduces:
            return []
        hidden, self.caught = self.caught, None
        self.reproduces = bool(kept) or torch.equal(self.head(hidden)[0], logits)
        return [*kept, hidden] if self.reproduces else []
