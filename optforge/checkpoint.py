"""Reads weights from files and puts them into a module, refusing what is damaged, dangerous or incomplete.

safetensors files are checked against their own header before anything is mapped; pickles are read by PyTorch's
restricted loader only, so a file can never run code unless the user says `trust: true`. What can go wrong with weights
(truncated, NaN, left on the meta device, a tie lost, a name missing) is found here, before the first transform, where the
file's name is still known.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import struct
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optforge.errors import ModelError, Problem, TrustError

if TYPE_CHECKING:
    from torch import Tensor, nn

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_COMPILED = "_orig_mod."
_NAMES_SHOWN = 5


def read(path: Path, *, trust: bool = False) -> dict[str, Tensor]:
    """The state dict of a file (`.safetensors`, `.pt`, `.pth`, `.bin`, `.ckpt`) or of a folder in the hub's layout.

    Tensors are on the CPU in the file's own dtypes; the prefix `_orig_mod.` of compiled modules is stripped.

    Raises:
        ModelError: missing, truncated, damaged, or holding no tensors.
        TrustError: a pickle that needs more than tensors, while `trust` is False; names the globals it wants.
    """
    state: dict[str, Tensor] = {}
    for file in _files(path):
        state.update(_read_safetensors(file) if file.suffix == ".safetensors" else _read_pickle(file, trust))
    if not state:
        raise ModelError(Problem(where=str(path), what="holds no tensors", fix="give the file that holds the model's state dict"))
    return {name.replace(_COMPILED, ""): tensor for name, tensor in state.items()}


def _files(path: Path) -> list[Path]:
    """The weight files that make up a checkpoint."""
    if path.is_file():
        if path.suffix not in (".safetensors", *PICKLES):
            raise ModelError(
                Problem(where=str(path), what=f"unknown suffix {path.suffix!r}", fix="give .safetensors, .pt, .pth, .bin or .ckpt")
            )
        return [path]
    if not path.is_dir():
        raise ModelError(Problem(where=str(path), what="does not exist", fix="give a checkpoint file or a folder that holds one"))
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = path / f"{name}.index.json"
        if index.is_file():
            shards = sorted({path / shard for shard in json.loads(index.read_text())["weight_map"].values()})
            absent = [shard.name for shard in shards if not shard.is_file()]
            if absent:
                raise ModelError(Problem(where=str(path), what=f"{len(absent)} of {len(shards)} shards are missing: {', '.join(absent)}"))
            return shards
        if (path / name).is_file():
            return [path / name]
    raise ModelError(Problem(where=str(path), what="holds neither model.safetensors nor pytorch_model.bin"))


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    """Maps a safetensors file, after its size was held against its header."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_safetensors(path)
    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise ModelError(Problem(where=str(path), what=f"is damaged ({error})", fix="copy or download the file again")) from error


def check_safetensors(path: Path) -> None:
    """Holds a file's size against what its header announces (layout: 8 bytes of length, a JSON header, the data).

    Raises:
        ModelError: the file is shorter or longer than announced, with both sizes, or is no safetensors file.
    """
    found = path.stat().st_size
    fix = "copy or download the file again"
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if 8 + length > found:
                raise ModelError(
                    Problem(where=str(path), what=f"is truncated: its header needs {8 + length} bytes, found {found}", fix=fix)
                )
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(Problem(where=str(path), what="is not a safetensors file", fix=fix)) from error
    expected = 8 + length + max(ends, default=0)
    if found != expected:
        what = "truncated" if found < expected else "too long"
        raise ModelError(Problem(where=str(path), what=f"is {what}: {expected} bytes expected, found {found}", fix=fix))


