"""Train: real steps, held against a loop written by hand, PyTorch's own flop counter, and formulas from the sizes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from llamas import POSITIONS, VOCABULARY, WIDTH, layer_weights, llama
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from toys import tiny_cnn, tiny_lm

from optforge.data.inputs import Inputs
from optforge.data.tokens import RandomTokens
from optforge.errors import DataError
from optforge.models.base import Loaded
from optforge.training.settings import Settings
from optforge.training.stream import Batch, Stream
from optforge.workloads.base import Work, Workload
from optforge.workloads.train import Optimizer, Train, TrainWork

CPU = torch.device("cpu")
PARAMETERS = 2 * layer_weights() + WIDTH + 2 * VOCABULARY * WIDTH
"""Of the tiny model: two layers, the last norm, embedding and head."""
RATE = 1e-4


def prepared(loaded: Loaded, **options: object) -> TrainWork:
    return Train(**{"batch_size": 2, "sequence": 16, "warmup": 0, **options}).prepare(loaded, RandomTokens(), CPU)  # type: ignore[arg-type]


def labelled(batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Images of three classes that differ in their mean."""
    draw = torch.Generator().manual_seed(0)
    while True:
        labels = torch.randint(3, (batch_size,), generator=draw)
        yield torch.randn(batch_size, 3, 16, 16, generator=draw) + labels[:, None, None, None], labels


def test_protocols() -> None:
    assert isinstance(Train(), Workload)
    assert isinstance(prepared(llama()), Work)


