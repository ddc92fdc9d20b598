"""The command line as people type it: one table of rewritten forms, one of refusals, and the same through a real Hydra sweep."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from optforge import config
from optforge.errors import ConfigError

RECIPE = "recipe=llama_bf16"


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """A start folder with a recipe of the user's own."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "team.yaml").write_text("name: team\nsteps:\n  one: {use: precision/bf16}\n  two: {use: compile/inductor}\n")
    return tmp_path


REWRITTEN = {
    # as typed -> as Hydra gets it
    "steps.compile.mode=max_autotune": "++recipe.steps.compile.mode=max_autotune",
    "steps.compile.use=compile/inductor": "++recipe.steps.compile.use=compile/inductor",
    "+steps.compile.mode=default": "++recipe.steps.compile.mode=default",
    "++steps.compile.mode=default": "++recipe.steps.compile.mode=default",
    "recipe.steps.compile.mode=default": "++recipe.steps.compile.mode=default",
    "~steps.compile": "~recipe.steps.compile",
    "~recipe.limits.max_kl": "~recipe.limits.max_kl",
    "steps.compile=null": "++recipe.steps.compile=null",
    "steps.last={use: precision/fp16, before: compile}": "++recipe.steps.last={use: precision/fp16, before: compile}",
    "steps.fuse.ignore=[lm_head,'re:a\\.b$']": "++recipe.steps.fuse.ignore=[lm_head,'re:a\\.b$']",
    "recipe.limits.max_kl=1e-3": "++recipe.limits.max_kl=1e-3",
    "model.dtype=fp32": "++model.dtype=fp32",
    "+model.dtype=fp32": "++model.dtype=fp32",
    "save=true": "++save=true",
    "seed=3": "++seed=3",
    "quality.metric='a.b:c'": "++quality.metric='a.b:c'",
    "hardware=a100": "hardware=a100",
    "+hardware=a100": "hardware=a100",
    "hydra/launcher=joblib": "hydra/launcher=joblib",
    "hydra.verbose=true": "hydra.verbose=true",
    "data.path=me@x": "++data.path=me@x",
    # what Hydra would read as a number that may not be meant
    "data.path=695e0514": "++data.path='695e0514'",
    "data.path=10e2": "++data.path='10e2'",
    "quality.tokens=1_000": "++quality.tokens='1_000'",
    "quality.tokens=nan": "++quality.tokens='nan'",
    "steps.fuse.ignore=[1_0, 5, '1_0']": "++recipe.steps.fuse.ignore=['1_0', 5, '1_0']",
    "steps.x={use: a/b, rev: 1e5, w: 1e-5}": "++recipe.steps.x={use: a/b, rev: '1e5', w: 1e-5}",
    "quality.tokens=64": "++quality.tokens=64",
}


@pytest.mark.parametrize("typed", REWRITTEN)
def test_rewritten(typed: str, start: Path) -> None:
    assert config.parse([RECIPE, typed], cwd=start).overrides == (RECIPE, REWRITTEN[typed])


@pytest.mark.parametrize(
    ("options", "typed"),
    [
        ({"set_": ["compile.mode=max_autotune"]}, "steps.compile.mode=max_autotune"),
        ({"drop": ["compile"]}, "~steps.compile"),
        ({"add": ["last=precision/fp16"]}, "steps.last.use=precision/fp16"),
        ({"add": ["last={use: precision/fp16, before: compile}"]}, "steps.last={use: precision/fp16, before: compile}"),
    ],
)
def test_plain_options_have_the_same_effect(options: dict[str, list[str]], typed: str, start: Path) -> None:
    assert config.parse([RECIPE], cwd=start, **options).overrides == config.parse([RECIPE, typed], cwd=start).overrides


def test_flags_are_kept_apart(start: Path) -> None:
    arguments = config.parse(["-m", RECIPE, "--cfg", "job", "hardware=a100,h100", "--package=x"], cwd=start)
    assert arguments.hydra == ("-m", "--cfg", "job", "--package=x")
    assert arguments.multirun
    assert arguments.overrides == (RECIPE, "hardware=a100,h100")


