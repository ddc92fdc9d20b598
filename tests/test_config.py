"""From a command line to a run: types, missing values, origins, lists that add up, saved runs, and trust."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from optforge import config, registry, safe_yaml
from optforge.config import paths
from optforge.errors import ConfigError, TrustError
from optforge.spec import Run

PLUGIN = """
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Literal


class Colour(Enum):
    red = "RED"
    green = "GREEN"


@dataclass(frozen=True, kw_only=True)
class Toy:
    kind: ClassVar[str] = "toy"
    rev: str = "main"
    damp: float = 0.5
    bits: int = 8
    group: int | None = None
    on: bool = False
    colour: Colour = Colour.red
    word: Literal["a", "b"] = "a"
    calibration: str | None = None
    ignore: list[str] = field(default_factory=list)
    shape: tuple[int, ...] = ()
    table: Mapping[str, float] = field(default_factory=dict)
    free: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ToyModel:
    path: str
    other: int
    dtype: str = "bf16"
"""

TOY_MODEL = "# A toy model\nkind: toy\npath: ???\nother: ???\ndtype: bf16\n"
TOY_OPTION = "# A toy\nrev: main\ndamp: 0.5\nbits: 8\nignore: [norm]\n"
RECIPE = "name: mine\nsteps:\n  quant: {use: toy/plain}\n"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An installed package that adds a transform and a model, found through its entry points as any plug-in is."""
    site = tmp_path_factory.mktemp("site")
    package = site / "acme_toys"
    for folder, text in (("transform/toy", TOY_OPTION), ("model", TOY_MODEL)):
        (package / "conf" / folder).mkdir(parents=True)
        (package / "conf" / folder / ("plain.yaml" if folder != "model" else "toy.yaml")).write_text(text)
    (package / "recipes").mkdir()
    (package / "recipes" / "acme.yaml").write_text("name: acme\ndescription: From a plug-in\nsteps: {one: {use: toy/plain}}\n")
    (package / "__init__.py").write_text(PLUGIN)
    info = site / "acme_toys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-toys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[optforge.transforms]\ntoy = acme_toys:Toy\n"
        "[optforge.models]\ntoy = acme_toys:ToyModel\n"
        "[optforge.recipes]\nacme = acme_toys.recipes\n"
    )
    sys.path.insert(0, str(site))
    _forget()
    yield site
    sys.path.remove(str(site))
    _forget()


def _forget() -> None:
    importlib.invalidate_caches()
    registry._entries.cache_clear()
    paths.plugin_dirs.cache_clear()


