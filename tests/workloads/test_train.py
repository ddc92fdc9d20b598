"""Train: a real step, held against a loop written by hand, PyTorch's own flop counter, and formulas from the sizes."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from llamas import POSITIONS, VOCABULARY, WIDTH, layer_weights, llama
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from optforge.data.tokens import RandomTokens
from optforge.models.base import Loaded
from optforge.workloads.base import Work, Workload
from optforge.workloads.train import LEARNING_RATE, Optimizer, Train

CPU = torch.device("cpu")
PARAMETERS = 2 * layer_weights() + WIDTH + 2 * VOCABULARY * WIDTH
"""Of the tiny model: two layers, the last norm, embedding and head."""


def test_protocols() -> None:
    assert isinstance(Train(), Workload)
    assert isinstance(Train(sequence=4).prepare(llama(), RandomTokens(), CPU), Work)


@pytest.mark.parametrize("optimizer", list(Optimizer), ids=lambda o: o.name)
def test_the_loss_falls_over_twenty_steps(optimizer: Optimizer) -> None:
    loaded = llama()
    work = Train(batch_size=4, sequence=16, optimizer=optimizer).prepare(loaded, RandomTokens(), CPU)
    losses = [float(work.run(loaded.module)) for _ in range(20)]
    assert all(later < earlier for earlier, later in pairwise(losses))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_is_that_of_a_loop_written_by_hand(accumulate: int) -> None:
    loaded = llama()
    plain = copy.deepcopy(loaded.module).train()
    work = Train(batch_size=2, sequence=16, accumulate=accumulate).prepare(loaded, RandomTokens(), CPU)
    assert (work.unit, work.units, work.calls) == ("tokens", 2 * 16 * accumulate, accumulate)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE, fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        total = 0.0
        for ids in work.ids.chunk(accumulate):
            logits = plain(input_ids=ids).logits[:, :-1]
            loss = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1)) / accumulate
            loss.backward()
            total += loss.item()
        optimizer.step()
        assert float(work.run(loaded.module)) == pytest.approx(total, rel=1e-6)
    for found, expected in zip(loaded.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_modules_keep_the_mode_that_they_were_in() -> None:
    loaded = llama()
    loaded.module.model.norm.train()
    before = {name: module.training for name, module in loaded.module.named_modules()}
    Train(batch_size=1, sequence=8).prepare(loaded, RandomTokens(), CPU).run(loaded.module)
    assert {name: module.training for name, module in loaded.module.named_modules()} == before


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_operations_are_those_that_pytorch_counts(device: str) -> None:
    loaded = llama(device)
    work = Train(batch_size=2, sequence=16).prepare(loaded, RandomTokens(), torch.device(device))
    real = llama()
    counter = FlopCounterMode(display=False)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH), counter:
        Train(batch_size=2, sequence=16).prepare(real, RandomTokens(), CPU).run(real.module)
    # the rotary tables' product has no backward pass, and is counted as if it had
    assert work.flops(loaded.module) == pytest.approx(counter.get_total_flops(), rel=1e-3)


@pytest.mark.parametrize(("optimizer", "states"), [(Optimizer.adamw, 2), (Optimizer.sgd, 0)])
def test_bytes_by_hand(optimizer: Optimizer, states: int) -> None:
    loaded = llama("meta")
    workload = Train(batch_size=2, sequence=16, accumulate=3, optimizer=optimizer)
    weights = 4 * PARAMETERS
    assert workload.state_bytes(weights) == states * weights
    assert workload.update_bytes(weights) == ((2 + states) * weights, (1 + states) * weights)
    table, rotary = 4 * VOCABULARY * WIDTH, 2 * 4 * (WIDTH // 4 // 2)
    rows = 4 * 32 * WIDTH  # an embedding is read by row, 32 tokens a batch
    reads = 6 * (weights - table + rows + rotary)
    found = workload.prepare(loaded, RandomTokens(), torch.device("meta")).bytes(loaded.module)
    assert found == reads + 5 * weights + (3 + 2 * states) * weights


def test_frozen_weights_have_no_gradient_and_no_state() -> None:
    loaded = llama()
    loaded.module.model.embed_tokens.weight.requires_grad_(False)
    before = loaded.module.model.embed_tokens.weight.clone()
    work = Train(batch_size=2, sequence=8).prepare(loaded, RandomTokens(), CPU)
    work.run(loaded.module)
    assert torch.equal(loaded.module.model.embed_tokens.weight, before)
    assert work.bytes(loaded.module) < Train(batch_size=2, sequence=8).prepare(llama(), RandomTokens(), CPU).bytes(llama().module)
    with pytest.raises(ValueError, match="no weights"):
        work.run(loaded.module.requires_grad_(False).model)


def test_check_says_what_is_wrong() -> None:
    problems = [str(p) for p in Train(batch_size=0, accumulate=0, sequence=POSITIONS + 1).check(llama())]
    assert problems == [
        "workload.batch_size: must be 1 or more, is 0; workload.batch_size=1",
        "workload.accumulate: must be 1 or more, is 0; workload.accumulate=1",
        f"workload.sequence: {POSITIONS + 1} tokens are more than the {POSITIONS} positions of tiny; workload.sequence={POSITIONS}",
    ]
    (short,) = Train(sequence=1).check(llama())
    assert "must be 2 or more" in str(short)
    (other,) = Train().check(Loaded(module=nn.Identity(), family="image_classifier", name="x"))
    assert "not image_classifier" in str(other)
    (lossless,) = Train().check(Loaded(module=nn.Identity(), family="causal_lm", name="x"))
    assert "takes no labels" in str(lossless)


def test_example_runs() -> None:
    args, kwargs = Train().example(llama(), CPU)
    assert llama().module(*args, **kwargs).logits.shape == (2, 8, VOCABULARY)
