"""Turns the surveyed layers into quantized ones, checks each, and writes the receipt; rebuilds them from a receipt."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from optforge.errors import StepError
from optforge.kernels.formats import FORMATS, Fp8Format, format_for
from optforge.kernels.linears import quantize_, scheme_of, share_
from optforge.kernels.parameters import QuantizedParameters, quantize_parameters_
from optforge.kernels.quantized import Quantized
from optforge.measure.size import nbytes
from optforge.spec import Scheme
from optforge.transforms.base import Context, Receipt, Touched
from optforge.transforms.quantize import hqq
from optforge.transforms.quantize.algorithms import Algorithm, walks
from optforge.transforms.quantize.calibrated import calibrate
from optforge.transforms.quantize.ranges import static_scales
from optforge.transforms.quantize.survey import IN_OUT, Survey, out_in
from optforge.transforms.quantize.verify import verify_decided, verify_parameters, verify_product, verify_storage

if TYPE_CHECKING:
    from optforge.transforms.quantize import Quantize


def rewrite(model: nn.Module, found: Survey, scheme: Scheme, options: Quantize, ctx: Context) -> Receipt:
    """Quantizes `found.layers` in place and says what changed."""
    fmt = format_for(ctx.target)
    receipt = Receipt(total_bytes=found.total_bytes, skipped=found.skipped, ignored=found.ignored, unmatched=found.unmatched)
    sizes = {name: nbytes(out_in(module, found.layouts[name])) for name, module in found.layers.items()}
    rounding = _Rounding(scheme, fmt, options, ctx.step)
    if walks(options) and not ctx.planning and not next(model.parameters()).is_meta:
        carriers = _calibrated(model, found, options, ctx, receipt)
    else:
        carriers = {}
        rounding.scales, unseen, notes = static_scales(model, found.layers, scheme, options, ctx)
        receipt.notes += notes
        for name, reason in unseen.items():
            found.leave(name, reason)
    for name, module in found.layers.items():
        layer = module if isinstance(module, Quantized) else rounding.apply(name, module, found.layouts[name])
        receipt.touched.append(_touched(name, layer, sizes[name], found.layouts[name]))
        receipt.kernels[layer.operator] = receipt.kernels.get(layer.operator, 0) + 1
        for partner in _share(model, layer, found.ties.get(name, []), found.policy):
            receipt.touched.append(
                Touched(name=partner, what=f"{scheme.name}, one weight with {name}", dtypes=_dtypes(model.get_submodule(partner)))
            )
        if name in found.ties and found.policy == "untie":
            receipt.notes.append(f"{name} was tied to {', '.join(found.ties[name])} and no longer is: the model now holds both weights")
    for name, keys in found.own.items():
        receipt.touched.append(rounding.apply_own(name, model.get_submodule(name), keys))
        receipt.kernels[QuantizedParameters.operator] = receipt.kernels.get(QuantizedParameters.operator, 0) + len(keys)
    receipt.notes += _merely_rounded(found, options)
    for name, readers in carriers.items():
        if name not in found.layers:
            local = ", ".join(reader.rpartition(".")[2] for reader in readers)
            receipt.touched.append(Touched(name=name, what=f"carries the scales of {local}", dtypes=_dtypes(model.get_submodule(name))))
    receipt.bytes_before = sum(touched.bytes_before for touched in receipt.touched)
    receipt.bytes_after = sum(touched.bytes_after for touched in receipt.touched)
    receipt.decisions = {
        "step": ctx.step,
        "scheme": asdict(scheme),
        "fp8_format": fmt.name,
        "layers": {name: found.layouts[name] for name in found.layers},
        "ties": found.ties,
        "tied": found.policy,
        "own": found.own,
    }
    if found.ties:
        _forget_tie(model)
    return receipt


class _Rounding:
    """Decides layers one by one, without calibration: to nearest, or by hqq."""

    def __init__(self, scheme: Scheme, fmt: Fp8Format, options: Quantize, step: str) -> None:
        self.scheme, self.fmt, self.options, self.step = scheme, fmt, options, step
        self.scales: dict[str, dict[str, Tensor]] = {}
        """Of the inputs of a static scheme's layers."""
        self.shapes: set[tuple[int, ...]] = set()
        """Of the layers whose product was tried."""

    def apply(self, name: str, module: nn.Module, layout: str) -> Quantized:
        weight = out_in(module, layout)
        own = scheme_of(module, self.scheme)
        robust = self.options.algorithm is Algorithm.hqq and own.weight_dtype == "int4" and not weight.is_meta
        solved = hqq.solve(weight, own, self.fmt) if robust else None
        stored = solved.stored if solved is not None else None
        layer = quantize_(module, weight, self.scheme, self.fmt, step=self.step, stored=stored, input_scales=self.scales.get(name))
        if weight.is_meta:
            return layer
        if solved is not None:
            verify_decided(layer, solved.weight, name, self.step)
        else:
            verify_storage(layer, weight, name, self.step)
        if tuple(weight.shape) not in self.shapes:
            verify_product(layer, weight.dtype, name, self.step)
            self.shapes.add(tuple(weight.shape))
        return layer

    def apply_own(self, name: str, module: nn.Module, keys: list[str]) -> Touched:
        """Quantizes weights that a module reads itself, to nearest whatever the algorithm, and checks them."""
        originals = {key: tensor for key in keys if (tensor := module._parameters[key]) is not None}
        before = sum(map(nbytes, originals.values()))
        rest = sum(nbytes(parameter) for parameter in module.parameters(recurse=False)) - before
        quantized = quantize_parameters_(module, keys, self.scheme, self.fmt, step=self.step)
        verify_parameters(quantized, originals, name, self.step)
        after = sum(nbytes(parameter) for parameter in module.parameters(recurse=False)) - rest
        what = f"{quantized.scheme.name}: {', '.join(keys)}"
        return Touched(name=name, what=what, bytes_before=before, bytes_after=after, dtypes=_dtypes(module))