@pytest.fixture
def start(tmp_path: Path, plugin: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return tmp_path


def _run(start: Path, *typed: str) -> Run:
    return config.compose(config.parse(["recipe=./mine.yaml", *typed], cwd=start), cwd=start)


def _problems(start: Path, *typed: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        _run(start, *typed)
    return [str(problem) for problem in caught.value.problems]


def _from_file(start: Path, fields: str) -> object:
    (start / "mine.yaml").write_text(f"name: mine\nsteps:\n  quant: {{use: toy/plain, {fields}}}\n")
    return config.recipe(start / "mine.yaml", cwd=start).steps[0].transform


@pytest.mark.case("B123")
@pytest.mark.parametrize(
    ("field", "written", "value"),
    [
        ("rev", "695e0514", "695e0514"),
        ("rev", "10e2", "10e2"),
        ("rev", "1_000", "1_000"),
        ("rev", "010", "010"),
        ("rev", "yes", "yes"),
        ("rev", "nan", "nan"),
        ("rev", "12345678", "12345678"),
        ("damp", "1e-4", 0.0001),
        ("damp", "1e5", 100000.0),
        ("damp", "10e2", 1000.0),
        ("damp", "3", 3.0),
        ("bits", "4", 4),
        ("bits", "1e2", 100),
        ("group", "null", None),
        ("group", "64", 64),
        ("on", "true", True),
        ("colour", "green", "green"),
        ("colour", "GREEN", "green"),
        ("word", "b", "b"),
        ("ignore", "[a, 'b']", ["a", "b"]),
        ("shape", "[1, 2]", [1, 2]),
        ("table", "{x: 1e-3, y: 2}", {"x": 0.001, "y": 2.0}),
        ("free", "{x: 1, y: [a]}", {"x": 1, "y": ["a"]}),
    ],
)
def test_b123_the_type_decides_in_files_and_on_the_command_line(field: str, written: str, value: object, start: Path) -> None:
    typed = _run(start, f"steps.quant.{field}={written}").recipe.steps[0]
    assert typed.options[field] == value
    assert type(typed.options[field]) is type(value)
    assert getattr(_from_file(start, f"{field}: {written}"), field) == getattr(typed.transform, field)


WRONG = {
    ("bits", "010"): ("whole number", "bits=10"),
    ("bits", "1:30"): ("whole number",),
    ("bits", "1_000"): ("whole number", "bits=1000"),
    ("bits", "1.5"): ("whole number",),
    ("bits", "true"): ("whole number",),
    ("damp", "nan"): ("finite",),
    ("damp", "010"): ("finite", "damp=10"),
    ("damp", "1:30"): ("finite",),
    ("damp", "695e0514"): ("finite",),
    ("rev", "1.5"): ("text", "quotes"),
    ("rev", "true"): ("text",),
    ("rev", "null"): ("cannot be null",),
    ("on", "yes"): ("on=true",),
    ("on", "1"): ("on=true",),
    ("colour", "gren"): ("did you mean green",),
    ("word", "c"): ("a, b",),
    ("ignore", "[1.5]"): ("text",),
    ("table", "[x]"): ("mapping",),
    ("bitz", "4"): ("unknown key 'bitz' in transform toy", "did you mean bits"),
}


@pytest.mark.case("B123")
@pytest.mark.parametrize(("field", "written"), WRONG)
def test_b123_what_does_not_fit_is_refused_in_files_and_on_the_command_line(field: str, written: str, start: Path) -> None:
    (typed,) = _problems(start, f"steps.quant.{field}={written}")
    assert typed.startswith(f"steps.quant.{field}")
    assert all(word in typed for word in WRONG[field, written]), typed
    (start / "mine.yaml").write_text(f"name: mine\nsteps:\n  quant: {{use: toy/plain, {field}: {written}}}\n")
    with pytest.raises(ConfigError) as caught:
        config.recipe(start / "mine.yaml", cwd=start)
    (in_file,) = map(str, caught.value.problems)
    assert str(start / "mine.yaml") in in_file
    assert all(word in in_file for word in WRONG[field, written]), in_file


@pytest.mark.case("B114")
def test_b114_a_list_given_as_text(start: Path) -> None:
    (problem,) = _problems(start, "steps.quant.ignore=lm_head")
    assert problem == "steps.quant.ignore: must be a list, got the text 'lm_head'; write steps.quant.ignore=[lm_head]"
    (problem,) = _problems(start, "fail_on=regression")
    assert "fail_on=[regression]" in problem


@pytest.mark.case("B122")
def test_b122_null_none_and_empty(start: Path) -> None:
    assert _run(start, "steps.quant.calibration=null").recipe.steps[0].options["calibration"] is None
    for written in ("None", ""):
        (problem,) = _problems(start, f"steps.quant.calibration={written}")
        assert problem.endswith("write steps.quant.calibration=null")
    (problem,) = _problems(start, "steps.quant.ignore=None")
    assert "steps.quant.ignore=[]" in problem


@pytest.mark.case("B126")
def test_b126_a_plus_does_not_bring_in_an_unknown_key(start: Path) -> None:
    for typed in ("steps.quant.bitz=4", "+steps.quant.bitz=4", "++recipe.steps.quant.bitz=4"):
        (problem,) = _problems(start, typed)
        assert problem == "steps.quant.bitz: unknown key 'bitz' in transform toy; did you mean bits?"
    for typed in ("recipe.bitz=4", "+recipe.bitz=4", "+quality.tokns=3", "+model.dtyp=fp32", "+measure.warmups=1"):
        (problem,) = _problems(start, typed)
        assert "unknown key" in problem
    (problem,) = _problems(start, "hydra.ouput_subdir=x")
    assert "ouput_subdir" in problem


@pytest.mark.case("B128")
def test_b128_a_file_that_ended_under_a_wrong_key(start: Path) -> None:
    """The user's own folder is on Hydra's path; nothing below `experiment` may be taken for part of the run."""
    folder = start / "conf" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(RECIPE)
    (problem,) = _problems(start, "--config-dir", "conf", "+experiment=mine")
    assert "unknown key 'experiment'" in problem
    assert "recipe=./<file>.yaml" in problem
    (start / "conf" / "recipe").mkdir()
    (problem,) = _problems(start, "--config-dir", "conf")
    assert "given by path" in problem


def test_options_of_the_users_own_folder(start: Path) -> None:
    folder = start / "my conf" / "model"
    folder.mkdir(parents=True)
    (folder / "ours.yaml").write_text("kind: smollm2\ndtype: fp32\n")
    (start / "my conf" / "transform" / "toy").mkdir(parents=True)
    (start / "my conf" / "transform" / "toy" / "four.yaml").write_text("bits: 4\n")
    run = _run(start, "--config-dir", "my conf", "model=ours", "steps.quant.use=toy/four")
    assert (run.model.name, run.model.options["dtype"]) == ("ours", "fp32")
    assert run.origins["model.dtype"] == str(folder / "ours.yaml")
    assert run.recipe.steps[0].options["bits"] == 4


def test_options_and_recipes_of_a_plug_in(start: Path) -> None:
    assert "toy/plain" in {option.name for option in config.options("transform")}
    assert {option.name: option.description for option in config.options("recipe", cwd=start)}["acme"] == "From a plug-in"
    run = config.compose(config.parse(["recipe=acme", "model=toy", "model.path=x", "model.other=3"], cwd=start), cwd=start)
    assert run.model.options == {"path": "x", "other": 3, "dtype": "bf16"}


@pytest.mark.case("B134")
def test_b134_everything_missing_is_told_at_once(start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    (start / "mine.yaml").write_text("name: mine\nsteps:\n  quant:\n    use: toy/plain\n    rev: ???\n  other: {bits: 4}\n")
    problems = _problems(start, "model=toy", "output_dir=${oc.env:NOT_SET}/x")
    fixes = {problem.rsplit("; ", 1)[1] for problem in problems}
    assert fixes >= {"type model.path=VALUE", "type model.other=VALUE", "type steps.quant.rev=VALUE", "type output_dir=VALUE"}
    assert any("steps.other.use=KIND/OPTION" in problem for problem in problems)
    assert len(problems) == 5
    typed = ["model.path=p", "model.other=1", "steps.quant.rev=r", "steps.other.use=toy/plain"]
    assert _run(start, "model=toy", *typed).model.options["path"] == "p"


@pytest.mark.case("B134")
def test_b134_a_missing_recipe_is_told_with_the_names(start: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config.compose(config.parse(["model=toy"], cwd=start), cwd=start)
    told = [str(problem) for problem in caught.value.problems]
    assert len(told) == 3
    assert any("llama_fp8" in line and "recipe=./file.yaml" in line for line in told)


@pytest.mark.case("B119")
def test_b119_lists_add_up_and_say_where_each_item_came_from(start: Path) -> None:
    (start / "base.yaml").write_text("name: base\nsteps: {quant: {use: toy/plain, ignore_extra: [gate]}}\n")
    (start / "mine.yaml").write_text("name: mine\nextends: ./base.yaml\nsteps: {quant: {ignore_extra: [lm_head]}}\n")
    run = _run(start, "steps.quant.ignore_extra=[router]")
    assert run.recipe.steps[0].options["ignore"] == ["norm", "gate", "lm_head", "router"]
    sprung = [run.origins[f"recipe.steps.quant.ignore.{index}"] for index in range(4)]
    assert sprung[0].endswith("acme_toys/conf/transform/toy/plain.yaml")
    assert sprung[1:] == [str(start / "base.yaml"), str(start / "mine.yaml"), "command line"]
    replaced = _run(start, "steps.quant.ignore=[only]").recipe.steps[0].options["ignore"]
    assert replaced == ["only", "gate", "lm_head"]


@pytest.mark.case("B08")
def test_b08_an_explicit_null_skips_a_step(start: Path) -> None:
    assert _run(start, "steps.quant=null").recipe.steps == ()
    (problem,) = _problems(start, "steps.quan=null")
    assert "did you mean quant" in problem


def test_origins(start: Path) -> None:
    run = _run(start, "steps.quant.bits=4", "seed=3", "model.dtype=fp32", "hardware=a100")
    conf = config.conf_dir()
    expected = {
        "recipe.steps.quant.bits": "command line",
        "recipe.steps.quant.use": str(start / "mine.yaml"),
        "recipe.steps.quant.table": "acme_toys/conf/transform/toy/plain.yaml",
        "seed": "command line",
        "save": str(conf / "config.yaml"),
        "model.dtype": "command line",
        "model.kind": str(conf / "model" / "smollm2_135m.yaml"),
        "hardware.memory_bytes": str(conf / "hardware" / "a100.yaml"),
    }
    assert all(run.origins[key].endswith(origin) for key, origin in expected.items())


def test_order_of_steps(start: Path) -> None:
    run = _run(start, "steps.second={use: toy/plain, before: quant, keep: if_faster}")
    assert [(step.name, step.before, step.keep) for step in run.recipe.steps] == [
        ("quant", (), "always"),
        ("second", ("quant",), "if_faster"),
    ]
    for typed, word in (
        ("steps.quant.after=quantt", "no step"),
        ("steps.quant.keep=sometimes", "if_faster"),
        ("steps.quant.after={a: b}", "name steps"),
    ):
        (problem,) = _problems(start, typed)
        assert word in problem


@pytest.mark.case("B130")
def test_b130_a_relative_path_means_the_start_folder(start: Path) -> None:
    (start / "here").mkdir()
    written = {"./m.safetensors": start / "m.safetensors", "here": start / "here", "../up": start.parent / "up", "/abs/x": Path("/abs/x")}
    for value, expected in written.items():
        assert _run(start, "model=toy", "model.other=1", f"model.path={value}").model.options["path"] == str(expected)
    assert _run(start, "model=toy", "model.other=1", "model.path=org/name").model.options["path"] == "org/name"
    assert _run(start).output_dir == str(start / "outputs")


@pytest.mark.case("B137")
def test_b137_one_wrong_name_is_one_problem(start: Path) -> None:
    assert len(_problems(start, "steps.quant.use=toy/plane", "steps.quant.bits=x", "steps.quant.rev=1.5")) == 1
    assert len(_problems(start, "model.kind=smollm3", "model.dtyp=x")) == 1


def test_a_saved_run_repeats_exactly(start: Path) -> None:
    run = _run(
        start,
        "steps.quant={rev: 10e2, free: {a: '1e-4', b: [true, null, 'true']}}",
        "recipe.limits.max_kl=1e-5",
        "hardware=a100",
        "save=true",
    )
    path = start / "run.yaml"
    path.write_text(config.to_yaml(run))
    for again in (
        config.run_from_yaml(path),
        config.run_from_yaml(path.read_text()),
        config.compose(config.parse(["--config", "run.yaml"], cwd=start), cwd=start),
    ):
        assert again.resolved == run.resolved
        assert again.recipe.steps == run.recipe.steps
        assert again.hardware == run.hardware
        assert again.origins["recipe.steps.quant.rev"] in (str(path), "run.yaml")


def test_a_saved_run_with_overrides(start: Path) -> None:
    (start / "run.yaml").write_text(config.to_yaml(_run(start, "seed=7", "quality.tokens=64", "steps.quant.rev=x")))
    arguments = config.parse(["--config", "run.yaml", "steps.quant.bits=4", "quality.window=32", "seed=8", "hardware=h100"], cwd=start)
    run = config.compose(arguments, cwd=start)
    assert (run.seed, run.quality.tokens, run.quality.window, run.hardware.name) == (8, 64, 32, "h100")
    assert (run.recipe.steps[0].options["bits"], run.recipe.steps[0].options["rev"]) == (4, "x")
    assert run.origins["quality.tokens"] == str(start / "run.yaml")
    assert run.origins["quality.window"] == run.origins["seed"] == "command line"


def test_changing_use_of_a_saved_run_takes_the_new_options_values(start: Path) -> None:
    saved = config.compose(config.parse(["recipe=llama_fp8"], cwd=start), cwd=start)
    (start / "run.yaml").write_text(config.to_yaml(saved))
    arguments = config.parse(["--config", "run.yaml", "steps.weights.use=quantize/int4_weight"], cwd=start)
    options = next(step.options for step in config.compose(arguments, cwd=start).recipe.steps if step.name == "weights")
    assert (options["scheme"], options["group_size"], options["ignore"]) == ("int4_weight", 64, ["lm_head"])


def test_a_saved_run_that_names_code_asks_for_trust(start: Path) -> None:
    run = _run(start, "quality.metric='my.module:score'")
    (start / "run.yaml").write_text(config.to_yaml(run))
    with pytest.raises(TrustError, match=r"quality.metric: my.module:score.*trust=true"):
        config.run_from_yaml(start / "run.yaml")
    with pytest.raises(TrustError):
        config.parse(["--config", "run.yaml"], cwd=start)
    assert config.run_from_yaml(start / "run.yaml", trust=True).quality.metric == "my.module:score"
    trusted = config.compose(config.parse(["--config", "run.yaml", "trust=true"], cwd=start), cwd=start)
    assert (trusted.trust, trusted.quality.metric) == (True, "my.module:score")


@pytest.mark.parametrize("key", ["module", "anything"])
def test_a_callable_asks_for_trust_under_whatever_key_a_model_has_it(start: Path, key: str) -> None:
    """model=lightning names a class as `module`; a kind of somebody's own may name code as it likes."""
    text = config.to_yaml(_run(start))
    changed = re.sub(r"(?m)^model:\n", f"model:\n  {key}: my.package:Lit\n", text)
    assert changed != text
    with pytest.raises(TrustError, match=rf"model.{key}: my.package:Lit.*trust=true"):
        config.run_from_yaml(changed)


def test_a_saved_run_cannot_trust_itself(start: Path) -> None:
    text = config.to_yaml(_run(start, "trust=true"))
    assert "trust:" not in text.split("model:")[0] + text.rsplit("save:", 1)[1]
    with pytest.raises(ConfigError, match="trust"):
        config.run_from_yaml(text + "trust: true\n")


@pytest.mark.parametrize(
    "text",
    [
        "hydra: {callbacks: {a: {_target_: os.system}}}\n",
        "defaults: [x]\n",
        "recipe: 3\n",
        "schema_version: 9\nhydraa: 1\n",
        "[]\n",
        "seed: ${oc.env:HOME}\n",
    ],
)
def test_a_hostile_run_file_is_refused_in_one_line(text: str, start: Path) -> None:
    (start / "run.yaml").write_text(text)
    for call in (lambda: config.run_from_yaml(start / "run.yaml"), lambda: config.parse(["--config", "run.yaml"], cwd=start)):
        with pytest.raises(ConfigError) as caught:
            call()
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("section", ["recipe", "hardware"])
def test_a_run_file_cannot_name_a_folder_outside(section: str, start: Path) -> None:
    tree = safe_yaml.loads(config.to_yaml(_run(start, "hardware=a100")), "x")
    tree[section]["name"] = "../../up"
    with pytest.raises(ConfigError, match="folder"):
        config.run_from_yaml(safe_yaml.dumps(tree))


@pytest.mark.parametrize("typed", ["recipe.steps=[a]", "recipe.limits=3", "recipe.steps=x"])
def test_sections_of_a_recipe_that_are_no_mappings(typed: str, start: Path) -> None:
    (problem,) = _problems(start, typed)
    assert "mapping" in problem


def test_a_resolved_run_is_plain_data(start: Path) -> None:
    run = _run(start, "hardware=h100")
    assert safe_yaml.loads(config.to_yaml(run), "x")["hardware"]["peak_flops"] == run.resolved["hardware"]["peak_flops"]
    assert list(run.resolved)[:5] == ["recipe", "model", "data", "workload", "hardware"]


def test_recipe_with_overrides(start: Path) -> None:
    assert config.recipe(start / "mine.yaml", ["steps.quant.bits=2"], cwd=start).steps[0].options["bits"] == 2
    assert config.recipe("./mine.yaml", cwd=start).steps[0].options["bits"] == 8


def test_composing_inside_another_hydra_application(start: Path) -> None:
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    with hydra.initialize_config_dir(config_dir=str(start), version_base="1.3"):
        outer = GlobalHydra.instance().hydra
        assert _run(start).recipe.name == "mine"
        assert GlobalHydra.instance().hydra is outer


def test_reading_a_configuration_loads_no_torch(start: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from optforge import config; cwd = Path.cwd();"
        "run = config.compose(config.parse(['recipe=llama_int4', 'hardware=a100'], cwd=cwd), cwd=cwd);"
        "config.run_from_yaml(config.to_yaml(run)); [config.options(g) for g in ('model', 'data', 'recipe', 'transform')];"
        "sys.exit(int('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=start, check=False).returncode == 0


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("steps.weights.ignore={a: 1}", "steps.weights.ignore: must be a list, got a mapping"),
        ("steps=[]", "steps: must be a mapping, got a list"),
        ("steps.fuse.ignore=[[a]]", "steps.fuse.ignore: an item must be text, got a list ['a']; write the whole list: "),
        ("~steps.compile.mode", "~steps.compile.mode: there is no such value to drop; see optforge show; type steps.compile.mode=VALUE"),
        ("steps.compile.after=fuze", "steps.compile.after: is to run after 'fuze', which is no step of this recipe; did you mean fuse?"),
        ("steps.compile.before=compile", "steps.compile.before: is to run before 'compile', which is itself; "),
    ],
)
def test_a_wrong_shape_or_place_is_told_where_it_was_typed(override: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config.compose(config.parse(["recipe=llama_int8", override], cwd=tmp_path), cwd=tmp_path)
    assert str(caught.value).startswith(told)