REFUSED = {
    # as typed -> what the message must hold
    ("hardware=a1000",): ("unknown hardware 'a1000'", "did you mean a100"),
    ("model.path=a=b",): ("""'model.path="a=b"'""",),
    ("model.path=a#b",): ("""'model.path="a#b"'""",),
    ("model=/data/模型",): ("""'model="/data/模型"'""",),
    ("steps[1].x=4",): ("not numbers", "the 3 steps of this recipe are precision, fuse, compile", "steps.precision."),
    ("transforms[1].bits=4",): ("not numbers", "3 steps"),
    ("transforms.2.bits=4",): ("not numbers", "3 steps"),
    ("~transforms.0",): ("not numbers", "3 steps"),
    ("~steps.0",): ("not numbers", "3 steps"),
    ("steps.fuse.ignore.0=x",): ("whole list",),
    ("steps.fuse.ignore[0]=x",): ("whole list",),
    ("recipe=baseline",): ("given twice", "recipe=llama_bf16", "recipe=baseline", "extends"),
    ("seed=1", "seed=2"): ("given twice", "seed=1", "seed=2"),
    ("steps.fuse.ignore=[a]", "recipe.steps.fuse.ignore=[b]"): ("given twice",),
    ("model=",): ("needs the name of a model", "model=NAME"),
    ("model=None",): ("needs the name of a model",),
    ("ignore=lm_head",): ("unknown key 'ignore'", "steps.<step>.ignore"),
    ("sav=true",): ("did you mean save",),
    ("+experiment=mine",): ("unknown key 'experiment'", "recipe=./<file>.yaml"),
    ("experiment/mine=x",): ("unknown key 'experiment'",),
    ("model@other=smollm2_135m",): ("packages",),
    ("limits.max_kl=3",): ("recipe.limits.max_kl=3",),
    ("~model",): ("needs its model",),
    ("~steps.compil",): ("no step 'compil'", "did you mean compile"),
    ("hardware=a100,h100",): ("-m",),
    ("steps.fuse.ignore=a,b",): ("-m", "'steps.fuse.ignore=[a,b]'"),
    ("model=./checkpoint",): ("model=hf model.path=./checkpoint",),
    ("shared/team.yaml",): ("recipe=shared/team.yaml",),
    ("--confg", "x"): ("unknown option", "--config"),
    ("--config-path", "conf"): ("--config-dir",),
    ("--experimental-rerun", "x.pickle"): ("--config FILE",),
}


