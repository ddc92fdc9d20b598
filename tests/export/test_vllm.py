"""vLLM itself, on a CPU: which of the exported schemes it loads, and that it then computes what the optimized model computes.

The table in docs/export.md is this test's; refusals are vLLM's own words, and a scheme that a newer vLLM takes fails the test.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import python
from subjects import ready, subject
from vllm_side import PROMPT

from optforge.export import FORMATS
from optforge.models.base import Loaded
from optforge.models.smollm2 import SmolLM2
from optforge.transforms.quantize import Quantize, SchemeName

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
LOADED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("int8_dynamic", {}),
    ("int4_weight", {"group_size": 64, "symmetric": True}),
    ("int4_weight", {"group_size": 64, "symmetric": False}),
    ("fp8_dynamic", {}),
)
REFUSED = {
    "int8_weight": "Quant type (uint8b128) not supported by CPUWNA16",
    "fp8_weight": "Failed to find a kernel that can implement the ScaledMM linear layer",
}
NATS = 0.25
"""How far log probabilities may move, in the mean of a few tokens: both compute in bf16 and round activations by their own rule, and
rounding them at all moves them by 0.11 (int8) and 0.14 (fp8)."""


@pytest.fixture
def interpreter() -> Path:
    found = python()
    if found is None:
        pytest.skip("vLLM is not installed in its own environment: python tests/export/engines.py")
    return found


def exported(folder: Path, scheme: str, options: dict[str, Any]) -> Loaded:
    loaded = SmolLM2().load()
    Quantize(scheme=SchemeName[scheme], ignore=["lm_head"], **options).apply(loaded.module, ready())
    FORMATS["compressed_tensors"].write(subject(loaded, torch.bfloat16, tokenizer=loaded.tokenizer), folder)
    return loaded


def answer(interpreter: Path, folder: Path) -> dict[str, Any]:
    place = folder.with_suffix(".json")
    command = [interpreter, HERE / "vllm_side.py", folder, place]
    subprocess.run(command, check=True, timeout=280, capture_output=True)
    return dict(json.loads(place.read_text(encoding="utf-8")))


def log_probabilities(loaded: Loaded, tokens: list[int]) -> list[float]:
    """Of each of `tokens` after the prompt and those before it."""
    prompt = loaded.tokenizer(PROMPT)["input_ids"]
    with torch.no_grad():
        logits = loaded.module(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).flatten().tolist()


@pytest.mark.parametrize(("scheme", "options"), LOADED, ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)))
def test_vllm_computes_what_the_optimized_model_does(interpreter: Path, tmp_path: Path, scheme: str, options: dict[str, Any]) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    loaded = exported(folder, scheme, options)
    found = answer(interpreter, folder)
    assert "refused" not in found, found
    expected = log_probabilities(loaded, found["tokens"])
    assert statistics.fmean(abs(a - b) for a, b in zip(found["logprobs"], expected, strict=True)) < NATS


@pytest.mark.parametrize("scheme", REFUSED)
def test_vllm_refuses_weight_only_bytes_on_a_cpu(interpreter: Path, tmp_path: Path, scheme: str) -> None:
    """Its kernels for them are GPU ones."""
    folder = tmp_path / "export"
    folder.mkdir()
    exported(folder, scheme, {})
    assert REFUSED[scheme] in answer(interpreter, folder)["refused"]