def _merely_rounded(found: Survey, options: Quantize) -> list[str]:
    """Names what the algorithm does not decide: tables whose rows are looked up, and weights that a module multiplies itself."""
    tables = [name for name, module in found.layers.items() if isinstance(module, nn.Embedding) and walks(options)]
    left = [*tables, *(found.own if options.algorithm is not Algorithm.rtn else ())]
    return [f"{', '.join(left)}: rounded to nearest, since {options.algorithm.name} decides linear layers and convolutions"] if left else []


def _calibrated(model: nn.Module, found: Survey, options: Quantize, ctx: Context, receipt: Receipt) -> dict[str, list[str]]:
    """Quantizes what samples reach; modules that carry scales now, with the layers that read them."""
    outcome = calibrate(model, found, options, ctx)
    receipt.notes += outcome.notes
    for name in outcome.unreached:
        found.leave(name, "no calibration sample reaches it, so nothing is known of its inputs (uncalibrated: keep)")
    return outcome.carriers


def rebuild(model: nn.Module, decisions: dict[str, Any]) -> None:
    """Gives `model` the layers that a receipt's decisions name."""
    scheme, fmt = Scheme(**decisions["scheme"]), FORMATS[decisions["fp8_format"]]
    for name, layout in decisions["layers"].items():
        module = _named(model, name, decisions["step"])
        linear = quantize_(module, out_in(module, layout), scheme, fmt, step=decisions["step"])
        _share(model, linear, decisions["ties"].get(name, []), decisions["tied"])
    for name, keys in decisions.get("own", {}).items():
        quantize_parameters_(_named(model, name, decisions["step"]), keys, scheme, fmt, step=decisions["step"])
    if decisions["ties"]:
        _forget_tie(model)


def _named(model: nn.Module, name: str, step: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise StepError(f"step {step}: the receipt names {name}, which this model does not have") from error


def _share(model: nn.Module, linear: Quantized, partners: list[str], policy: str) -> list[str]:
    """Under `both`, lets the embeddings read the storage of `linear`; the names of those it changed."""
    if policy != "both":
        return []
    for name in partners:
        embedding = model.get_submodule(name)
        assert isinstance(embedding, nn.Embedding)
        share_(embedding, linear)
    return partners


def _forget_tie(model: nn.Module) -> None:
    """Tells a transformers model that its weights are not tied, lest `tie_weights` puts the float embedding back in the head."""
    config = getattr(model, "config", None)
    if getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = False  # type: ignore[union-attr]  # it has the attribute, as the line above saw


def _touched(name: str, linear: Quantized, before: int, layout: str) -> Touched:
    what = linear.scheme.name + (", weight stored as (out, in)" if layout == IN_OUT else "")
    after = sum(nbytes(parameter) for _, parameter in linear.stored())
    return Touched(name=name, what=what, bytes_before=before, bytes_after=after, dtypes=_dtypes(linear))


def _dtypes(module: nn.Module) -> dict[str, str]:
    return {key: str(parameter.dtype).removeprefix("torch.") for key, parameter in module.named_parameters(recurse=False)}
