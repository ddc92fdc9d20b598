"""How far an optimized model is from its baseline, on real data.

What is measured depends on the family: perplexity, KL, agreement and SQNR for language models; top-1, agreement,
cross-entropy and SQNR for classifiers; SQNR and relative error for anything else. No quality is claimed for random weights or
random data. The baseline runs once, and what it said serves every row of the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map

from optforge.measure import compare, limits, own, reference
from optforge.measure.language import LanguageQuality, logits_of
from optforge.measure.mode import evaluating
from optforge.measure.work import compute_dtype
from optforge.spec import Quality, QualityResult

if TYPE_CHECKING:
    from torch import Tensor, nn

    from optforge.data.base import DataSource
    from optforge.models.base import Loaded

_BATCH = 50


def reason_against(loaded: Loaded, data: DataSource, options: Quality) -> str | None:
    """Why no quality can be claimed for this model on this data, or None when it can."""
    if not options.enabled:
        return "quality.enabled is false"
    if loaded.weights != "trained":
        return "the weights are random"
    if loaded.family != "module" and not data.real:
        return "the data is random"
    if loaded.family == "module" and loaded.example is None:
        return "the model has no example input"
    return None


class Judge(Protocol):
    """Compares modules of one family with their baseline."""

    def prepare(self) -> None:
        """Runs the baseline once."""
        ...

    def evaluate(self, module: nn.Module) -> tuple[QualityResult, str | None]:
        """The figures of one module, and a sentence when its outputs cannot be used."""
        ...


class QualityRun:
    """Judges modules against one baseline. `reason` says why nothing can be measured, or is None.

    `baseline` is the unmodified module on `device`, or None where it does not fit there; a language model is then
    compared with the reference outputs that an earlier run cached.
    """

    judge: Judge

    def __init__(
        self,
        *,
        baseline: nn.Module | None,
        loaded: Loaded,
        data: DataSource,
        data_name: str,
        device: torch.device,
        options: Quality,
        limits: Mapping[str, float],
        seed: int = 0,
    ) -> None:
        self.loaded, self.data_name, self.options, self.limits = loaded, data_name, options, limits
        self.reason = reason_against(loaded, data, options)
        self.baseline = baseline
        self.metric: own.OwnMetric | None = None
        self.baseline_figures: own.Figures = {}
        if self.reason is None:
            self.judge = _judge(self, data, device, seed)
            self.metric = own.OwnMetric(options.metric) if options.metric else None
            if baseline is None and not self._has_cached():
                self.reason = "the baseline does not fit this device, and no earlier run has cached its outputs"

    def _has_cached(self) -> bool:
        judge = self.judge
        return isinstance(judge, LanguageQuality) and judge.folder is not None and reference.load(judge.folder) is not None

    def prepare(self) -> None:
        """Runs the baseline over the data once."""
        self.judge.prepare()
        if self.metric is not None and self.baseline is not None:
            self.baseline_figures = self.metric(self.baseline, self.loaded)

    def evaluate(self, module: nn.Module) -> QualityResult:
        """The figures of `module` and the limits it misses; the module is left as it was found."""
        result, broken = self.judge.evaluate(module)
        result.data = self.data_name
        if self.metric is not None:
            own.record(result, self.metric(module, self.loaded), self.baseline_figures)
        result.missed = ([broken] if broken else []) + limits.missed(result, self.limits)
        return result


def _judge(run: QualityRun, data: DataSource, device: torch.device, seed: int) -> Judge:
    loaded, options = run.loaded, run.options
    if loaded.family == "causal_lm":
        ids = data.tokens(loaded, options.tokens, seed)
        dtype = str(compute_dtype(loaded.module)).removeprefix("torch.")
        folder = reference.path_of(loaded.digest, loaded.module, ids, options.window, dtype) if loaded.digest else None
        return LanguageQuality(baseline=run.baseline, ids=ids, window=options.window, device=device, folder=folder)
    if loaded.family == "image_classifier":
        return ClassifierQuality(run.baseline, lambda: data.batches(loaded, options.items, _BATCH, seed), device)
    return ModuleQuality(run.baseline, loaded.example, device)


class ClassifierQuality:
    """Top-1 of both, agreement, KL, SQNR and cross-entropy; the baseline's logits are kept, they are small."""

    def __init__(self, baseline: nn.Module | None, batches: Callable[[], Iterator[tuple[Tensor, Tensor | None]]], device: torch.device):
        self.baseline, self.batches, self.device = baseline, batches, device
        self.expected: list[Tensor] = []

    def prepare(self) -> None:
        assert self.baseline is not None, "a classifier has no cached reference outputs"
        with evaluating(self.baseline):
            self.expected = [_classes(self.baseline, inputs.to(self.device)) for inputs, _ in self.batches()]

    def evaluate(self, module: nn.Module) -> tuple[QualityResult, str | None]:
        signal, divergence = compare.Signal(), compare.Divergence()
        own, baseline = compare.Likelihood(), compare.Likelihood()
        right = baseline_right = 0
        with evaluating(module):
            for (inputs, labels), expected in zip(self.batches(), self.expected, strict=True):
                found = _classes(module, inputs.to(self.device))
                log_probs, expected_log_probs = compare.log_probabilities(found), compare.log_probabilities(expected)
                signal.add(expected, found)
                agreeing = compare.same_top(expected, found.argmax(-1))
                divergence.add(compare.full_kl(expected_log_probs, log_probs), agreeing)
                if labels is not None:
                    true = labels.to(found.device)
                    own.add(log_probs, true)
                    baseline.add(expected_log_probs, true)
                    right += int((found.argmax(-1) == true).sum())
                    baseline_right += int((expected.argmax(-1) == true).sum())
        result = QualityResult(
            kl=divergence.kl,
            kl_kind="full",
            agreement=divergence.agreement,
            sqnr_db=signal.sqnr_db,
            cross_entropy=own.mean,
            baseline_cross_entropy=baseline.mean,
            count=divergence.count,
        )
        if own.count:
            result.top1, result.baseline_top1 = right / own.count, baseline_right / own.count
            result.top1_drop = result.baseline_top1 - result.top1
        if own.mean is not None and baseline.mean:
            result.loss_increase = own.mean / baseline.mean - 1.0
        broken = f"outputs hold NaN or Inf for {divergence.broken} of {divergence.count} items" if divergence.broken else None
        return result, broken


