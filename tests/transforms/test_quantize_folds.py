"""Where scales fold is found by running a block, for any model family: held against what the families' code does, worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llamas
import pytest
import torch
from torch import Tensor, nn

from optforge.calibrate.walk import Block
from optforge.transforms.fuse.packing import pack_
from optforge.transforms.quantize import folds
from optforge.transforms.quantize.folds import NORM, NORM_FROM_ONE, ROWS

WIDTH, HIDDEN, HEADS, KV_HEADS = llamas.WIDTH, llamas.HIDDEN, llamas.HEADS, llamas.KV_HEADS
HEAD = WIDTH // HEADS


def block_of(model: nn.Module, module: nn.Module) -> Block:
    """The first layer of a model with the arguments that some tokens give it."""
    calls: list[Any] = []
    handle = module.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    ids = torch.randint(0, 128, (1, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    handle.remove()
    return Block(name="layer", module=module, calls=calls, device=torch.device("cpu"))


def found(block: Block, shared: set[int] | None = None) -> tuple[dict[str, tuple[str, str, int, int]], dict[str, str], list[folds.Fold]]:
    """Reader -> source, kind and rows; the refused; the folds."""
    linears = {path: module for path, module in block.module.named_modules() if folds.is_linear(module)}
    before = {name: value.clone() for name, value in block.module.state_dict().items()}
    with torch.no_grad():
        result, refused = folds.find(block, block.calls[0], linears, shared or set())
    assert all(torch.equal(before[name], value) for name, value in block.module.state_dict().items()), "everything is put back"
    return {path: (f.source, f.kind, f.start, f.stop) for f in result for path in f.readers}, refused, result


def grouped_heads() -> Tensor:
    """The v row behind each column of the output projection: query head h reads key-value head h // (heads / kv heads)."""
    return torch.tensor([(head // (HEADS // KV_HEADS)) * HEAD + at for head in range(HEADS) for at in range(HEAD)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_llama_layer(dtype: torch.dtype) -> None:
    model = llamas.module(dtype=dtype)
    where, refused, result = found(block_of(model, model.model.layers[0]))
    assert refused == {}
    assert where == {
        **{f"self_attn.{name}_proj": ("input_layernorm", NORM, 0, WIDTH) for name in "qkv"},
        "self_attn.o_proj": ("self_attn.v_proj", ROWS, 0, KV_HEADS * HEAD),
        **{f"mlp.{name}_proj": ("post_attention_layernorm", NORM, 0, WIDTH) for name in ("gate", "up")},
        "mlp.down_proj": ("mlp.up_proj", ROWS, 0, HIDDEN),
    }
    (values,) = [fold for fold in result if fold.source == "self_attn.v_proj"]
    assert values.channels is not None and torch.equal(values.channels, grouped_heads())
    assert all(fold.channels is None for fold in result if fold is not values)


def test_a_packed_llama_layer() -> None:
    model = llamas.module()
    layer = model.model.layers[0]
    pack_(layer.self_attn, "qkv_proj", ["q_proj", "k_proj", "v_proj"])
    pack_(layer.mlp, "gate_up_proj", ["gate_proj", "up_proj"])
    where, refused, result = found(block_of(model, layer))
    rows = WIDTH + 2 * KV_HEADS * HEAD
    assert refused == {}
    assert where["self_attn.o_proj"] == ("self_attn.qkv_proj", ROWS, rows - KV_HEADS * HEAD, rows)
    assert where["mlp.down_proj"] == ("mlp.gate_up_proj", ROWS, HIDDEN, 2 * HIDDEN)
    (values,) = [fold for fold in result if fold.readers == ("self_attn.o_proj",)]
    assert values.channels is not None and torch.equal(values.channels, grouped_heads())


def gpt2() -> tuple[nn.Module, nn.Module]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=128, bos_token_id=None, eos_token_id=None))
    return model, model.transformer.h[0]


def opt() -> tuple[nn.Module, nn.Module]:
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 32}
    model = OPTForCausalLM(OPTConfig(**sizes, vocab_size=128))
    return model, model.model.decoder.layers[0]


