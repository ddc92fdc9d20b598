"""The loop of a fused and compiled decoder: the tokens of the plain loop, again in every call, and made anew with what it serves."""

from __future__ import annotations

import llamas
import pytest
import torch
from toys import context
from transformers import LlamaForCausalLM

from optforge import registry
from optforge.backends.base import CompileOptions
from optforge.backends.cpu import CpuBackend
from optforge.compiling import compile_, lift_
from optforge.measure import compiles
from optforge.share import alias
from optforge.transforms.fuse import Fuse
from optforge.workloads.decode import DecodeWork
from optforge.workloads.greedy import Greedy, own_options

IDS = torch.randint(0, llamas.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


def fused(**sizes: object) -> LlamaForCausalLM:
    model = llamas.module(**sizes)
    Fuse().apply(model, context("fuse", ((), {"input_ids": IDS, "use_cache": False}), backend=CpuBackend()))
    return model


def loop_of(work: DecodeWork, model: LlamaForCausalLM) -> Greedy | None:
    return work._states[model].loop


@pytest.mark.usefixtures("fresh_compiler")
def test_tokens_are_those_of_the_plain_loop_in_every_call_and_nothing_compiles_again() -> None:
    plain, model = llamas.module(), fused()
    work = DecodeWork(ids=IDS, new_tokens=6)
    expected = work.run(plain)
    assert len(expected.unique()) > 2
    assert torch.equal(work.run(model), expected) and loop_of(work, model) is None, "uncompiled it is called as it is"
    compile_(model, CompileOptions(engine="eager", fullgraph=True))
    first = work.run(model)
    with compiles.watch() as later:
        again = [work.run(model) for _ in range(2)]
    assert later.graphs == 0
    assert all(torch.equal(found, expected) for found in (first, *again))
    first.zero_()
    assert torch.equal(work.run(model), expected), "what is handed out is not what the loop writes to"
    compile_(plain, CompileOptions(engine="eager"))
    work.run(plain)
    assert loop_of(work, plain) is None, "a model that no step fused is called as its user would call it"


@pytest.mark.usefixtures("fresh_compiler")
def test_a_loop_ends_with_the_compile_it_was_made_for_and_with_its_cache() -> None:
    model = fused()
    work = DecodeWork(ids=IDS, new_tokens=3)
    compile_(model, CompileOptions(engine="eager"))
    expected = work.run(model)
    made = loop_of(work, model)
    lift_(model)
    work.run(model)
    assert loop_of(work, model) is None
    compile_(model, CompileOptions(engine="eager"))
    assert torch.equal(work.run(model), expected) and loop_of(work, model) is not made
    other = llamas.module(seed=1)
    Fuse().apply(other, context("fuse", ((), {"input_ids": IDS, "use_cache": False}), backend=CpuBackend()))
    model.load_state_dict(other.state_dict())
    work.ready(model)
    assert torch.equal(work.run(model), DecodeWork(ids=IDS, new_tokens=3).run(other))


def test_modes_that_capture_graphs_themselves_are_given_up_for_the_loops_own() -> None:
    modes = {mode: own_options(CompileOptions(mode=mode)).mode for mode in ("default", "reduce-overhead", "max-autotune")}
    assert modes == {"default": "default", "reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("batch", [1, 2])
def test_inductor_gives_the_same_tokens(batch: int) -> None:
    plain, model = llamas.module(), fused()
    work = DecodeWork(ids=IDS[:batch], new_tokens=6)
    expected = work.run(plain)
    compile_(model, CompileOptions(fullgraph=True))
    for _ in range(2):
        assert torch.equal(work.run(model), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_smollm2_chooses_the_tokens_of_transformers_where_bf16_can_tell_them_apart() -> None:
    """256 steps in bf16, each after the tokens that transformers chose, so that every step counts."""
    source = registry.get("models", "smollm2")(dtype="bf16")
    if missing := list(source.check()):
        pytest.skip(f"SmolLM2 is not here: {missing[0]}")
    loaded = source.load()
    ids = loaded.tokenizer("The history of the city begins in the second century, when", return_tensors="pt").input_ids
    plain, model = loaded.module, alias(loaded.module)
    with torch.no_grad():
        tokens = plain.generate(ids, max_new_tokens=257, min_new_tokens=257, do_sample=False)[:, ids.shape[1] :]
        logits = plain(input_ids=torch.cat([ids, tokens], 1), use_cache=False).logits[0, ids.shape[1] :].float()
    Fuse().apply(model, context("fuse", ((), {"input_ids": ids, "use_cache": False}), backend=CpuBackend()))
    compile_(model, CompileOptions())
    work = DecodeWork(ids=ids, new_tokens=257)
    work.run(model)
    loop = loop_of(work, model)
    assert loop is not None
    chosen = []
    with torch.no_grad():
        loop._rewind()
        for token in tokens[0, :256]:
            loop.token.fill_(int(token))
            loop._advance()
            chosen.append(int(loop.token))
    best = logits[:256].topk(2).values
    told_apart = best[:, 0] - best[:, 1] > 2 * torch.finfo(torch.bfloat16).eps * best[:, 0].abs()
    different = torch.tensor(chosen) != tokens[0, 1:257]
    assert int(told_apart.sum()) > 200, "nearly every step must be a test"
    assert not bool((different & told_apart).any())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_on_a_device_one_graph_is_replayed_and_nothing_waits(mode: str) -> None:
    torch._dynamo.reset()
    plain, model = llamas.module(dtype=torch.bfloat16).cuda(), llamas.module(dtype=torch.bfloat16).cuda()
    ids = IDS.cuda()
    Fuse().apply(model, context("fuse", ((), {"input_ids": ids, "use_cache": False}), backend=CpuBackend()))
    work = DecodeWork(ids=ids, new_tokens=6)
    eager = work.run(model)
    compile_(model, CompileOptions(mode=mode))
    first = work.run(model)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = work.run(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    loop = loop_of(work, model)
    assert loop is not None and loop.graph is not None
    assert torch.equal(first, again) and first.shape == work.run(plain).shape == eager.shape
