"""A plain transformers checkpoint: every weight dequantized to the model's dtype, under the model's own names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from optforge.errors import ModelError, Problem
from optforge.export import checkpoint_folder, weights
from optforge.export.base import Subject, Written
from optforge.export.unpack import Part, Unpacked, unpack
from optforge.export.weights import Stored


class HuggingFace:
    """What `AutoModelForCausalLM.from_pretrained` loads with nothing else installed. Quantization is rounding that has happened."""

    name: ClassVar[str] = "huggingface"
    loads: ClassVar[str] = "transformers"
    packages: ClassVar[tuple[str, ...]] = ()

    def machine(self) -> Iterator[Problem]:
        yield from ()

    def refusals(self, subject: Subject) -> Iterator[Problem]:
        """A model that is none of transformers', or whose tensors its config no longer describes."""
        try:
            unpack(subject)
        except ModelError as error:
            yield from error.problems

    def nbytes(self, subject: Subject) -> int:
        return weights.total(_state(subject, unpack(subject)))

    def write(self, subject: Subject, folder: Path) -> Written:
        unpacked = unpack(subject)
        weights.write(_state(subject, unpacked), folder)
        notes = checkpoint_folder.write(subject, unpacked, folder)
        dtype = str(subject.dtype).removeprefix("torch.")
        rounds = any(part.module.scheme.activation_dtype for part in unpacked.parts.values())
        if rounds:
            notes.append("activations are not rounded here: the format holds weights alone")
        return Written(
            engine="transformers",
            module=subject.module,
            dtype=subject.dtype,
            options=checkpoint_folder.options(subject, unpacked, dtype),
            sizes=subject.inputs.sizes(),
            facts={"dtype": dtype, "dequantized_layers": len(unpacked.parts)},
            notes=tuple(notes),
        )


def _state(subject: Subject, unpacked: Unpacked) -> dict[str, Stored]:
    """Every tensor of the checkpoint."""
    state = {name: weights.as_it_is(tensor) for name, tensor in unpacked.tensors.items()}
    for name, part in unpacked.parts.items():
        size = part.shape[0] * part.shape[1] * subject.dtype.itemsize
        state[f"{name}.weight"] = Stored(nbytes=size, make=_maker(part, unpacked.layer(name), subject))
    return dict(sorted(state.items()))


def _maker(part: Part, layer: nn.Module | None, subject: Subject) -> weights.Maker:
    return lambda: dequantized(part, layer).to(subject.dtype)


def dequantized(part: Part, layer: nn.Module | None) -> Tensor:
    """fp32, in the layout of the layer that will hold it: [N, K], GPT-2's [K, N], or a convolution's four dimensions."""
    value = part.dequantize()
    if layer is None:
        return value
    if any(cls.__name__ == "Conv1D" for cls in type(layer).__mro__):
        return value.t()
    wanted = layer.weight
    assert isinstance(wanted, Tensor)
    return value.reshape(wanted.shape)
