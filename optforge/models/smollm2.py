"""SmolLM2-135M-Instruct: a small trained language model that needs no hub, the default of every run.

It comes as a 4-bit GGUF inside a PyPI package and is converted once into safetensors in the user's cache. The
conversion permutes channels with a fixed seed. That changes no output, but it breaks up the source's own 4-bit grid
(groups of 32 neighbouring inputs), which would otherwise be reproduced exactly by an int4 scheme with the same groups and
make int4 look free.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optforge import fetch
from optforge.cache import building, cache_dir, sha256_of
from optforge.errors import MissingDependency, ModelError, Problem
from optforge.models.base import Companions, Loaded, Tell
from optforge.pretrained import check_dtype, filled, skeleton

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaConfig


FORMAT = 1
"""Of the converted folder; a change of the conversion counts it up, and older folders are made again."""
PERMUTATION_SEED = 135
NOTE = (
    "4-bit source: the weights were dequantized from a Q4_1 GGUF, so fp32 here is a 4-bit model already and every "
    "quantization is a second rounding; channels are permuted so that the source's grid does not flatter int4"
)
_LAYERS, _WIDTH, _HIDDEN, _HEADS, _KV_HEADS, _HEAD = 30, 576, 1536, 9, 3, 64
_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


@dataclass(frozen=True, kw_only=True)
class SmolLM2:
    """SmolLM2-135M-Instruct: Llama architecture, 30 layers of width 576, vocabulary 49,152, tied head."""

    dtype: str = "bf16"
    """fp32, fp16 or bf16: the dtype of all weights."""

    def check(self) -> Iterator[Problem]:
        yield from check_dtype(self.dtype)
        if _converted() is not None:
            return
        absent = fetch.missing("smollm2")
        if absent is not None:
            yield absent
        if find_spec("gguf") is None:
            yield Problem(where="model smollm2", what="gguf is not installed (it reads the source once)", fix="pip install 'optforge[hf]'")

    def skeleton(self) -> Loaded:
        from transformers import LlamaForCausalLM

        module = skeleton(LlamaForCausalLM, _config(), self.dtype)
        return Loaded(module=module, family="causal_lm", name="smollm2_135m", vocab_size=49_152, notes=[NOTE])

    def load(self, seed: int = 0, tell: Tell | None = None) -> Loaded:
        """Converts the source on the first call (about 12 s; `tell` gets a stage and a fraction), then maps the result."""
        from safetensors.torch import load_file
        from transformers import LlamaForCausalLM

        from optforge.checkpoint import check_safetensors, module_digest, require_finite

        folder = _converted() or _convert(tell)
        weights = folder / "model.safetensors"
        check_safetensors(weights)
        module = filled(LlamaForCausalLM, _config(), load_file(weights), self.dtype, str(weights))
        require_finite(module.named_parameters(), str(weights))
        return Loaded(
            module=module,
            family="causal_lm",
            name="smollm2_135m",
            tokenizer=_tokenizer(folder),
            vocab_size=49_152,
            digest=module_digest(module),
            notes=[NOTE],
        )

    def companions(self) -> Companions:
        """The tokenizer. Special tokens stand in the model's config; there is no generation config."""
        return Companions(tokenizer=_tokenizer(_converted() or _convert(None)))


def _tokenizer(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, clean_up_tokenization_spaces=False)


def _config() -> LlamaConfig:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=49_152,
        hidden_size=_WIDTH,
        intermediate_size=_HIDDEN,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        head_dim=_HEAD,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )


def _folder() -> Path:
    return cache_dir() / "models" / f"smollm2-135m-format{FORMAT}"


def _converted() -> Path | None:
    """The converted folder when it is whole; it appears by one rename, so its record and size are enough."""
    record = _folder() / "optforge.json"
    if not record.is_file():
        return None
    known = json.loads(record.read_text())
    weights = _folder() / "model.safetensors"
    whole = known["format"] == FORMAT and weights.is_file() and weights.stat().st_size == known["bytes"]
    return _folder() if whole else None


