"""Builds transformers models from a config: the structure on the meta device, and the same filled with weights.

transformers' own loader does the filling, because it knows each architecture's ties, renamed keys and buffers (rotary
tables are not in any checkpoint and would stay on the meta device); the reading and checking of files is ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optforge.checkpoint import some
from optforge.errors import ModelError, Problem
from optforge.models.base import Companions

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name in `spec.DTYPES`."""
    import torch

    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[name]


def check_dtype(name: str) -> Iterator[Problem]:
    """A problem when `name` is not a dtype that weights can have."""
    from optforge.errors import near
    from optforge.spec import DTYPES

    if name not in DTYPES:
        fix = near(name, DTYPES) or f"one of {', '.join(DTYPES)}"
        yield Problem(where="model.dtype", what=f"{name!r} is no dtype of weights", fix=fix)


def skeleton(auto: Any, config: PreTrainedConfig, dtype: str, **options: Any) -> PreTrainedModel:
    """The module tree on the meta device, in eval mode. `auto` is a transformers auto class or a model class."""
    import torch

    build = auto.from_config if hasattr(auto, "from_config") else auto._from_config
    with torch.device("meta"):
        model: PreTrainedModel = build(config, dtype=torch_dtype(dtype), attn_implementation="sdpa", **options)
    model.train(False)
    return model


def filled(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, state: Mapping[str, Tensor], dtype: str, where: str
) -> PreTrainedModel:
    """The model on the CPU with `state` as weights, cast to `dtype`; ties kept, rotary tables computed.

    Raises:
        ModelError: a tensor is missing, foreign, or of another shape.
    """
    with _quiet():
        load: Any = model_class.from_pretrained  # typed as giving the model alone, which it does not with loading info
        model, found = load(
            None,
            config=config,
            state_dict=dict(state),
            dtype=torch_dtype(dtype),
            attn_implementation="sdpa",
            output_loading_info=True,
            local_files_only=True,
        )
    faults = {
        "tensors are missing": found["missing_keys"],
        "tensors are not the model's": found["unexpected_keys"],
        "tensors have another shape": found["mismatched_keys"],
    }
    problems = [
        Problem(where=where, what=f"{len(names)} {what}: {some(sorted(map(str, names)))}") for what, names in faults.items() if names
    ]
    if problems:
        raise ModelError(*problems)
    model.train(False)
    checked: PreTrainedModel = model
    return checked


def companions(folder: Path, *, trust: bool = False) -> Companions:
    """The tokenizer and the generation config of a checkpoint's folder, each where it has one. Touches no network."""
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = generation = None
    if list(folder.glob("tokenizer*")):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
    if (folder / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return Companions(tokenizer=tokenizer, generation_config=generation)


def random_state(structure: nn.Module, seed: int) -> dict[str, Tensor]:
    """Weights for shapes and speed: normal with deviation 0.02 (the architectures' own), norms 1, biases 0.

    One block of normal numbers serves all tensors, each from its own offset: drawing 8 billion takes minutes, copying
    them takes seconds. The values mean nothing either way.
    """
    import torch

    block = torch.empty(2**24).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(seed))
    state, start = {}, 0
    for name, tensor in structure.named_parameters():
        if tensor.dim() < 2:
            value = 0.0 if name.endswith("bias") else 1.0
            state[name] = torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu")
            continue
        block = block.to(tensor.dtype)
        state[name] = _repeated(block, start, tensor.numel()).view(tensor.shape)
        start = (start + 1_000_003) % block.numel()
    return state


def _repeated(block: Tensor, start: int, count: int) -> Tensor:
    """`count` values of a block, read from `start` on and again from its beginning as often as needed."""
    import torch

    flat, done = torch.empty(count, dtype=block.dtype), 0
    while done < count:
        take = min(block.numel() - start, count - done)
        flat[done : done + take] = block[start : start + take]
        done, start = done + take, 0
    return flat


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences transformers' progress bar and loading report, whose findings become errors here, and restores both."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