def gemma2() -> tuple[nn.Module, nn.Module]:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = Gemma2ForCausalLM(Gemma2Config(**sizes, intermediate_size=64, vocab_size=128))
    return model, model.model.layers[0]


def phi3() -> tuple[nn.Module, nn.Module]:
    from transformers import Phi3Config, Phi3ForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    model = Phi3ForCausalLM(Phi3Config(**sizes, vocab_size=128, pad_token_id=0))
    return model, model.model.layers[0]


@pytest.mark.parametrize(
    ("family", "expected", "left"),
    [
        # c_attn holds q, k and v in one; gelu is no product with its input, so nothing goes before mlp.c_proj
        (gpt2, {"attn.c_attn": ("ln_1", NORM, 0, 32), "attn.c_proj": ("attn.c_attn", ROWS, 64, 96)}, {"mlp.c_proj"}),
        (opt, {"fc2": ("fc1", ROWS, 0, 64), "self_attn.out_proj": ("self_attn.v_proj", ROWS, 0, 32)}, set()),  # relu(c x) = c relu(x)
        (gemma2, {"mlp.up_proj": ("pre_feedforward_layernorm", NORM_FROM_ONE, 0, 32)}, set()),
        (phi3, {"self_attn.o_proj": ("self_attn.qkv_proj", ROWS, 48, 64), "mlp.down_proj": ("mlp.gate_up_proj", ROWS, 64, 128)}, set()),
    ],
    ids=["gpt2", "opt", "gemma2", "phi3"],
)
def test_other_families(family: Callable[[], tuple[nn.Module, nn.Module]], expected: dict[str, Any], left: set[str]) -> None:
    torch.manual_seed(0)
    model, layer = family()
    where, refused, _ = found(block_of(model.eval(), layer))
    assert expected.items() <= where.items()
    assert refused.keys() == left


class Reads(nn.Module):
    """A norm whose output something else than a linear layer reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return self.linear(normed) + normed.tanh()


def test_a_norm_that_is_read_by_something_else_carries_nothing() -> None:
    module = Reads()
    block = Block(name="", module=module, calls=[((torch.randn(4, 32),), {})], device=torch.device("cpu"))
    where, refused, _ = found(block)
    assert where == {} and refused == {"linear": "norm is also read by something else than linear layers"}


def test_shared_weights_carry_nothing() -> None:
    model = llamas.module()
    layer = model.model.layers[0]
    where, refused, _ = found(block_of(model, layer), {id(layer.input_layernorm.weight), id(layer.mlp.gate_proj.weight)})
    assert refused.keys() == {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"}
    assert "mlp.gate_proj, which reads the same inputs, cannot be scaled" in refused["mlp.up_proj"]
    assert where["self_attn.o_proj"][0] == "self_attn.v_proj"


def test_folding_changes_nothing_but_the_inputs() -> None:
    """Any scales at all, worked into source and readers: the block gives what it gave."""
    model = llamas.module()
    layer = model.model.layers[0]
    block = block_of(model, layer)
    _, _, result = found(block)
    args, kwargs = block.calls[0]
    with torch.no_grad():
        expected = layer(*args, **kwargs)
        for fold in result:
            scales = torch.rand(fold.size, generator=torch.Generator().manual_seed(1)) + 0.5
            source = layer.get_submodule(fold.source)
            for name, tensor in folds.multiplied(source, fold, 1 / scales).items():
                source._parameters[name] = nn.Parameter(tensor)
            for path in fold.readers:
                reader = layer.get_submodule(path)
                reader._parameters["weight"] = nn.Parameter(folds.scaled(reader, inputs=fold.spread(scales))["weight"])
        torch.testing.assert_close(layer(*args, **kwargs), expected, atol=1e-5, rtol=1e-5)