def _read_pickle(path: Path, trust: bool) -> dict[str, Tensor]:
    """Reads a pickled state dict; anything beyond tensors and plain containers is refused unless trusted."""
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=not trust)
    except pickle.UnpicklingError as error:
        raise _refused(path, error) from error
    except (RuntimeError, EOFError, zipfile.BadZipFile, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        what = f"is truncated or damaged ({path.stat().st_size} bytes; {reason})"
        raise ModelError(Problem(where=str(path), what=what, fix="copy or download the file again")) from error
    return _tensors_of(content, path)


def _refused(path: Path, error: pickle.UnpicklingError) -> ModelError | TrustError:
    """What to say of a pickle that the restricted loader refused: the globals it wants, or that it is damaged."""
    from torch.serialization import get_unsafe_globals_in_checkpoint

    try:
        wanted = sorted(get_unsafe_globals_in_checkpoint(str(path)))
    except (ValueError, RuntimeError, pickle.UnpicklingError, EOFError):
        # not in PyTorch's zip layout, or an opcode that is refused itself: the loader's message names the first one
        wanted = re.findall(r"GLOBAL ([\w.]+)", str(error))[:1]
    if not wanted:
        reason = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()[-1].strip()
        return ModelError(Problem(where=str(path), what=f"is no file of weights, or damaged ({reason})", fix="save it as safetensors"))
    what = f"loading it would run code: it wants {', '.join(wanted)}"
    return TrustError(Problem(where=str(path), what=what, fix="save it as safetensors, or set model.trust=true if you trust the file"))


def _tensors_of(content: Any, path: Path) -> dict[str, Tensor]:
    """The state dict inside what a file holds: itself, or under `state_dict` or `model`, or a whole module's."""
    import torch

    if isinstance(content, torch.nn.Module):
        return dict(content.state_dict())
    if isinstance(content, Mapping):
        for key in ("state_dict", "model"):
            if isinstance(content.get(key), Mapping):
                content = content[key]
                break
        if all(isinstance(value, torch.Tensor) for value in content.values()):
            return dict(content)
    raise ModelError(Problem(where=str(path), what="holds no state dict", fix="save module.state_dict(), best as safetensors"))


def require_finite(state: Iterable[tuple[str, Tensor]], where: str, *, allow: bool = False) -> list[str]:
    """Names tensors that hold NaN or Inf, with counts; returns them as sentences when `allow` is True.

    Raises:
        ModelError: there is at least one, and `allow` is False.
    """
    import torch

    bad = []
    for name, tensor in state:
        if not tensor.is_floating_point() or tensor.is_meta or _finite(tensor):
            continue
        wide = tensor.float()  # fp8 lacks most operations
        nan, inf = int(torch.isnan(wide).sum()), int(torch.isinf(wide).sum())
        bad.append(f"{name} ({nan} NaN, {inf} Inf of {tensor.numel()})")
    if bad and not allow:
        what = f"{len(bad)} tensors hold values that are not finite: {some(bad)}"
        raise ModelError(Problem(where=where, what=what, fix="repair the checkpoint, or set model.allow_nonfinite=true"))
    return [f"not finite: {entry}" for entry in bad]


def _finite(tensor: Tensor) -> bool:
    """Whether all values are finite: NaN and Inf both reach the smallest or largest value, found in one pass."""
    import torch

    if tensor.numel() == 0:
        return True
    wide = tensor if tensor.element_size() > 1 else tensor.float()  # fp8 has no comparisons of its own
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(wide))


def require_materialised(module: nn.Module, where: str) -> None:
    """Refuses parameters and buffers that have no values.

    Raises:
        ModelError: some are on the meta device; lists them.
    """
    from optforge.measure.size import tensors

    absent = [name for name, tensor in tensors(module) if tensor.is_meta]
    if absent:
        what = f"{len(absent)} tensors are on the meta device and have no values: {some(absent)}"
        raise ModelError(Problem(where=where, what=what, fix="give model.checkpoint, or build the model with its weights"))


def digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 over names, dtypes, shapes and bytes, in the order of names. Tensors are read on the CPU."""
    import torch

    total = hashlib.sha256()
    for name, tensor in sorted(named, key=lambda item: item[0]):
        total.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        total.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return total.hexdigest()


def module_digest(module: nn.Module) -> str:
    """`digest` over a module's parameters and buffers, a tied one once."""
    from optforge.measure.size import tensors

    return digest(tensors(module))


def fill_(module: nn.Module, state: Mapping[str, Tensor], where: str) -> None:
    """Puts a state dict into a module, which may be on the meta device; ties of the definition are kept.

    Raises:
        ModelError: names or shapes differ, or two tied names hold different values.
    """
    import torch

    groups = _ties(module)
    complete = dict(state)
    for names in groups:
        given = [name for name in names if name in state]
        if any(not torch.equal(state[given[0]], state[name]) for name in given[1:]):
            raise ModelError(Problem(where=where, what=f"{' and '.join(given)} are tied in the model and differ in the checkpoint"))
        complete.update({name: state[given[0]] for name in names if given})
    _check_names(module, complete, where)
    module.load_state_dict(complete, strict=True, assign=True)
    for names in groups:
        shared = module.get_parameter(names[0])
        for name in names[1:]:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, shared)


def _ties(module: nn.Module) -> list[list[str]]:
    """Names that are one parameter, in groups of two or more."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _check_names(module: nn.Module, state: Mapping[str, Tensor], where: str) -> None:
    """Refuses a state dict whose names or shapes are not the module's."""
    own = module.state_dict()
    faults = []
    absent, foreign = [n for n in own if n not in state], [n for n in state if n not in own]
    if absent:
        faults.append(f"{len(absent)} tensors are missing: {some(absent)}")
    if foreign:
        faults.append(f"{len(foreign)} tensors are not the model's: {some(foreign)}")
    for name, tensor in own.items():
        if name in state and state[name].shape != tensor.shape:
            faults.append(f"{name} is {tuple(state[name].shape)}, the model's is {tuple(tensor.shape)}")
    if faults:
        raise ModelError(*(Problem(where=where, what=fault) for fault in faults[: _NAMES_SHOWN + 2]))


def some(names: list[str]) -> str:
    """The first few of many names, and how many more there are."""
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