@pytest.mark.parametrize("optimizer", list(Optimizer), ids=lambda o: o.name)
def test_the_loss_falls_over_twenty_steps_on_four_sequences(optimizer: Optimizer) -> None:
    loaded = llama()
    work = prepared(loaded, batch_size=4, steps=1, optimizer=optimizer)
    losses = [float(work.run(loaded.module)) for _ in range(20)]
    assert all(later < earlier for earlier, later in pairwise(losses))


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (3, None), (2, 0.05)])
def test_a_step_is_that_of_a_loop_written_by_hand(accumulate: int, clip: float | None) -> None:
    loaded = llama()
    plain = copy.deepcopy(loaded.module).train()
    work = prepared(loaded, accumulate=accumulate, clip=clip)
    assert (work.unit, work.units, work.calls) == ("tokens", 2 * 16 * accumulate, accumulate)
    batches = work.stream.again()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=RATE, weight_decay=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(accumulate):
            ids = batches.next().kwargs["input_ids"]
            logits = plain(input_ids=ids).logits[:, :-1]
            loss = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1)) / accumulate
            loss.backward()
            total += loss.item()
        if clip is not None:
            norm = torch.sqrt(sum(p.grad.square().sum() for p in plain.parameters()))
            assert norm > clip, "nothing would be cut"
            for parameter in plain.parameters():
                parameter.grad *= clip / (norm + 1e-6)
        optimizer.step()
        assert float(work.run(loaded.module)) == pytest.approx(total, rel=1e-6)
    for found, expected in zip(loaded.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_learning_rate_rises_to_its_value() -> None:
    loaded = llama()
    work = prepared(loaded, warmup=3, optimizer=Optimizer.sgd)
    rates = []
    for _ in range(6):
        work.run(loaded.module)
        rates.append(work.trainer(loaded.module).optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([RATE / 4, RATE / 2, RATE * 3 / 4, RATE, RATE, RATE])


def test_two_trainings_do_not_touch_each_others_weights_nor_data() -> None:
    first, second = llama(), llama()
    work = prepared(first)
    alone = [float(work.run(second.module)) for _ in range(3)]
    in_turns = []
    third = llama()
    for _ in range(3):
        in_turns.append(float(work.run(first.module)))
        work.run(third.module)
    assert in_turns == alone
    assert all(torch.equal(a, b) for a, b in zip(first.module.parameters(), third.module.parameters(), strict=True))


def test_a_training_goes_on_from_a_stored_state_as_if_it_had_not_stopped() -> None:
    whole, part = llama(), llama()
    work = prepared(whole, accumulate=2)
    losses = [float(work.run(whole.module)) for _ in range(6)]
    before = [float(work.run(part.module)) for _ in range(3)]
    stored = copy.deepcopy(work.trainer(part.module).state_dict())
    again = llama(seed=7)
    trainer = work.trainer(again.module)
    trainer.load_state_dict(stored)
    assert before + [float(trainer.step()) for _ in range(3)] == losses
    stored["stream"]["items"] += 1
    with pytest.raises(ValueError, match="items of data"):
        trainer.load_state_dict(stored)


def test_b112_each_rank_takes_its_part_of_the_same_global_batches_and_another_global_batch_is_refused() -> None:
    """B112: the place in the data is that of global batches; a resume that would read others says both numbers."""

    def stream(size: int, rank: int, ranks: int) -> Stream:
        return Stream(10, lambda picked: Batch(args=tuple(picked)), batch_size=size, seed=3, rank=rank, ranks=ranks)

    whole, parts = stream(4, 0, 1), [stream(2, rank, 2) for rank in range(2)]
    for _ in range(6):  # beyond the first pass over ten items
        assert whole.next().args == parts[0].next().args + parts[1].next().args
    alone = stream(4, 0, 1)
    alone.load_state_dict(parts[1].state_dict())
    assert alone.next().args == whole.next().args
    with pytest.raises(ValueError, match="had 4 items in a global batch, this one has 6"):
        stream(2, 0, 3).load_state_dict(whole.state_dict())


def test_once_leaves_weights_and_modes_as_they_were() -> None:
    loaded = llama()
    loaded.module.model.norm.train()
    before = {name: module.training for name, module in loaded.module.named_modules()}
    weights = copy.deepcopy(loaded.module.state_dict())
    work = prepared(loaded)
    work.once(loaded.module)
    assert all(parameter.grad is not None for parameter in loaded.module.parameters())
    work.probe(loaded.module)
    assert all(parameter.grad is None for parameter in loaded.module.parameters())
    assert {name: module.training for name, module in loaded.module.named_modules()} == before
    assert all(torch.equal(weights[name], tensor) for name, tensor in loaded.module.state_dict().items())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_operations_are_those_that_pytorch_counts(device: str) -> None:
    loaded = llama(device)
    work = Train(batch_size=2, sequence=16).prepare(loaded, RandomTokens(), torch.device(device))
    real = llama()
    counter = FlopCounterMode(display=False)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH), counter:
        prepared(real).run(real.module)
    # the rotary tables' product has no backward pass, and is counted as if it had
    assert work.flops(loaded.module) == pytest.approx(counter.get_total_flops(), rel=1e-3)


@pytest.mark.parametrize(("optimizer", "states"), [(Optimizer.adamw, 2), (Optimizer.sgd, 0)])
def test_bytes_by_hand(optimizer: Optimizer, states: int) -> None:
    loaded = llama("meta")
    workload = Train(batch_size=2, sequence=16, accumulate=3, optimizer=optimizer)
    weights = 4 * PARAMETERS
    assert sum(workload.state_bytes(parameter, Settings()) for parameter in loaded.module.parameters()) == states * weights
    table, rotary = 4 * VOCABULARY * WIDTH, 2 * 4 * (WIDTH // 4 // 2)
    rows = 4 * 32 * WIDTH  # an embedding is read by row, 32 tokens a batch
    reads = 6 * (weights - table + rows + rotary)
    found = workload.prepare(loaded, RandomTokens(), torch.device("meta")).bytes(loaded.module)
    assert found == reads + 5 * weights + (3 + 2 * states) * weights


def test_what_a_training_holds_by_hand() -> None:
    loaded = llama()
    work = prepared(loaded)
    work.run(loaded.module)
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in loaded.module.buffers())
    held = work.held_bytes(loaded.module)
    assert held == {"weights": 4 * PARAMETERS + buffers, "gradients": 4 * PARAMETERS, "optimizer": 8 * PARAMETERS}


def test_frozen_weights_have_no_gradient_and_no_state() -> None:
    loaded = llama()
    loaded.module.model.embed_tokens.weight.requires_grad_(False)
    before = loaded.module.model.embed_tokens.weight.clone()
    work = prepared(loaded, sequence=8)
    work.run(loaded.module)
    assert torch.equal(loaded.module.model.embed_tokens.weight, before)
    assert work.bytes(loaded.module) < prepared(llama(), sequence=8).bytes(llama().module)
    with pytest.raises(ValueError, match="no weights"):
        work.run(loaded.module.requires_grad_(False).model)


def test_a_classifier_learns_its_labels_and_its_batch_norms_move() -> None:
    loaded = Loaded(module=tiny_cnn(), family="image_classifier", name="cnn", image_shape=(3, 16, 16))
    data = Inputs(factory=f"{__name__}:labelled")
    work = Train(batch_size=16, steps=12, learning_rate=0.02, warmup=0).prepare(loaded, data, CPU)
    mean = loaded.module.stem.bn.running_mean.clone()
    before = work.loss_held_out(loaded.module)
    assert torch.equal(mean, loaded.module.stem.bn.running_mean), "held-out data changes no statistics"
    losses = [float(work.run(loaded.module)) for _ in range(12)]
    assert (work.unit, work.units) == ("items", 16)
    assert losses[-1] < losses[0] and work.loss_held_out(loaded.module) < before
    assert not torch.equal(mean, loaded.module.stem.bn.running_mean)
    assert work.flops(loaded.module) is not None


def test_images_without_labels_are_refused() -> None:
    loaded = Loaded(module=tiny_cnn(), family="image_classifier", name="cnn", image_shape=(3, 16, 16))
    with pytest.raises(DataError, match="no labels"):
        Train(batch_size=2).prepare(loaded, Inputs(), CPU)


def test_a_language_model_without_a_loss_of_its_own_is_trained_on_the_next_token() -> None:
    loaded = Loaded(module=tiny_lm(), family="causal_lm", name="lm", vocab_size=64)
    work = prepared(loaded, clip=None)
    ids = work.stream.again().next().kwargs["input_ids"]
    expected = nn.functional.cross_entropy(loaded.module(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert float(work.run(loaded.module)) == pytest.approx(float(expected.detach()), rel=1e-6)


def test_a_module_is_trained_on_the_loss_that_it_returns() -> None:
    class Fit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) - y).square().mean()

    loaded = Loaded(module=Fit(), family="module", name="fit", example=((torch.ones(8, 4), torch.zeros(8, 1)), {}))
    work = Train(learning_rate=0.05).prepare(loaded, RandomTokens(), CPU)
    losses = [float(work.run(loaded.module)) for _ in range(5)]
    assert (work.unit, work.units) == ("items", 8) and losses[-1] < losses[0]
    other = Loaded(module=nn.Linear(4, 4), family="module", name="x", example=((torch.ones(8, 4),), {}))
    with pytest.raises(ValueError, match="returns no loss"):
        Train().prepare(other, RandomTokens(), CPU).run(other.module)


def test_check_says_what_is_wrong() -> None:
    problems = [str(p) for p in Train(batch_size=0, accumulate=0, sequence=POSITIONS + 1, clip=0.0, learning_rate=-1.0).check(llama())]
    assert problems == [
        "workload.batch_size: must be 1 or more, is 0; workload.batch_size=1",
        "workload.accumulate: must be 1 or more, is 0; workload.accumulate=1",
        "workload.learning_rate: must be above 0, is -1.0; workload.learning_rate=1e-4",
        "workload.clip: must be above 0, is 0.0; workload.clip=1.0, or null for none",
        f"workload.sequence: {POSITIONS + 1} tokens are more than the {POSITIONS} positions of tiny; workload.sequence={POSITIONS}",
    ]
    (short,) = Train(sequence=1).check(llama())
    assert "must be 2 or more" in str(short)
    frozen, bare = (str(p) for p in Train().check(Loaded(module=nn.Identity(), family="module", name="x")))
    assert "no example" in frozen and "asks for a gradient" in bare


def test_example_runs() -> None:
    args, kwargs = Train().example(llama(), CPU)
    assert llama().module(*args, **kwargs).logits.shape == (2, 8, VOCABULARY)
