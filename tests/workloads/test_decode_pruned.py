"""Decoding by a model that lost heads, channels or layers after it had decoded once: the cache is that of what is left."""

from __future__ import annotations

import llamas
import pytest
import torch
from toys import FixedSamples, context

from optforge.backends.cpu import CpuBackend
from optforge.config.steps import step
from optforge.workloads.decode import DecodeWork

IDS = torch.randint(0, llamas.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("fields", [{"use": "prune/layers"}, {"use": "prune/heads"}, {"use": "prune/channels", "round_to": 8}], ids=str)
def test_the_same_tokens_as_whole_passes_give(fields: dict[str, object]) -> None:
    model = llamas.module(num_hidden_layers=4)
    work = DecodeWork(ids=IDS, new_tokens=5)
    before = work.run(model)
    example = ((), {"input_ids": IDS[:1], "use_cache": False})
    ctx = context("cut", example, backend=CpuBackend(), samples=FixedSamples([example]))
    with torch.no_grad():
        step("cut", {**fields, "sparsity": 0.5}).transform.apply(model, ctx)
    work.ready(model)
    tokens = IDS
    for _ in range(6):
        with torch.no_grad():
            tokens = torch.cat([tokens, model(input_ids=tokens, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(work.run(model), tokens[:, IDS.shape[1] + 1 :])
    assert before.shape == (2, 5)
    assert sum(tensor.numel() for tensor in work.kept(model)) == sum(
        2 * IDS.shape[0] * layer.self_attn.k_proj.out_features * (IDS.shape[1] + 5) for layer in model.model.layers
    )
