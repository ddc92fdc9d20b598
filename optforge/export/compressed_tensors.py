"""The stored integers as compressed-tensors, which transformers and vLLM load: repacked, never rounded again.

    scheme          format            tensors of a layer
    int8_weight     pack-quantized    weight_packed int32, four unsigned bytes a word; weight_scale [N, 1]
    int4_weight     pack-quantized    weight_packed int32, eight nibbles a word; weight_scale [N, groups]; weight_zero_point
    int8_dynamic    int-quantized     weight int8; weight_scale [N, 1]; activations int8 per token, asymmetric
    int8_static     int-quantized     the same; input_scale and input_zero_point
    fp8_weight      float-quantized   weight float8_e4m3fn; weight_scale [N, 1]
    fp8_dynamic     float-quantized   the same; activations fp8 per token or per tensor
    fp8_static      float-quantized   the same; input_scale
    fp8_block       float-quantized   weight_scale per 128 x 128 block; activations in groups of 128

Words hold values plus 2^(bits - 1), the first in the lowest bits; zero points are packed the same way down the outputs. Scales are
fp32: an engine that computes in bf16 rounds them itself. Written from the format's reference implementation (the PyPI package
compressed-tensors 0.20.1, compressors pack_quantized and naive_quantized); that package is needed to load, not to write.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optforge.errors import ModelError, Problem
from optforge.export import checkpoint_folder, weights
from optforge.export.base import Subject, Written
from optforge.export.unpack import Part, Unpacked, counted, unpack
from optforge.export.weights import Maker, Stored
from optforge.kernels.formats import OCP
from optforge.kernels.rounding import unpack_int4
from optforge.share import alias
from optforge.spec import Json, Scheme

PACKED, INTEGERS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"
HELD = {
    "int8_weight": PACKED,
    "int4_weight": PACKED,
    "int8_dynamic": INTEGERS,
    "int8_static": INTEGERS,
    "fp8_weight": FLOATS,
    "fp8_dynamic": FLOATS,
    "fp8_static": FLOATS,
    "fp8_block_weight": FLOATS,
    "fp8_block": FLOATS,
}
"""Scheme -> the format of its layers; any other scheme is refused."""


class CompressedTensors:
    """A transformers checkpoint whose config.json carries a `quantization_config` of the method compressed-tensors."""

    name: ClassVar[str] = "compressed_tensors"
    loads: ClassVar[str] = "transformers with compressed-tensors, vLLM"
    packages: ClassVar[tuple[str, ...]] = ("compressed_tensors",)

    def machine(self) -> Iterator[Problem]:
        yield from ()

    def refusals(self, subject: Subject) -> Iterator[Problem]:
        """Whatever the format has no place for, all layers of one reason in one problem."""
        try:
            unpacked = unpack(subject)
        except ModelError as error:
            yield from error.problems
            return
        if not unpacked.parts:
            yield Problem(
                where="export", what="no layer is quantized, and compressed-tensors holds quantized ones", fix="export: [huggingface]"
            )
        reasons: dict[str, list[str]] = {}
        for name, part in unpacked.parts.items():
            reason = _refusal(part, unpacked.layer(name))
            if reason:
                reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            what = f"compressed-tensors does not hold {len(names)} layers ({counted(names)}): {reason}"
            yield Problem(where="export", what=what, fix="quantize them in another way or ignore them, or export: [huggingface]")

    def nbytes(self, subject: Subject) -> int:
        return weights.total(_state(unpack(subject)))

    def write(self, subject: Subject, folder: Path) -> Written:
        unpacked = unpack(subject)
        weights.write(_state(unpacked), folder)
        settings = quantization_config(unpacked)
        notes = checkpoint_folder.write(subject, unpacked, folder, settings)
        schemes = sorted({part.module.scheme.name for part in unpacked.parts.values()})
        return Written(
            engine="transformers",
            module=alias(subject.module).float(),
            dtype=torch.float32,
            options=checkpoint_folder.options(subject, unpacked, "float32"),
            sizes=subject.inputs.sizes(),
            facts={"format": settings["format"], "schemes": schemes, "layers": len(unpacked.parts), "ignore": settings["ignore"]},
            notes=(*notes, "compared in fp32: an engine that computes in bf16 rounds the scales to it"),
        )


def _refusal(part: Part, layer: nn.Module | None) -> str | None:
    """Why the format cannot hold a layer, or None."""
    scheme = part.module.scheme
    if scheme.name not in HELD:
        return f"scheme {scheme.name}"
    if type(layer) is not nn.Linear:
        return f"quantized {type(layer).__name__}, and engines look for linears alone"
    if scheme.weight_dtype == "fp8" and part.module.fp8_format != OCP.name:
        return f"its fp8 is {part.module.fp8_format} (FNUZ), and the format's is e4m3fn"
    if scheme.weight_dtype == "int4" and scheme.group_size and part.shape[1] % scheme.group_size:
        return f"its {part.shape[1]} columns are no multiple of the group size {scheme.group_size}"
    if scheme.granularity == "block" and (part.start % (scheme.group_size or 1) or _cut(part)):
        return f"blocks of {scheme.group_size} rows reach over the border of two layers that were packed into one"
    return None


def _cut(part: Part) -> bool:
    """Whether the last block of a part goes on into the next one."""
    ends = part.stop == part.module.weight.shape[0]
    return not ends and bool(part.stop % (part.module.scheme.group_size or 1))


def quantization_config(unpacked: Unpacked) -> dict[str, Json]:
    """The `quantization_config` of config.json: one group per scheme, and the linears that stay as they are."""
    groups: dict[str, tuple[dict[str, Json], list[str]]] = {}
    for name, part in unpacked.parts.items():
        group = _group(part.module.scheme)
        groups.setdefault(json.dumps(group), (group, []))[1].append(name)
    linears = [name for name, module in unpacked.structure.named_modules() if isinstance(module, nn.Linear)]
    formats = {group["format"] for group, _ in groups.values()}
    alone = len(groups) == 1
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": [name for name in linears if name not in unpacked.parts],
        "config_groups": {
            f"group_{number}": {"targets": ["Linear"] if alone else names, **group} for number, (group, names) in enumerate(groups.values())
        },
    }


def _group(scheme: Scheme) -> dict[str, Json]:
    """How one scheme is described."""
    kind = "float" if scheme.weight_dtype == "fp8" else "int"
    stored = {"num_bits": scheme.weight_bits, "type": kind, "symmetric": scheme.symmetric, "dynamic": False, "strategy": scheme.granularity}
    if scheme.granularity == "group":
        stored["group_size"] = scheme.group_size
    if scheme.granularity == "block":
        stored["block_structure"] = [scheme.group_size, scheme.group_size]
    rounded = None
    if scheme.activation_dtype is not None:
        strategy = {"row": "token", "tensor": "tensor", "group": "group"}[scheme.activation_granularity or "row"]
        rounded = {"num_bits": 8, "type": kind, "symmetric": kind == "float", "dynamic": not scheme.static, "strategy": strategy}
        if strategy == "group":
            rounded["group_size"] = scheme.group_size
    return {"weights": stored, "input_activations": rounded, "output_activations": None, "format": HELD[scheme.name]}


def _state(unpacked: Unpacked) -> dict[str, Stored]:
    """Every tensor of the checkpoint."""
    state = {name: weights.as_it_is(tensor) for name, tensor in unpacked.tensors.items()}
    for name, part in unpacked.parts.items():
        state |= {f"{name}.{local}": stored for local, stored in _layer(part).items()}
    return dict(sorted(state.items()))


def _layer(part: Part) -> dict[str, Stored]:
    """The tensors of one layer by local name."""
    scheme, (rows, columns) = part.module.scheme, part.shape
    scale = part.rows("weight_scale")
    assert scale is not None
    if scheme.granularity == "block":
        side = scheme.group_size or 1
        scale = part.module.weight_scale.detach()[part.start // side : -(-part.stop // side)]
    found = {"weight_scale": weights.as_it_is(scale.flatten() if scheme.granularity == "tensor" else scale)}
    if HELD[scheme.name] == PACKED:
        words = -(-columns * scheme.weight_bits // 32)
        found["weight_packed"] = Stored(nbytes=4 * rows * words, make=_packed(part))
        found["weight_shape"] = weights.as_it_is(torch.tensor([rows, columns]))
    else:
        found["weight"] = Stored(nbytes=rows * columns, make=_bytes(part))
    zero = part.rows("weight_zero_point")
    if zero is not None:
        found["weight_zero_point"] = weights.as_it_is(pack_words(zero.t(), scheme.weight_bits).t())
    return found | {name: weights.as_it_is(value) for name, value in _inputs(part).items()}


def _inputs(part: Part) -> dict[str, Tensor]:
    """Calibrated scale and zero point of the inputs: x is close to scale * (stored - zero point)."""
    scale, offset = part.module._parameters.get("input_scale"), part.module._parameters.get("input_offset")
    if scale is None:
        return {}
    found = {"input_scale": scale.detach().reshape(1)}
    if offset is not None:
        found["input_zero_point"] = torch.round(-offset.detach() / scale.detach()).to(torch.int8).reshape(1)
    return found


def _packed(part: Part) -> Maker:
    def make() -> Tensor:
        stored = part.rows("weight")
        assert stored is not None
        if part.module.scheme.weight_bits == 4:
            return pack_words(unpack_int4(stored, part.module.columns), 4)
        return pack_words(stored.view(torch.uint8).bitwise_xor(128), 8)  # int8 plus 128

    return make


def _bytes(part: Part) -> Maker:
    def make() -> Tensor:
        stored = part.rows("weight")
        assert stored is not None
        return stored.contiguous().view(OCP.dtype) if part.module.scheme.weight_dtype == "fp8" else stored

    return make


def pack_words(values: Tensor, bits: int) -> Tensor:
    """uint8 [rows, columns] with values below 2^bits (4 or 8) to int32 [rows, ceil(columns * bits / 32)], the first lowest.

    What is short of a whole word is filled with zeros.
    """
    padded = F.pad(values, (0, -values.shape[1] % (32 // bits)))
    octets = padded if bits == 8 else padded[:, 0::2] | (padded[:, 1::2] << 4)
    return octets.flatten().view(torch.int32).reshape(values.shape[0], -1)  # flat first: one row or column may have any stride
