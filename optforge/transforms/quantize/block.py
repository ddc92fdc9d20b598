"""Decides the values of one block's layers from what calibration samples give them; changes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from optforge.calibrate.walk import Block
from optforge.kernels.convolutions import patches
from optforge.kernels.formats import Fp8Format
from optforge.kernels.linears import scheme_of
from optforge.kernels.quantized import store
from optforge.kernels.rounding import TINY, int8_range
from optforge.spec import Scheme
from optforge.transforms.quantize import folds as folding
from optforge.transforms.quantize.algorithms import Algorithm, has_grid
from optforge.transforms.quantize.folds import Fold
from optforge.transforms.quantize.grids import Solved
from optforge.transforms.quantize.scales import searched, smoothing
from optforge.transforms.quantize.solve import Inputs, Known, solve
from optforge.transforms.quantize.survey import out_in

if TYPE_CHECKING:
    from optforge.transforms.quantize import Quantize

_FACTS = "facts"


@dataclass(kw_only=True)
class Decided:
    """What becomes of a block; paths are within it."""

    stored: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Layer -> the tensors that it holds then (what a scheme does not store is left out)."""
    changed: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Module -> parameters that scales were folded into, in their own dtypes."""
    carriers: dict[str, list[str]] = field(default_factory=dict)
    """Module that carries scales -> the layers that read them."""
    refused: dict[str, str] = field(default_factory=dict)
    """Layer -> why no scales were folded in before it."""
    notes: dict[str, str] = field(default_factory=dict)
    """Layer -> what is to be known of how it was decided."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """Layer -> the weight [N, K] that its storage is to stand for, to check it by; not kept."""

    def packed(self) -> dict[str, Tensor]:
        """As one flat dictionary of tensors."""
        facts = json.dumps({"carriers": self.carriers, "refused": self.refused, "notes": self.notes, "stored": list(self.stored)})
        flat = {f"{kind}/{path}/{name}": t for kind, all_ in self._kinds() for path, own in all_.items() for name, t in own.items()}
        return flat | {_FACTS: torch.tensor(list(facts.encode()), dtype=torch.uint8)}

    def _kinds(self) -> list[tuple[str, dict[str, dict[str, Tensor]]]]:
        return [("stored", self.stored), ("changed", self.changed)]

    @classmethod
    def unpacked(cls, flat: Mapping[str, Tensor]) -> Decided:
        facts = json.loads(bytes(flat[_FACTS].tolist()))
        result = cls(
            carriers=facts["carriers"], refused=facts["refused"], notes=facts["notes"], stored={path: {} for path in facts["stored"]}
        )
        for key, tensor in flat.items():
            if key != _FACTS:
                kind, path, name = key.split("/")
                dict(result._kinds())[kind].setdefault(path, {})[name] = tensor
        return result


@dataclass(kw_only=True)
class Deciding:
    """How blocks are decided; `layouts` says how each layer of the block at work stores its weight."""

    options: Quantize
    scheme: Scheme
    fmt: Fp8Format
    shared: set[int]
    """ids of parameters that several modules hold."""
    layouts: dict[str, str]
    folds: list[Fold] = field(default_factory=list)
    """Of the block before, tried first."""
    refused: dict[str, str] = field(default_factory=dict)

    def decide(self, block: Block, layers: Mapping[str, nn.Module]) -> Decided:
        """Everything about a block whose layers (by path) are to be quantized; nothing about those that no sample reaches."""
        flow = folding.flow(block, block.calls[0])
        leaders = _leaders(layers, flow)
        known = self._observed(block, layers, leaders)
        reached = {path: layer for path, layer in layers.items() if known[path].rows}
        weights = {path: out_in(layer, self.layouts[path]).to(torch.float32, copy=True) for path, layer in reached.items()}
        work = _Work(block=block, layers=reached, weights=weights, known=known)
        if self.options.algorithm is Algorithm.awq or self.options.smooth is not None:
            self._find_folds(block, flow, reached)
            work.result.refused = dict(self.refused)
            for fold in self.folds:
                self._fold(work, fold)
        for group in _solved_together(reached, leaders, self.scheme):
            self._solve(work, group)
        return work.result

    def _observed(self, block: Block, layers: Mapping[str, nn.Module], leaders: Mapping[str, str]) -> dict[str, Known]:
        """Statistics of each layer's inputs; layers that read one tensor share them."""
        firsts = {path: layer for path, layer in layers.items() if leaders[path] == path}
        inputs: dict[str, Inputs] = {}

        def see(path: str, x: Tensor) -> None:
            rows = _rows(firsts[path], x)
            if path not in inputs:
                inputs[path] = Inputs(rows.shape[-1], rows.shape[0], rows.device)
            inputs[path].add(rows)

        block.observe(firsts, see)
        nothing = Inputs(1, 1, block.device)
        found = {path: inputs.get(path, nothing).known for path in firsts}
        return {path: found[leaders[path]] for path in layers}

    def _find_folds(self, block: Block, flow: folding.Flow, layers: Mapping[str, nn.Module]) -> None:
        """Where scales can go: where they went in the block before, if that holds here."""
        linears = {path: layer for path, layer in layers.items() if folding.is_linear(layer)}
        known = {path for fold in self.folds for path in fold.readers} | self.refused.keys()
        if self.folds and linears.keys() <= known and folding.holds(block, block.calls[0], flow, self.folds):
            return
        self.folds, self.refused = folding.find(block, block.calls[0], linears, self.shared)

    def _fold(self, work: _Work, fold: Fold) -> None:
        """Chooses the scales of one fold and works them into everything that it touches."""
        readers = [path for path in fold.readers if path in work.layers]
        if not readers:
            return
        known, rows = work.known[readers[0]], [work.weights[path] for path in readers]
        channels = None if fold.channels is None else fold.channels.to(work.block.device)
        if self.options.smooth is not None:
            scales = smoothing(rows, known, self.options.smooth, channels)
        else:
            scales = searched(rows, known, self.scheme, self.fmt, channels)
        if bool((scales == 1).all()):
            return
        scales = work.divide(fold, scales.expand(fold.size))
        spread = fold.spread(scales)
        for path in fold.readers:
            work.multiply(path, spread)
        work.known.update(dict.fromkeys(readers, known.divided(spread)))
        work.result.carriers.setdefault(fold.source, []).extend(readers)

    def _solve(self, work: _Work, group: list[str]) -> None:
        """Decides layers that read the same inputs, as the rows of one weight."""
        scheme, known, result = scheme_of(work.layers[group[0]], self.scheme), work.known[group[0]], work.result
        weights = [work.weights[path] for path in group]
        if not has_grid(scheme):
            stored = [store(weight, scheme, self.fmt) for weight in weights]
        else:
            solved = self._solved(torch.cat(weights), known, scheme)
            if solved.failed is not None:
                result.notes.update(dict.fromkeys(group, f"rounded to nearest, {solved.failed}"))
            elif solved.damping is not None and solved.damping != self.options.damping:
                result.notes.update(dict.fromkeys(group, f"damping was raised to {solved.damping:g}"))
            parts = solved.split([len(weight) for weight in weights])
            stored = [part.stored for part in parts]
            result.values.update({path: part.weight for path, part in zip(group, parts, strict=True)})
        inputs = input_scales(known, scheme, self.fmt)
        for path, tensors in zip(group, stored, strict=True):
            result.stored[path] = {name: tensor for name, tensor in (tensors | inputs).items() if tensor is not None}

    def _solved(self, weight: Tensor, known: Known, scheme: Scheme) -> Solved:
        """Row by row as `solve` has it; the output channels of a grouped convolution have inputs of their own."""
        options, groups = self.options, len(known.grams)
        size = len(weight) // groups
        parts = [
            solve(
                weight[at * size : (at + 1) * size],
                known.group(at),
                scheme,
                self.fmt,
                options.algorithm,
                damping=options.damping,
                act_order=options.act_order,
                clip=options.clip,
            )
            for at in range(groups)
        ]
        return parts[0] if groups == 1 else Solved.joined(parts)


