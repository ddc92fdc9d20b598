"""Prefill: only the last position's logits, operations and bytes by hand."""

from __future__ import annotations

import pytest
import torch
from llamas import HEADS, LAYERS, POSITIONS, VOCABULARY, WIDTH, layer_flops, layer_weights, llama, rotary_flops
from torch import nn

from optforge.data.tokens import RandomTokens
from optforge.models.base import Loaded
from optforge.workloads.base import Work, Workload
from optforge.workloads.forward import Forward
from optforge.workloads.prefill import Prefill

CPU = torch.device("cpu")
ROTARY = WIDTH // HEADS // 2
"""Entries of a rotary table; transformers keeps two of them as buffers."""


def test_protocols() -> None:
    assert isinstance(Prefill(), Workload)
    assert isinstance(Prefill(prompt_tokens=4).prepare(llama(), RandomTokens(), CPU), Work)


def test_it_gives_the_last_positions_logits_of_the_whole_pass() -> None:
    loaded = llama()
    work = Prefill(batch_size=3, prompt_tokens=10).prepare(loaded, RandomTokens(), CPU)
    assert (work.unit, work.units, work.calls) == ("tokens", 30, 1)
    whole = Forward(batch_size=3, sequence=10).prepare(loaded, RandomTokens(), CPU).run(loaded.module)
    found = work.run(loaded.module)
    assert found.shape == (3, 1, VOCABULARY)
    torch.testing.assert_close(found, whole[:, -1:])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_operations_by_hand_also_on_meta(device: str) -> None:
    loaded = llama(device)
    work = Prefill(batch_size=2, prompt_tokens=10).prepare(loaded, RandomTokens(), torch.device(device))
    # the head runs on one position of each prompt, attention is counted in full
    assert work.flops(loaded.module) == 2 * (LAYERS * layer_flops(10, 10) + 2 * WIDTH * VOCABULARY) + rotary_flops(10)


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_by_hand(tied: bool) -> None:
    loaded = llama(tie_word_embeddings=tied)
    work = Prefill(batch_size=1, prompt_tokens=10).prepare(loaded, RandomTokens(), CPU)
    weights = LAYERS * layer_weights() + WIDTH + VOCABULARY * WIDTH
    rows = 0 if tied else 10 * WIDTH
    assert work.bytes(loaded.module) == 4 * (weights + rows + 2 * ROTARY)


def test_quantized_weights_count_as_they_are_stored() -> None:
    loaded = llama()
    work = Prefill(prompt_tokens=10).prepare(loaded, RandomTokens(), CPU)
    before = work.bytes(loaded.module)
    projection = loaded.module.model.layers[0].mlp.down_proj
    projection.weight = nn.Parameter(torch.zeros(projection.weight.shape, dtype=torch.int8), requires_grad=False)
    projection.weight_scale = nn.Parameter(torch.ones(projection.out_features), requires_grad=False)
    stored = projection.weight.numel()
    assert work.bytes(loaded.module) == before - 4 * stored + stored + 4 * projection.out_features


def test_example_runs_on_meta() -> None:
    loaded = llama("meta")
    args, kwargs = Prefill().example(loaded, torch.device("meta"))
    assert kwargs["input_ids"].device.type == "meta"
    args, kwargs = Prefill().example(llama(), CPU)
    assert llama().module(*args, **kwargs).logits.shape == (2, 1, VOCABULARY)


def test_check_says_what_is_wrong() -> None:
    long = POSITIONS + 1
    problems = [str(p) for p in Prefill(batch_size=0, prompt_tokens=long).check(llama())]
    assert problems == [
        "workload.batch_size: must be 1 or more, is 0; workload.batch_size=1",
        f"workload.prompt_tokens: {long} tokens are more than the {POSITIONS} positions of tiny; workload.prompt_tokens={POSITIONS}",
    ]
    (other,) = Prefill().check(Loaded(module=nn.Identity(), family="image_classifier", name="x"))
    assert "not image_classifier" in str(other)
    (older,) = Prefill().check(Loaded(module=nn.Identity(), family="causal_lm", name="x"))
    assert "takes no logits_to_keep" in str(older)