class ModuleQuality:
    """SQNR and relative error of all floating-point outputs on the module's own example."""

    def __init__(self, baseline: nn.Module | None, example: tuple[tuple[Any, ...], dict[str, Any]] | None, device: torch.device):
        self.baseline, self.example, self.device = baseline, example, device
        self.expected: list[Tensor] = []

    def prepare(self) -> None:
        assert self.baseline is not None, "a module has no cached reference outputs"
        self.expected = self._outputs(self.baseline)

    def evaluate(self, module: nn.Module) -> tuple[QualityResult, str | None]:
        signal = compare.Signal()
        found = self._outputs(module)
        if [tensor.shape for tensor in found] != [tensor.shape for tensor in self.expected]:
            return QualityResult(count=1), "outputs have other shapes than the baseline's"
        for expected, one in zip(self.expected, found, strict=True):
            signal.add(expected, one)
        broken = sum(not bool(torch.isfinite(tensor).all()) for tensor in found)
        result = QualityResult(sqnr_db=signal.sqnr_db, relative_error=signal.relative_error, count=1)
        return result, f"{broken} of {len(found)} outputs hold NaN or Inf" if broken else None

    def _outputs(self, module: nn.Module) -> list[Tensor]:
        assert self.example is not None, "reason_against() refuses a module without an example"
        dtype = compute_dtype(module)

        def placed(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            moved = value.to(self.device)
            return moved.to(dtype) if moved.is_floating_point() and dtype is not None else moved

        args, kwargs = tree_map(placed, self.example)
        with evaluating(module):
            leaves = tree_leaves(module(*args, **kwargs))
        return [leaf.detach().clone() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _classes(module: nn.Module, inputs: Tensor) -> Tensor:
    """Logits [items, classes] in fp32 of a batch, given in the dtype that the module computes in."""
    output = module(inputs.to(compute_dtype(module)))
    logits: Tensor = getattr(output, "logits", output)
    return logits.float()


def generate(module: nn.Module, loaded: Loaded, prompt: str, new_tokens: int) -> str:
    """The most likely continuation of `prompt`, token by token: `new_tokens` tokens, fewer where the text ends.

    Each step runs the whole text without a KV cache, so that it works for every causal language model and shows the module
    itself rather than a generation library.
    """
    ids = loaded.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    ids = ids.to(next(module.parameters()).device)
    start, end = ids.shape[1], loaded.tokenizer.eos_token_id
    with evaluating(module):
        for _ in range(new_tokens):
            token = logits_of(module, ids)[:, -1].argmax(-1, keepdim=True)
            if end is not None and int(token) == end:
                break
            ids = torch.cat([ids, token], dim=1)
    text: str = loaded.tokenizer.decode(ids[0, start:])
    return text
