"""The search space: what transforms declare, recipes as points of it, and what a sampler may propose."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import fields

import pytest

from optforge import config, recipe, registry
from optforge.tune import space
from optforge.tune.options import Limits, TuneOptions
from optforge.tune.proposals import Proposals
from optforge.tune.space import Space

DECLARED: space.Declared = {
    "fuse": {"decoder": {}},
    "quantize": {"int8": {"tied": ["untie"]}, "int4": {"tied": ["untie"], "group_size": [32, 128]}},
}


def test_points_are_counted() -> None:
    # fuse: none, decoder; quantize: none, int8 x 2, int4 x 2 x 3
    assert space.build(DECLARED, []).points() == 2 * (1 + 2 + 6)


def test_a_point_and_its_steps() -> None:
    built = space.build(DECLARED, [])
    params = {"fuse": "decoder", "quantize": "int4", "quantize.tied": "default", "quantize.group_size": "32"}
    assert built.holds(params)
    assert space.steps_of(params) == {"fuse": {"use": "fuse/decoder"}, "quantize": {"use": "quantize/int4", "group_size": 32}}
    assert space.name_of(params) == "decoder-int4-group_size.32"
    assert space.params_of(space.steps_of(params), built) == params
    assert not built.holds({"fuse": "none", "quantize": "int8", "quantize.tied": "32"})


def test_a_given_recipe_widens_the_space() -> None:
    steps = {"weights": {"use": "quantize/int8", "ignore": ["lm_head"]}}
    built = space.build(DECLARED, [steps])
    assert built.fields["quantize/int8"]["ignore"] == ["default", '["lm_head"]']
    assert space.params_of(steps, built) == {
        "fuse": "none", "quantize": "int8", "quantize.tied": "default", "quantize.ignore": '["lm_head"]'
    }  # fmt: skip


@pytest.mark.parametrize(
    "steps",
    [
        {"a": {"use": "quantize/int8"}, "b": {"use": "quantize/int4"}},
        {"a": {"use": "prune/wanda"}},
        {"a": {"use": "quantize/int8", "keep": "if_faster"}},
    ],
)
def test_a_recipe_that_is_no_point(steps: space.Steps) -> None:
    assert space.params_of(steps, space.build(DECLARED, [steps])) is None


def test_every_declared_field_and_value_is_taken_by_its_transform() -> None:
    found = space.declared()
    assert list(found) == ["precision", "fuse", "quantize", "compile"]
    for kind, options in found.items():
        known = {field.name for field in fields(registry.get("transforms", kind))}
        for option, choices in options.items():
            for name, values in choices.items():
                assert name in known
                for value in values:
                    config.step("step", {"use": f"{kind}/{option}", name: value})


def test_shipped_recipes_are_points() -> None:
    loaded = [recipe.load(path, cwd=path.parent, shipped=config.recipes_dir()) for path in sorted(config.recipes_dir().glob("*.yaml"))]
    built = space.build(space.declared(), [one.steps for one in loaded])
    for one in loaded:
        params = space.params_of(one.steps, built)
        if any(step["use"] == "quantize/auto" for step in one.steps.values()):
            assert params is None, "it searches by itself, so the space does not offer it"
            continue
        if any(step["use"].startswith("shard/") for step in one.steps.values()):
            assert params is None, "a search runs on one device"
            continue
        if one.name.endswith(("_train", "_lora")):
            assert params is None, "what only a training takes is no point of a search"
            continue
        assert params is not None, one.name
        assert sorted(step["use"] for step in space.steps_of(params).values()) == sorted(step["use"] for step in one.steps.values())


def test_random_points_go_there_and_back() -> None:
    built = space.build(space.declared(), [])
    draw = random.Random(0)
    points = [built.choose(lambda name, choices: draw.choice(choices)) for _ in range(200)]
    held = [point for point in points if built.holds(point)]
    assert held
    assert all(space.params_of(space.steps_of(point), built) == point for point in held)


@pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="needs the extra sweep")
@pytest.mark.parametrize("sampler", ["tpe", "nsga2", "random"])
@pytest.mark.parametrize("objectives", [("latency",), ("latency", "memory")])
def test_samplers_find_the_good_half(sampler: str, objectives: tuple[str, ...]) -> None:
    """Where int4 is twice as fast as everything else, TPE proposes it more often than chance does."""
    from optforge.tune.sampling import Sampler

    built = space.build(DECLARED, [])
    study = Sampler(built, TuneOptions(sampler=sampler, objectives=objectives))  # type: ignore[arg-type]  # a Literal each
    study.add({"fuse": "none", "quantize": "int8", "quantize.tied": "default"}, None)
    chosen = []
    for _ in range(60):
        trial, params = study.ask()
        value = 0.5 if params["quantize"] == "int4" else 1.0
        study.tell(trial, [value] * len(objectives) if built.holds(params) else None)
        chosen.append(params["quantize"] == "int4")
    assert set(chosen) == {True, False}
    if sampler == "tpe":
        assert sum(chosen[20:]) > 0.6 * 40


def test_an_empty_space_holds_one_point() -> None:
    assert Space().points() == 1


@pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="needs Optuna")
def test_proposals_of_one_batch_have_names_of_their_own() -> None:
    """Both values are spelled alike in a name, and a name is the file of its recipe."""
    alike = Space(kinds={"k": ["none", "o"]}, fields={"k/o": {"f": ["default", '"a b"', '"a.b"']}})
    assert space.name_of({"k": "o", "k.f": '"a b"'}) == space.name_of({"k": "o", "k.f": '"a.b"'})
    found = Proposals(alike, TuneOptions(sampler="random"), Limits()).ask([])
    assert len(found) == 3 == len({one.name for one in found})
