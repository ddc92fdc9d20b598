"""Reference outputs that runs share: found again only by the same model, on the same tokens, with the same versions."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from toys import tiny_lm

from optforge.checkpoint import module_digest
from optforge.measure import language, reference

IDS = torch.arange(32) % 64
CPU = torch.device("cpu")


def _folder(module: torch.nn.Module, ids: torch.Tensor = IDS, window: int = 16, dtype: str = "float32") -> Path:
    return reference.path_of(module_digest(module), module, ids, window, dtype)


@pytest.mark.case("B87")
def test_b87_the_key_covers_weights_settings_tokens_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    known = _folder(tiny_lm())
    assert _folder(tiny_lm()) == known
    other_weights = tiny_lm()
    with torch.no_grad():
        other_weights.lm_head.weight[0, 0] += 1
    other_settings = tiny_lm()  # the same tensors in a model that computes something else
    other_settings.norm.eps = 0.5
    assert module_digest(other_settings) == module_digest(tiny_lm())
    folders = [_folder(other_weights), _folder(other_settings)]
    folders += [_folder(tiny_lm(), ids=IDS.flip(0)), _folder(tiny_lm(), window=8), _folder(tiny_lm(), dtype="bfloat16")]
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    folders.append(_folder(tiny_lm()))
    assert len({known, *folders}) == 1 + len(folders)


@pytest.mark.case("B87")
def test_b87_two_models_get_their_own_outputs_and_the_log_says_hit_or_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPTFORGE_CACHE", str(tmp_path))
    first, second = tiny_lm(), tiny_lm()
    with torch.no_grad():
        second.lm_head.weight.neg_()
    losses = []
    with caplog.at_level(logging.INFO, logger="optforge"):
        for module in (first, second, first):
            judge = language.LanguageQuality(baseline=module, ids=IDS, window=16, device=CPU, folder=_folder(module))
            judge.prepare()
            assert judge.cached is not None
            losses.append(judge.cached.mean_loss)
    assert losses[0] == losses[2] != losses[1]
    said = ["found" in record.getMessage() for record in caplog.records if "reference outputs" in record.getMessage()]
    assert said == [False, False, True]
