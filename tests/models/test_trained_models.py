"""The real trained models: what their packages promise, and what the conversion must not change."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from optforge import fetch
from optforge.data.fashion_mnist import FashionMNIST
from optforge.data.photos import Photos
from optforge.data.text import Text
from optforge.errors import ModelError
from optforge.models import fashion_cnn, smollm2
from optforge.models.efficientnet_lite0 import EfficientNetLite0
from optforge.pretrained import filled


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(fetch.find(name) is None, reason=f"run `{fetch.command(name)}`")


def test_smollm2_has_the_published_number_of_parameters_before_any_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTFORGE_CACHE", str(tmp_path))
    loaded = smollm2.SmolLM2().skeleton()
    assert sum(parameter.numel() for parameter in loaded.module.parameters()) == 134_515_008
    assert loaded.module.lm_head.weight is loaded.module.model.embed_tokens.weight
    with pytest.raises(ModelError, match=r"python -m optforge\.fetch smollm2"):
        smollm2.SmolLM2().load()


@needs("smollm2")
@pytest.mark.slow
def test_the_permutation_of_channels_changes_no_logit() -> None:
    from transformers import LlamaForCausalLM

    folder = fetch.require("smollm2")
    state = smollm2._dequantized(next(folder.glob("*.gguf")), lambda stage, fraction: None)
    permuted = smollm2.permuted(state, smollm2.PERMUTATION_SEED)
    name = "model.layers.7.mlp.gate_proj.weight"
    assert not torch.equal(permuted[name], state[name])
    assert torch.equal(permuted[name].flatten().sort().values, state[name].flatten().sort().values)
    ids = torch.arange(100, 164)[None]
    with torch.no_grad():
        plain, moved = (
            filled(LlamaForCausalLM, smollm2._config(), each, "fp32", "test")(input_ids=ids).logits for each in (state, permuted)
        )
    assert (plain - moved).abs().max().item() < 1e-4


@needs("smollm2")
@needs("wikipedia")
@pytest.mark.slow
@pytest.mark.parametrize(("corpus", "published", "within"), [("wikipedia", 24.11, 0.05), ("news", 29.09, 0.01)])
def test_smollm2_has_the_perplexity_that_was_measured_for_it(corpus: str, published: float, within: float) -> None:
    """An independent measurement of the same weights: the news need no cleaning; that of the articles moves their value."""
    loaded = smollm2.SmolLM2(dtype="fp32").load()
    ids = Text(corpus=corpus).tokens(loaded, 8192)
    losses = []
    with torch.no_grad():
        for window in ids.view(-1, 512):
            logits = loaded.module(input_ids=window[None], use_cache=False).logits[0].float()
            losses.append(F.cross_entropy(logits[:-1], window[1:]).item())
    assert math.exp(sum(losses) / len(losses)) == pytest.approx(published, rel=within)


@needs("smollm2")
@pytest.mark.slow
def test_a_second_load_of_smollm2_is_quick_tied_and_the_same() -> None:
    first = smollm2.SmolLM2().load()
    start = time.perf_counter()
    second = smollm2.SmolLM2().load()
    assert time.perf_counter() - start < 8  # 1.5 s alone on two cores
    assert first.digest == second.digest
    assert second.module.lm_head.weight is second.module.model.embed_tokens.weight
    assert any("4-bit source" in note for note in second.notes)


@needs("efficientnet_lite0")
@needs("photos")
def test_efficientnet_lite0_names_eighteen_of_twenty_photos() -> None:
    loaded = EfficientNetLite0().load()
    images, labels = next(Photos().batches(loaded, 20, 20))
    with torch.no_grad():
        assert int((loaded.module(images).argmax(-1) == labels).sum()) == 18


@needs("fashion_mnist")
def test_a_short_training_learns_and_leaves_the_callers_random_state_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    network = fashion_cnn.train(fashion_cnn.Training(epochs=1, images=1536, batch_size=64))
    assert torch.equal(torch.rand(1), expected)
    assert not network.training and sum(parameter.numel() for parameter in network.parameters()) == 77_754
    images, labels = next(FashionMNIST().batches(fashion_cnn.FashionCNN().skeleton(), 500, 500))
    with torch.no_grad():
        assert (network(images).argmax(-1) == labels).float().mean().item() > 0.3  # chance is 0.1


@needs("fashion_mnist")
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_trained_cnn_reaches_ninety_percent_and_is_kept() -> None:
    loaded = fashion_cnn.FashionCNN().load()
    start = time.perf_counter()
    assert fashion_cnn.FashionCNN().load().digest == loaded.digest
    assert time.perf_counter() - start < 5
    images, labels = next(FashionMNIST().batches(loaded, 10_000, 10_000))
    with torch.no_grad():
        assert (loaded.module(images).argmax(-1) == labels).float().mean().item() > 0.90
