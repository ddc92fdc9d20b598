"""The shipped option files and recipes: complete, spelled out, and equal to what their classes say."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from optforge import config, registry, safe_yaml
from optforge.config import paths, schema
from optforge.spec import CalibrationData, Launch, Measure, Quality, SweepOptions

CONF = config.conf_dir()
TRANSFORMS = paths.option_files("transform")
PARTS = [(group, name) for group in ("model", "data", "workload") for name in paths.option_files(group)]


def _fields(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.init]


def _comments_missing(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# "), "the first line describes the option"
    return [line for line in lines if re.match(r"[a-z_0-9]+:", line) and "#" not in line and not line.startswith("defaults:")]


@pytest.mark.parametrize("option", TRANSFORMS)
def test_transform_option_spells_out_every_field_with_a_comment(option: str) -> None:
    kind = option.split("/", maxsplit=1)[0]
    cls = registry.transform(option)
    assert list(safe_yaml.read(TRANSFORMS[option])) == _fields(cls)
    assert _comments_missing(TRANSFORMS[option]) == []
    assert config.step("x", {"use": option}).transform.kind == kind


@pytest.mark.parametrize(("group", "option"), PARTS)
def test_part_option_spells_out_every_field_with_a_comment(group: str, option: str) -> None:
    path = paths.option_files(group)[option]
    data = safe_yaml.read(path)
    data.pop("defaults", None)
    cls = registry.get(paths.GROUPS[group], data.pop("kind"))
    assert list(data) == _fields(cls)
    assert not {"name", "kind"} & set(data)
    assert _comments_missing(path) == []


@pytest.mark.parametrize(("group", "option"), [*PARTS, *(("transform", option) for option in TRANSFORMS)])
def test_values_of_the_file_are_those_of_the_class_where_one_option_carries_the_kinds_name(group: str, option: str) -> None:
    """What a file says and what Python says by default differ only in what the option's name is about."""
    if group == "transform":
        made = config.step("x", {"use": option}).transform
        data = safe_yaml.read(TRANSFORMS[option])
    else:
        data = safe_yaml.read(paths.option_files(group)[option])
        data.pop("defaults", None)
        cls = registry.get(paths.GROUPS[group], data.pop("kind"))
        given = {key: value for key, value in data.items() if value != schema.MISSING}
        required = {key: "x" for key, value in data.items() if value == schema.MISSING}
        problems: list[object] = []
        made = schema.build(cls, given | required, group, kind=group, problems=problems, where=str)  # type: ignore[arg-type]
        assert problems == []
        data |= required
    assert schema.plain_fields(made) == data


def test_top_level_values_are_those_of_the_classes() -> None:
    from omegaconf import OmegaConf

    from optforge.config.build import Settings

    data = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml"), resolve=False)
    assert isinstance(data, dict)
    assert data["quality"] == dataclasses.asdict(Quality())
    assert data["calibration"] == dataclasses.asdict(CalibrationData())
    assert data["measure"] == dataclasses.asdict(Measure())
    assert data["launch"] == dataclasses.asdict(Launch())
    assert data["sweep"] == dataclasses.asdict(SweepOptions())
    settings = schema.plain_fields(Settings())
    assert {key: data[key] for key in settings} == settings
    assert set(data) == {"defaults", "hydra", "quality", "calibration", "measure", "launch", "sweep", *settings}


@pytest.mark.parametrize("option", config.options("recipe", cwd=CONF), ids=lambda option: option.name)
def test_recipe_is_complete(option: config.Option) -> None:
    recipe = config.recipe(option.name, cwd=CONF)
    assert recipe.name == option.path.stem
    assert recipe.description == option.description != ""
    assert option.path.read_text(encoding="utf-8").startswith("# ")


def test_the_six_recipes_are_there() -> None:
    assert {"baseline", "llama_bf16", "llama_fp8", "llama_int8", "llama_int4", "vision_int8"} <= {
        option.name for option in config.options("recipe")
    }


@pytest.mark.parametrize("model", paths.option_files("model"))
def test_every_model_composes_with_the_data_and_workload_it_names(model: str, tmp_path: Path) -> None:
    required = {"hf": ["model.path=./x"], "module": ["model.factory=a:b"], "lightning": ["model.module=a:B"]}.get(model, [])
    run = config.compose(config.parse(["recipe=baseline", f"model={model}", *required], cwd=tmp_path), cwd=tmp_path)
    images = model in ("fashion_cnn", "efficientnet_lite0")
    assert run.workload.name == {"module": "forward", "lightning": "train"}.get(model, "forward" if images else "prefill")
    expected = {
        "fashion_cnn": "fashion_mnist",
        "efficientnet_lite0": "photos",
        "module": "inputs",
        "lightning": "inputs",
        "hf": "wikipedia",
        "smollm2_135m": "wikipedia",
    }
    assert run.data.name == expected.get(model, "random_tokens")
    typed = config.compose(
        config.parse(["recipe=baseline", f"model={model}", "data=news", "workload=decode", *required], cwd=tmp_path), cwd=tmp_path
    )
    assert (typed.data.name, typed.workload.name) == ("news", "decode")


def test_every_option_has_a_description() -> None:
    for group in ("model", "data", "workload", "hardware", "transform", "recipe"):
        options = config.options(group)
        assert options
        assert all(option.description and option.path.is_file() for option in options)


def test_hardware_by_name() -> None:
    a100 = config.hardware("a100")
    assert (a100.name, a100.backend, a100.arch) == ("a100", "nvidia", "sm_80")
    assert a100.peak_flops["bf16"] == 312e12
    assert "fp8" not in a100.peak_flops
