"""The table of schemes: one place that the step, the options, the page, the command and the plan agree with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from optforge import config, schemes
from optforge.config.paths import option_files
from optforge.kernels.linears import LINEARS, quantize_
from optforge.plan.schemes import scheme_bytes
from optforge.schemes import EMULATED, ENTRIES, LACKING, NATIVE, SCHEMES, TABLE, runs
from optforge.transforms.quantize import Quantize, SchemeName

DOCS = Path(__file__).parents[1] / "docs/schemes.md"
PROFILES = ["a100", "h100", "l4", "t4", "b200", "b300", "rtx5090", "mi300x", "mi350x", "cpu", "tpu_v5e", "tpu_v7"]


def test_every_scheme_is_a_choice_of_the_step_an_option_and_a_class() -> None:
    assert [name.name for name in SchemeName] == list(SCHEMES)
    assert {name.removeprefix("quantize/") for name in option_files("transform") if name.startswith("quantize/")} >= set(SCHEMES)
    assert set(LINEARS) == set(SCHEMES)


def test_the_page_holds_the_table() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert schemes.markdown() in text and schemes.page(text) == text, "run: python -m optforge.schemes"


@pytest.mark.parametrize("name", SCHEMES)
def test_what_runs_instead_stores_the_same_and_rounds_nothing_else(name: str) -> None:
    scheme, instead = SCHEMES[name], ENTRIES[name].weight_only
    assert (scheme.activation_dtype is None) == (instead is None)
    if instead is not None:
        other = SCHEMES[instead]
        same = ("weight_dtype", "weight_bits", "granularity", "group_size", "scale_dtype")
        assert [getattr(scheme, field) for field in same] == [getattr(other, field) for field in same]
        assert other.activation_dtype is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # by hand from the vendors' tables: int8 units everywhere but TPU v7, fp8 from sm_89 and on MI300, microscaling with fp4 units
        ("int8_dynamic", {"tpu_v7": LACKING}),
        ("int8_static", {"tpu_v7": LACKING}),
        ("fp8_dynamic", {"a100": LACKING, "t4": LACKING, "cpu": LACKING, "tpu_v5e": LACKING}),
        ("fp8_block", dict.fromkeys(PROFILES, EMULATED) | {"a100": LACKING, "t4": LACKING, "cpu": LACKING, "tpu_v5e": LACKING}),
        ("mxfp4", dict.fromkeys(PROFILES, LACKING) | dict.fromkeys(["b200", "b300", "rtx5090", "mi350x"], EMULATED)),
        ("mxfp8", dict.fromkeys(PROFILES, LACKING) | dict.fromkeys(["b200", "b300", "rtx5090", "mi350x"], EMULATED)),
        ("nvfp4", dict.fromkeys(PROFILES, LACKING) | dict.fromkeys(["b200", "b300", "rtx5090"], EMULATED)),
        ("nvfp4_weight", dict.fromkeys(PROFILES, EMULATED)),
        ("int4_weight", {}),
    ],
)
def test_what_runs_where(name: str, expected: dict[str, str]) -> None:
    for profile in PROFILES:
        assert runs(SCHEMES[name], config.hardware(profile)) == expected.get(profile, NATIVE), profile


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry.scheme.name)
def test_the_words_of_the_table_are_what_the_profiles_give(entry: schemes.Entry) -> None:
    for backend, profile in {"nvidia": "b200", "cpu": "cpu"}.items():
        said, found = getattr(entry, backend), runs(entry.scheme, config.hardware(profile))
        if entry.scheme.activation_dtype is None:
            continue  # a kernel for the GPU, its reference elsewhere: no question of units
        assert said.startswith({NATIVE: "native", EMULATED: "emulated", LACKING: "no units"}[found]), (backend, said)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_step_runs_as_written_or_says_what_runs_instead(name: str, profile: str) -> None:
    lowered = Quantize(scheme=SchemeName[name]).lower(config.hardware(profile))
    if runs(SCHEMES[name], config.hardware(profile)) == LACKING:
        assert lowered is not None and lowered.runs_as == ENTRIES[name].weight_only
        assert lowered.reason == f"{profile} has no {schemes.units(SCHEMES[name])} matrix units: {name} runs as {lowered.runs_as}"
    else:
        assert lowered is None


@pytest.mark.parametrize(("outputs", "inputs"), [(96, 192), (130, 200)])
@pytest.mark.parametrize("name", SCHEMES)
def test_bytes_are_those_of_the_stored_parameters(name: str, outputs: int, inputs: int) -> None:
    layer = quantize_(nn.Linear(inputs, outputs, bias=False), torch.randn(outputs, inputs), SCHEMES[name], step="weights")
    assert scheme_bytes(inputs, outputs, SCHEMES[name]) == sum(p.numel() * p.element_size() for _, p in layer.stored())


def test_emulation_is_said() -> None:
    assert schemes.note(SCHEMES["mxfp4"], config.hardware("b200")) == (
        "b200 has units for mxfp4 and no kernel here uses them: it is emulated, and predicted as such"
    )
    assert "saves memory and no time" in str(schemes.note(SCHEMES["fp8_block_weight"], config.hardware("h100")))
    assert schemes.note(SCHEMES["fp8_dynamic"], config.hardware("h100")) is None