@dataclass(kw_only=True)
class _Work:
    """A block while it is decided: the weights that scales are multiplied into, and what follows from it."""

    block: Block
    layers: Mapping[str, nn.Module]
    """To be quantized, by path."""
    weights: dict[str, Tensor]
    """fp32 [N, K] of each."""
    known: dict[str, Known]
    result: Decided = field(default_factory=Decided)

    def divide(self, fold: Fold, scales: Tensor) -> Tensor:
        """Divides the channels of a fold's source by scales [C]; what they are really divided by, which its dtype decides.

        Rows that are quantized themselves take them exactly, in fp32.
        """
        source, own = self.block.module.get_submodule(fold.source), self.result.changed.get(fold.source)
        tensors = folding.multiplied(source, fold, 1 / scales, own)
        if fold.kind == folding.ROWS and fold.source in self.layers:
            self.weights[fold.source][fold.start : fold.stop] /= scales[:, None]
            tensors = {name: tensor for name, tensor in tensors.items() if name != "weight"}
        else:
            scales = folding.carried(source, fold, tensors, scales, own)
        if tensors:
            self.result.changed.setdefault(fold.source, {}).update(tensors)
        return scales

    def multiply(self, path: str, scales: Tensor) -> None:
        """Multiplies the input columns of a reader by scales [K]."""
        if path in self.layers:
            self.weights[path] *= scales
            return
        reader = self.block.module.get_submodule(path)
        self.result.changed.setdefault(path, {}).update(folding.scaled(reader, inputs=scales, own=self.result.changed.get(path)))


def _leaders(layers: Mapping[str, nn.Module], flow: folding.Flow) -> dict[str, str]:
    """Each layer -> the first layer that reads the same tensor."""
    leaders = {path: path for path in layers}
    for group in flow.groups():
        own = [path for path in group if path in layers]
        leaders.update(dict.fromkeys(own, own[0]) if own else {})
    return leaders


def _solved_together(layers: Mapping[str, nn.Module], leaders: Mapping[str, str], scheme: Scheme) -> list[list[str]]:
    """Layers by what they read, so that their columns are walked through once; each alone where a weight has one scale in all."""
    groups: dict[str, list[str]] = {}
    for path in layers:
        groups.setdefault(path if scheme.granularity == "tensor" else leaders[path], []).append(path)
    return list(groups.values())


def _rows(layer: nn.Module, x: Tensor) -> Tensor:
    """A layer's input as the rows that its weight is multiplied with, [groups, rows, K]; a linear has one group."""
    return patches(layer, x) if isinstance(layer, nn.Conv2d) else x.reshape(1, -1, x.shape[-1])


def input_scales(known: Known, scheme: Scheme, fmt: Fp8Format) -> dict[str, Tensor | None]:
    """The scale (and offset) of the inputs of a static scheme, from their range; nothing for the others."""
    if not scheme.static:
        return {}
    low, high = float(known.low.min()), float(known.high.max())
    device = known.low.device
    if scheme.activation_dtype == "int8":
        scale, offset = int8_range(low, high)
        return {"input_scale": torch.tensor([scale], device=device), "input_offset": torch.tensor([offset], device=device)}
    return {"input_scale": torch.tensor([max(-low, high, TINY * fmt.maximum) / fmt.maximum], device=device)}
