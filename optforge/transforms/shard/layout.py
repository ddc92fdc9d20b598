"""Which parameters of a decoder split over devices, and along which dimension: Megatron's columns and rows, FSDP's dimension 0.

The names of the linears decide (`q_proj`, `gate_up_proj`, `c_attn`, ...), since each decoder family keeps to one pattern:
what reads the residual stream splits by output columns, what writes back to it by input rows, and one all-reduce follows
(Shoeybi et al., Megatron-LM, 2019, section 3). A linear of an unknown name is kept whole on every device, and listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from optforge.select import PARTS, original_name, repeated_blocks

COLUMN, ROW, VOCABULARY, REPLICATED = "column", "row", "vocabulary", "replicated"

ATTENTION_INPUTS = frozenset(
    ["q_proj", "k_proj", "v_proj", "qkv_proj", "query", "key", "value", "query_key_value", "c_attn", "wq", "wk", "wv", "wqkv", "Wqkv"]
)
"""Linears whose output columns are heads."""
MLP_INPUTS = frozenset(["gate_proj", "up_proj", "gate_up_proj", "fc1", "fc_in", "c_fc", "dense_h_to_4h", "w1", "w3", "w1_w3", "lin1"])
PAIRS = frozenset(["gate_up_proj", "w1_w3"])
"""Of these, what a model itself keeps as two of one width."""
OUTPUTS = frozenset(["o_proj", "out_proj", "down_proj", "fc2", "fc_out", "c_proj", "dense", "dense_4h_to_h", "w2", "wo", "lin2"])


def role(name: str) -> str | None:
    """`column` or `row` for the dotted name of a linear of a repeated layer; None where the name says neither."""
    *parents, last = name.split(".")
    if not any(part.isdigit() for part in parents):
        return None
    if last in ATTENTION_INPUTS or last in MLP_INPUTS:
        return COLUMN
    return ROW if last in OUTPUTS else None


@dataclass(frozen=True, kw_only=True)
class Split:
    """A module that holds parameters, and how a tensor degree divides it."""

    name: str
    module: nn.Module
    role: str
    parts: tuple[int, ...] = ()
    """column: output columns of each linear that it stands for (three of a packed q/k/v)."""
    attention: bool = False
    """Its columns are heads."""


def splits(model: nn.Module) -> Iterator[Split]:
    """Every module that holds parameters of its own, under its original name, in the model's order."""
    vocabulary, blocks = _vocabulary(model), _inside(model)
    for path, module in model.named_modules():
        if not any(parameter is not None for parameter in module._parameters.values()):
            continue
        name = original_name(path)
        found = _linear(model, path, module) if id(module) in blocks else None
        if id(module) in vocabulary:
            found = Split(name=name, module=module, role=VOCABULARY)
        yield found or Split(name=name, module=module, role=REPLICATED)


def dimension(split: Split, parameter: str) -> int | None:
    """The dimension along which a tensor degree divides this parameter of a module; None where every device holds it whole.

    A scale per output channel splits with the columns, a scale per group with the rows; one scale for all stays whole.
    """
    tensor = split.module._parameters[parameter]
    if tensor is None or split.role == REPLICATED or tensor.dim() == 0:
        return None
    if split.role == ROW:
        divides = tensor.dim() > 1 and tensor.shape[_inputs(split.module)] > 1
        return _inputs(split.module) if divides else None
    at = 1 - _inputs(split.module) if tensor.dim() > 1 else 0
    return at if tensor.shape[at] > 1 else None


def out_features(module: nn.Module) -> int:
    """N of a linear, or of GPT-2's Conv1D."""
    return int(module.out_features if isinstance(module, nn.Linear) else module.weight.shape[1])  # type: ignore[index]  # a Conv1D's parameter


def in_features(module: nn.Module) -> int:
    """K of a linear, or of GPT-2's Conv1D."""
    return int(module.in_features if isinstance(module, nn.Linear) else module.weight.shape[0])  # type: ignore[index]  # a Conv1D's parameter


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)


def rows(model: nn.Module) -> int | None:
    """Size of the vocabulary: the config's where an embedding outside the repeated layers has it, else that of the largest such
    embedding; None without one."""
    sizes = [table.num_embeddings for table in _tables(model)]
    said = getattr(getattr(model, "config", None), "vocab_size", None)
    return said if said in sizes else max(sizes, default=None)


def units(model: nn.Module) -> tuple[dict[str, list[str]], list[str]]:
    """FSDP's groups, parameters by group, and what was decided about shared parameters.

    One group for each repeated layer, and one, "", for the rest. A parameter that two modules share must lie in one group
    (PyTorch refuses it in two), so layers that share one with others go to the rest's, whole.
    """
    blocks = repeated_blocks(model)
    holders: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(original_name(name))

    def block(name: str) -> str:
        return next((block for block in blocks if name.startswith(f"{block}.")), "")

    sharing = {home for names in holders.values() if len(homes := {block(name) for name in names}) > 1 for home in homes}
    groups: dict[str, list[str]] = {name: [] for name in [*blocks, ""]}
    notes = []
    for names in holders.values():
        home = "" if block(names[0]) in sharing else block(names[0])
        groups[home].extend(names)
        if len(names) > 1:
            notes.append(f"{' and '.join(names)} are one tensor: one FSDP group holds both ({home or 'the root'})")
    return {name: members for name, members in groups.items() if members}, notes


def _linear(model: nn.Module, path: str, module: nn.Module) -> Split | None:
    """How a linear of a repeated layer splits; None where its name does not tell."""
    if not is_linear(module):
        return None
    parent, name = path.rpartition(".")[0], original_name(path)
    packed = [f"{parent}.{part}" for part in getattr(module, PARTS, ())]
    names = [original_name(one) for one in packed] or [name]
    kinds = {role(one) for one in names}
    if len(kinds) != 1 or None in kinds:
        return None
    if packed:
        parts = tuple(int(model.get_submodule(one).out_features) for one in packed)  # type: ignore[arg-type]  # a PackedPart's int
    else:
        count = 2 if name.rpartition(".")[2] in PAIRS else 1
        parts = (out_features(module) // count,) * count
    attention = names[0].rpartition(".")[2] in ATTENTION_INPUTS
    return Split(name=name, module=module, role=str(kinds.pop()), parts=parts, attention=attention)


def _vocabulary(model: nn.Module) -> set[int]:
    """ids of the embedding of the vocabulary and of the linear that gives its logits."""
    size, inside = rows(model), _inside(model)
    if size is None:
        return set()
    heads = {id(m) for m in model.modules() if isinstance(m, nn.Linear) and id(m) not in inside and m.out_features == size}
    return heads | {id(table) for table in _tables(model) if table.num_embeddings == size}


def _tables(model: nn.Module) -> list[nn.Embedding]:
    inside = _inside(model)
    return [module for module in model.modules() if isinstance(module, nn.Embedding) and id(module) not in inside]


def _inside(model: nn.Module) -> set[int]:
    """ids of all modules of the repeated layers."""
    return {id(module) for block in repeated_blocks(model).values() for module in block.modules()}


def _inputs(module: nn.Module) -> int:
    """The dimension of a two-dimensional parameter that runs over the layer's inputs: 1 of an `nn.Linear`, 0 of a Conv1D."""
    return 1 if isinstance(module, (nn.Linear, nn.Embedding)) else 0