def _convert(tell: Tell | None) -> Path:
    """Dequantizes, permutes and stores the model and its tokenizer.

    Raises:
        ModelError: the source is not on this machine; carries the command that brings it.
        MissingDependency: gguf is not installed.
    """
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    tell = tell or (lambda stage, fraction: None)
    absent = fetch.missing("smollm2")
    if absent is not None:
        raise ModelError(absent)
    source = fetch.require("smollm2")
    file = next(source.glob("*.gguf"))
    with building(_folder()) as folder:
        state = permuted(_dequantized(file, tell), PERMUTATION_SEED)
        tell("storing SmolLM2", 0.6)
        weights = folder / "model.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, weights)
        _config().save_pretrained(folder)
        tell("reading its tokenizer", 0.7)
        AutoTokenizer.from_pretrained(source, gguf_file=file.name, local_files_only=True).save_pretrained(folder)
        record = {"format": FORMAT, "bytes": weights.stat().st_size, "sha256": sha256_of(weights), "permutation_seed": PERMUTATION_SEED}
        (folder / "optforge.json").write_text(json.dumps(record, indent=1) + "\n")
    tell("SmolLM2 converted", 1.0)
    return _folder()


def _dequantized(file: Path, tell: Tell) -> dict[str, Tensor]:
    """The GGUF's tensors in fp32 under transformers' names, q and k un-permuted."""
    import torch

    try:
        import gguf
    except ModuleNotFoundError as error:
        raise MissingDependency(Problem(where="model smollm2", what="gguf is not installed", fix="pip install 'optforge[hf]'")) from error
    tensors = gguf.GGUFReader(file).tensors
    state = {}
    for index, tensor in enumerate(tensors):
        tell("dequantizing SmolLM2", 0.6 * index / len(tensors))
        value = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        name = _name(tensor.name)
        heads = {"q_proj": _HEADS, "k_proj": _KV_HEADS}.get(name.split(".")[-2])
        state[name] = value if heads is None else _halves_apart(value, heads)
    return state


def _name(name: str) -> str:
    """transformers' name of a GGUF tensor."""
    if not name.startswith("blk."):
        return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
    _, layer, local, kind = name.split(".")
    return f"model.layers.{layer}.{_NAMES[local]}.{kind}"


def _halves_apart(weight: Tensor, heads: int) -> Tensor:
    """Rows [heads * head, width]: GGUF interleaves the two rotary halves of a head, transformers keeps them apart."""
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def permuted(state: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The same function with channels in another order: residual channels, each MLP's, and those inside each v head.

    Channels inside q and k heads stay, because rotary embedding ties them to their positions. In fp32 the logits move by
    rounding only.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(_WIDTH, generator=generator)
    new: dict[str, Any] = {
        "model.embed_tokens.weight": state["model.embed_tokens.weight"][:, order],
        "model.norm.weight": state["model.norm.weight"][order],
    }
    for layer in range(_LAYERS):
        start = f"model.layers.{layer}"
        hidden = torch.randperm(_HIDDEN, generator=generator)
        heads = torch.stack([torch.randperm(_HEAD, generator=generator) for _ in range(_KV_HEADS)])
        values = (heads + _HEAD * torch.arange(_KV_HEADS)[:, None]).flatten()
        per_query = heads.repeat_interleave(_HEADS // _KV_HEADS, dim=0)
        outputs = (per_query + _HEAD * torch.arange(_HEADS)[:, None]).flatten()
        rows = {
            "self_attn.v_proj": values,
            "mlp.gate_proj": hidden,
            "mlp.up_proj": hidden,
            "self_attn.o_proj": order,
            "mlp.down_proj": order,
        }
        columns = {"self_attn.o_proj": outputs, "mlp.down_proj": hidden}
        for local in _NAMES.values():
            name = f"{start}.{local}.weight"
            weight = state[name]
            if weight.dim() == 1:
                new[name] = weight[order]
                continue
            weight = weight[rows[local]] if local in rows else weight
            new[name] = weight[:, columns.get(local, order)]
    return new