@pytest.mark.parametrize("typed", REFUSED, ids=" ".join)
def test_refused(typed: tuple[str, ...], start: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse([RECIPE, *typed], cwd=start)
    message = str(caught.value)
    assert all(word in message for word in REFUSED[typed]), message
    assert len(caught.value.problems) == 1


@pytest.mark.case("B118")
@pytest.mark.parametrize("typed", ["transforms.1.bits=4", "steps[1].x=4", "steps.2.x=4", "~steps.0"])
def test_b118_steps_go_by_name_and_a_number_is_told_which_names_there_are(typed: str, start: Path) -> None:
    with pytest.raises(ConfigError, match=r"not numbers.*the 3 steps of this recipe are precision, fuse, compile"):
        config.parse([RECIPE, typed], cwd=start)
    assert "++recipe.steps.fuse.attention=keep" in config.parse([RECIPE, "steps.fuse.attention=keep"], cwd=start).overrides


def test_add_of_a_step_that_is_there(start: Path) -> None:
    with pytest.raises(ConfigError, match=r"--set compile\.use"):
        config.parse([RECIPE], cwd=start, add=["compile=compile/inductor"])


@pytest.mark.case("B116")
@pytest.mark.parametrize("value", ["a=b", "a#b", "/data/模型", 'a"b=', 'x\\"#', "a b#c", "(a", "[a", "'a", "a;b", "a&b!"])
def test_b116_the_quoted_form_that_is_offered_means_the_value(value: str, start: Path) -> None:
    """The form is taken through a real shell and through Hydra's own parser."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    with pytest.raises(ConfigError) as caught:
        config.parse([RECIPE, f"data.path={value}"], cwd=start)
    offered = caught.value.problems[0].fix.removeprefix("type ")
    words = subprocess.run(["bash", "-c", f"printf '%s\\0' {offered}"], capture_output=True, check=True, text=True).stdout.split("\0")
    assert OverridesParser.create().parse_override(words[0]).value() == value


@pytest.mark.case("B120")
def test_b120_a_list_of_recipes_is_refused(start: Path) -> None:
    with pytest.raises(ConfigError, match="extends"):
        config.parse(["recipe=[llama_bf16,baseline]"], cwd=start)
    with pytest.raises(ConfigError, match="given twice"):
        config.parse(["-m", RECIPE, "+steps.a={use: a/b},{use: c/d}", "+steps.a={keep: always},{keep: if_faster}"], cwd=start)


def test_all_problems_of_a_line_are_told_together(start: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(["recipe=lama_bf16", "hardware=a1000", "steps[0]=x", "sav=1", "model.path=a=b"], cwd=start)
    assert len(caught.value.problems) == 5


@pytest.mark.case("B130")
def test_b130_paths_mean_the_start_folder(start: Path) -> None:
    (option,) = config.parse(["recipe=./shared/team.yaml"], cwd=start).overrides
    assert option.startswith("recipe=file/")
    assert config.compose(config.parse(["recipe=./shared/team.yaml"], cwd=start), cwd=start).recipe.name == "team"
    for typed, tried in (
        (["recipe=./no.yaml"], start / "no.yaml"),
        ([RECIPE, "--config-dir", "conf"], start / "conf"),
        (["--config=x.yaml"], start / "x.yaml"),
    ):
        with pytest.raises(ConfigError, match=str(tried)):
            config.parse(typed, cwd=start)


def test_a_path_never_loads_the_shipped_recipe_of_that_name(start: Path) -> None:
    (start / "llama_fp8.yaml").write_text("name: not_the_shipped_one\nsteps: {}\n")
    run = config.compose(config.parse(["recipe=./llama_fp8.yaml"], cwd=start), cwd=start)
    assert (run.recipe.name, run.recipe.steps) == ("not_the_shipped_one", ())
    assert run.recipe.source == str(start / "llama_fp8.yaml")


def test_paths_with_characters_that_hydra_dislikes(start: Path) -> None:
    folder = start / "my recipes (new), 100% ~ 模型"
    folder.mkdir()
    (folder / "a=b.yaml").write_text("name: odd\nsteps: {}\n")
    typed = f'recipe="{folder}/a=b.yaml"'
    assert config.compose(config.parse([typed], cwd=start), cwd=start).recipe.name == "odd"


JOB = """
import json, sys
from pathlib import Path
import hydra
from optforge import config

cwd = Path.cwd()
arguments = config.parse(sys.argv[1:], cwd=cwd)
checked = [run.resolved for run in config.compose_all(arguments, cwd)]
seen = []

def job(cfg):
    run = config.run_from_cfg(cfg, cwd=cwd)
    seen.append(run.resolved)

sys.argv = ["job", *arguments.hydra, "hydra/launcher=basic", "hydra/job_logging=none", "hydra/hydra_logging=none", *arguments.overrides]
hydra.main(version_base="1.3", config_path=config.CONFIG_PATH, config_name=config.CONFIG_NAME)(job)()
print(json.dumps([checked == seen, seen]))
"""


def _sweep(start: Path, *typed: str) -> list[dict[str, object]]:
    """The runs that a real Hydra process hands to its jobs, which must be those that were checked before."""
    (start / "job.py").write_text(JOB)
    done = subprocess.run([sys.executable, "job.py", *typed], cwd=start, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    same, seen = json.loads(done.stdout.splitlines()[-1])
    assert same
    return list(seen)


def test_sweep_over_steps_through_hydra(start: Path) -> None:
    last = "steps.last={use: precision/fp16, after: precision}"
    runs = _sweep(start, "-m", RECIPE, "steps.compile.mode=default,max_autotune", "~steps.fuse", last, "data.path=695e0514")
    assert [run["recipe"]["steps"]["compile"]["mode"] for run in runs] == ["default", "max_autotune"]
    assert all(list(run["recipe"]["steps"]) == ["precision", "compile", "last"] for run in runs)
    assert runs[0]["recipe"]["steps"]["last"]["after"] == ["precision"]
    assert runs[0]["data"]["path"] == "695e0514"


def test_sweep_over_names_paths_and_lists_through_hydra(start: Path) -> None:
    runs = _sweep(start, "-m", "recipe=baseline,./shared/team.yaml", "hardware=a100,h100", "fail_on=[],[regression,stand_in]")
    assert [(run["recipe"]["name"], run["hardware"]["name"], len(run["fail_on"])) for run in runs] == [
        (recipe, hardware, count) for recipe in ("baseline", "team") for hardware in ("a100", "h100") for count in (0, 2)
    ]


def test_sweep_over_a_saved_run_through_hydra(start: Path) -> None:
    run = config.compose(config.parse([RECIPE, "seed=7", "quality.metric=null"], cwd=start), cwd=start)
    (start / "run.yaml").write_text(config.to_yaml(run))
    runs = _sweep(start, "-m", "--config", "run.yaml", "hardware=a100,h100", "steps.compile=null,{mode: max_autotune}")
    assert [(one["hardware"]["name"], one["seed"]) for one in runs] == [("a100", 7), ("a100", 7), ("h100", 7), ("h100", 7)]
    assert "compile" not in runs[0]["recipe"]["steps"]
    assert runs[1]["recipe"]["steps"]["compile"]["mode"] == "max_autotune"


def test_sweep_over_models_takes_the_data_that_each_names(start: Path) -> None:
    runs = _sweep(start, "-m", "recipe=baseline", "model=smollm2_135m,fashion_cnn")
    assert [(run["data"]["name"], run["workload"]["name"]) for run in runs] == [("wikipedia", "prefill"), ("fashion_mnist", "forward")]


def test_a_process_that_sees_only_the_rewritten_line_gets_the_same_run(start: Path) -> None:
    """A launcher starts jobs elsewhere with the overrides that Hydra holds; rewriting them again changes nothing."""
    saved = config.compose(config.parse(["recipe=./shared/team.yaml", "steps.one.dtype=fp32"], cwd=start), cwd=start)
    (start / "run.yaml").write_text(config.to_yaml(saved))
    for typed in (
        ["recipe=./shared/team.yaml", "steps.one.dtype=fp16", "~steps.two", "data.path=1e5"],
        ["--config", "run.yaml", "steps.two.mode=max_autotune"],
    ):
        arguments = config.parse(typed, cwd=start)
        assert config.parse(arguments.overrides, cwd=start).overrides == arguments.overrides
        code = (
            "import sys, pathlib; from optforge import config; cwd = pathlib.Path('/');"
            "print(config.to_yaml(config.compose(config.parse(sys.argv[1:], cwd=cwd), cwd=cwd)), end='')"
        )
        done = subprocess.run([sys.executable, "-c", code, *arguments.overrides], cwd="/", capture_output=True, text=True, check=True)
        assert done.stdout == config.to_yaml(config.compose(arguments, cwd=start))


def test_every_job_of_a_sweep_is_checked_first(start: Path) -> None:
    arguments = config.parse(["-m", RECIPE, "steps.compile.mode=default,fastest", "hardware=a100,h100"], cwd=start)
    with pytest.raises(ConfigError) as caught:
        config.compose_all(arguments, start)
    (problem,) = caught.value.problems
    assert "fastest" in str(problem)
    assert "steps.compile.mode=fastest" in problem.where


def test_a_sweeper_that_searches_is_checked_at_one_point_of_each_choice(start: Path) -> None:
    arguments = config.parse(["-m", "hydra/sweeper=optuna", RECIPE, "seed=choice(1,2,3)", "quality.tokens=range(64,128)"], cwd=start)
    assert arguments.overrides[0] == RECIPE
    ((job, varied),) = config.jobs_of(arguments)
    assert set(varied) == {"++seed=1", "++quality.tokens=64"}
    assert "hydra/sweeper=optuna" in job


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"set_": ["weights"]}, "--set weights: is not of the form STEP.KEY=VALUE; type --set weights.group_size=64"),
        ({"set_": ["=3"]}, "--set =3: is not of the form STEP.KEY=VALUE; type --set weights.group_size=64"),
        ({"drop": ["compile.mode"]}, "--drop compile.mode: is not the name of a step; type --drop compile"),
        ({"add": ["=prune/wanda"]}, "--add =prune/wanda: is not of the form STEP=KIND/OPTION; type --add prune=prune/wanda"),
    ],
)
def test_the_plain_options_name_themselves_when_they_are_wrong(options: dict[str, list[str]], told: str, start: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse([RECIPE], cwd=start, **options)
    assert str(caught.value) == told


def test_the_plain_options_take_the_prefix_that_overrides_have(start: Path) -> None:
    bare = config.parse([RECIPE], cwd=start, set_=["fuse.ignore=[a]"], drop=["compile"], add=["cast=precision/fp16"])
    typed = config.parse([RECIPE], cwd=start, set_=["steps.fuse.ignore=[a]"], drop=["steps.compile"], add=["steps.cast=precision/fp16"])
    assert typed == bare


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("recipe", "type recipe=NAME"),
        ("llama_int8", "type recipe=llama_int8"),
        ("a100", "type hardware=a100"),
        ("~steps.compile=compile/inductor", "type '~steps.compile'"),
        ("steps.p={'use': 'precision/fp16', \"before\": compile}", "type 'steps.p={use: '\"'\"'precision/fp16'\"'\"', before: compile}'"),
        ("steps.fuse.ignore=[re:(]", "type 'steps.fuse.ignore=[\"re:(\"]'"),
        ("steps.fuse.ignore=[re:(a|b), c]", 'type \'steps.fuse.ignore=["re:(a|b)","c"]\''),
    ],
)
def test_what_is_offered_instead_is_a_value_of_the_kind_that_was_meant(override: str, fix: str, start: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse([RECIPE, override], cwd=start)
    assert caught.value.problems[0].fix == fix
