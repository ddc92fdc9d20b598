"""Recipe files: strict, safe, quick to refuse, and extended as written."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from optforge import config, recipe, safe_yaml
from optforge.errors import ConfigError

SHIPPED = config.recipes_dir()


def _write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def _load(path: Path) -> recipe.RecipeFile:
    return recipe.load(path, cwd=path.parent, shipped=SHIPPED)


def _refusal(path: Path) -> str:
    """The message of a refusal that is one line and takes less than two seconds."""
    started = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        _load(path)
    assert time.monotonic() - started < 2
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    assert str(path) in message
    return message


HOSTILE = {
    "hydra keys": ("name: x\nhydra:\n  callbacks: {a: {_target_: os.system}}\n", "hydra"),
    "target": ("name: x\nsteps: {a: {use: quantize/int8_weight, _target_: os.system}}\n", "_target_"),
    "target in a list": ("name: x\nsteps: {a: {use: x/y, list: [{_target_: os.system}]}}\n", "_target_"),
    "defaults": ("defaults: [override hydra/launcher: joblib]\nname: x\n", "defaults"),
    "group override": ("name: x\nsteps: {'hydra/launcher@x': {use: a}}\n", "hydra/launcher"),
    "interpolation": ("name: ${oc.env:HOME}\n", "${oc.env:HOME}"),
    "interpolation as key": ("${oc.env:HOME}: 1\n", "interpolation"),
    "interpolation in a list": ("name: x\nsteps: {a: {use: q, ignore: ['${oc.env:HOME}']}}\n", "interpolation"),
    "python tag": ("!!python/object/apply:os.system ['true']\n", "tag"),
    "local tag": ("name: !thing x\n", "tag"),
    "package header": ("# @package _global_\nname: x\n", "@package"),
    "folder as name": ("name: ../../etc\n", "folder"),
    "million nested lists": ("[" * 1_000_000, "holds"),
    "nested lists": ("[" * 200_000, "levels deep"),
    "nested mappings": ("{a: " * 60_000, "levels deep"),
    "nested dashes": ("- " * 120_000 + "a", "levels deep"),
    "nested questions": ("? " * 120_000, "levels deep"),
    "self alias": ("name: &a [*a]\n", "alias"),
    "many values": ("steps: [" + "1," * 60_000 + "]\n", "values"),
    "open quote": ("'" * 99_999, "not valid YAML"),
    "escape sequence": ("name: \x1b[31mred\n", "special characters"),
    "spelled escape sequence": ('name: x\ndescription: "\\e[31mred"\n', "control character"),
    "escape sequence in a key": ('name: x\nsteps: {"a\\e[2J": {use: x}}\n', "control character"),
    "two documents": ("name: a\n---\nname: b\n", "more than one"),
    "a list": ("- a\n- b\n", "not a recipe"),
    "marks between braces": ("name: x\nsteps: {a: {use: ???}}\n", "in quotes"),
    "nothing": ("# only a comment\n", "empty"),
    "extends itself": ("name: x\nextends: ./mine.yaml\n", "extends itself"),
    "number as key": ("name: x\nsteps: {? [a, b] : {use: x}}\n", "key"),
}


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case.replace(" ", "_"))
def test_hostile_file_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    text, word = HOSTILE[case]
    assert word in _refusal(_write(tmp_path, text))


def test_billion_laughs_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    assert "aliases are expanded" in _refusal(_write(tmp_path, "\n".join(lines)))


def test_huge_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    with path.open("wb") as file:
        file.truncate(100_000_000)
    assert "100,000,000 bytes" in _refusal(path)


def test_binary_file_and_foreign_encoding_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"name: x\x00\x01")
    assert "binary" in _refusal(path)
    path.write_bytes("name: Größe".encode("latin-1"))
    assert "UTF-8" in _refusal(path)


def test_device_and_folder_are_refused(tmp_path: Path) -> None:
    for name, target in (("zero.yaml", Path("/dev/zero")), ("folder.yaml", tmp_path)):
        link = tmp_path / name
        link.symlink_to(target)
        with pytest.raises(ConfigError, match="not a regular file"):
            safe_yaml.read(link)


def test_windows_line_ends_and_byte_order_mark_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: x\r\nsteps: {}\r\n")
    assert _load(path).name == "x"


@pytest.mark.case("B05")
def test_b05_regular_expression_in_double_quotes(tmp_path: Path) -> None:
    text = "name: x\nsteps:\n  a: {{use: quantize/int8_weight, ignore: [{quote}re:layers\\.([0-5])\\..*{quote}]}}\n"
    message = _refusal(_write(tmp_path, text.format(quote='"')))
    assert "mine.yaml:3" in message
    assert r"'re:layers\.([0-5])\..*'" in message
    assert _load(_write(tmp_path, text.format(quote="'"))).steps["a"]["ignore"] == [r"re:layers\.([0-5])\..*"]


@pytest.mark.case("B05")
def test_b05_an_escape_that_yaml_knows_is_caught_as_well(tmp_path: Path) -> None:
    """`\\b` is a word boundary to the writer and a backspace to YAML."""
    assert r"'re:\bproj'" in _refusal(_write(tmp_path, 'name: x\nsteps: {a: {use: q, ignore: ["re:\\bproj"]}}\n'))


@pytest.mark.case("B123")
@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("010", "010"),
        ("1:30", "1:30"),
        ("695e0514", "695e0514"),
        ("10e2", "10e2"),
        ("1_000", "1_000"),
        ("nan", "nan"),
        (".inf", ".inf"),
        ("yes", "yes"),
        ("0x1F", "0x1F"),
        ("2024-01-02", "2024-01-02"),
        ("1e-4", 0.0001),
        ("0.5", 0.5),
        ("-3", -3),
        ("true", True),
        ("null", None),
        ("'12'", "12"),
        ("None", "None"),
    ],
)
def test_b123_scalars_have_one_reading(written: str, value: object) -> None:
    read = safe_yaml.loads(f"v: {written}\n", "x")["v"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.case("B125")
def test_b125_duplicate_key_names_both_lines(tmp_path: Path) -> None:
    message = _refusal(_write(tmp_path, "name: x\nsteps:\n  a:\n    use: q/r\n    bits: 8\n    other: 1\n    bits: 4\n"))
    assert "'bits'" in message
    assert "line 5" in message
    assert "line 7" in message


@pytest.mark.case("B125")
def test_b125_merge_keys_are_accepted(tmp_path: Path) -> None:
    text = "name: x\nsteps:\n  a: &a {use: q/r, bits: 8}\n  b:\n    <<: *a\n    bits: 4\n  c: {<<: [*a, {extra: 1}]}\n"
    steps = _load(_write(tmp_path, text)).steps
    assert steps["b"] == {"use": "q/r", "bits": 4}
    assert steps["c"] == {"use": "q/r", "bits": 8, "extra": 1}


@pytest.mark.case("B137")
def test_b137_version_is_told_first_and_alone(tmp_path: Path) -> None:
    broken = "goall: x\nsteps: 3\nlimits: {max_klx: 1}\n"
    for line, both in (("schema_version: 99\n", ("99", "1")), ("optforge_version: 0.0\n", ("0.0", "0.1"))):
        message = _refusal(_write(tmp_path, line + broken))
        assert all(version in message for version in both)
        assert "goall" not in message
    with pytest.raises(ConfigError) as caught:
        _load(_write(tmp_path, broken))
    assert len(caught.value.problems) == 3


@pytest.mark.case("B137")
def test_b137_one_wrong_field_is_one_problem(tmp_path: Path) -> None:
    path = _write(tmp_path, "name: x\nsteps: {a: {use: compile/inductr, mode: fast, fullgraph: 7}}\n")
    with pytest.raises(ConfigError) as caught:
        config.recipe(path)
    (problem,) = caught.value.problems
    assert problem.fix.startswith("did you mean compile/inductor")


def test_extends_lays_keys_over_and_appends_new_steps(tmp_path: Path) -> None:
    _write(
        tmp_path,
        "name: base\ngoal: memory\ndescription: b\n"
        "steps:\n  one: {use: a/b, x: 1, y: 2}\n  two: {use: c/d}\nlimits: {max_kl: 1.0, min_sqnr_db: 5}\n",
        "base.yaml",
    )
    child = _load(
        _write(
            tmp_path,
            "name: child\nextends: ./base.yaml\nsteps:\n  zero: {use: e/f}\n  one: {y: 3}\nlimits: {max_kl: 2.0, min_sqnr_db: null}\n",
        )
    )
    assert list(child.steps) == ["one", "two", "zero"]
    assert child.steps["one"] == {"use": "a/b", "x": 1, "y": 3}
    assert (child.name, child.goal, child.description) == ("child", "memory", "b")
    assert child.limits == {"max_kl": 2.0}
    assert child.origins["steps.one.x"] == str(tmp_path / "base.yaml")
    assert child.origins["steps.one.y"] == str(tmp_path / "mine.yaml")


@pytest.mark.case("B08")
def test_b08_an_explicit_null_drops_a_step_of_the_base(tmp_path: Path) -> None:
    _write(tmp_path, "name: base\nsteps: {one: {use: a/b}, two: {use: c/d}}\n", "base.yaml")
    assert list(_load(_write(tmp_path, "extends: ./base.yaml\nsteps: {one: null}\n")).steps) == ["two"]
    message = _refusal(_write(tmp_path, "extends: ./base.yaml\nsteps: {onee: null}\n"))
    assert "did you mean one?" in message


@pytest.mark.case("B119")
def test_b119_ignore_extra_adds_up_over_extends(tmp_path: Path) -> None:
    _write(tmp_path, "name: base\nsteps: {w: {use: a/b, ignore: [norm], ignore_extra: [gate]}}\n", "base.yaml")
    child = _load(_write(tmp_path, "extends: ./base.yaml\nsteps: {w: {ignore_extra: [lm_head]}}\n"))
    assert child.steps["w"]["ignore"] == ["norm"]
    assert child.steps["w"]["ignore_extra"] == ["gate", "lm_head"]
    assert child.origins["steps.w.ignore_extra.0"] == str(tmp_path / "base.yaml")
    assert child.origins["steps.w.ignore_extra.1"] == str(tmp_path / "mine.yaml")


@pytest.mark.case("B130")
def test_b130_relative_extends_means_the_folder_of_the_file_and_a_missing_file_its_absolute_path(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    _write(tmp_path / "sub", "name: base\nsteps: {a: {use: x/y}}\n", "base.yaml")
    child = _write(tmp_path / "sub", "extends: ./base.yaml\n")
    assert list(recipe.load(child, cwd=tmp_path, shipped=SHIPPED).steps) == ["a"]
    with pytest.raises(ConfigError, match=str(tmp_path / "no" / "such.yaml")):
        recipe.find("./no/such.yaml", cwd=tmp_path, shipped=SHIPPED)


def test_a_name_that_two_recipes_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    mine = _write(tmp_path / "recipes", "name: other\nsteps: {}\n", "llama_fp8.yaml")
    with pytest.raises(ConfigError, match="give the path") as caught:
        recipe.find("llama_fp8", cwd=tmp_path, shipped=SHIPPED)
    assert str(mine) in str(caught.value)


def test_local_recipes_are_found_by_name(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    mine = _write(tmp_path / "recipes", "name: mine\nsteps: {}\n")
    assert recipe.find("mine", cwd=tmp_path, shipped=SHIPPED) == mine
    assert "llama_fp8" in recipe.known(tmp_path, SHIPPED)


def test_what_is_dumped_reads_back_the_same() -> None:
    data = {
        "text": ["010", "1e-4", "true", "null", "~", "12", "", "a: b", "# c", "1:30", "695e0514", "Größe", "re:a\\.b$"],
        "n": [1, 1e-5, 2.5e30, 0.1, True, None],
        "empty": [{}, []],
    }
    assert safe_yaml.loads(safe_yaml.dumps(data, ["comment"]), "x") == data


def test_a_saved_run_in_the_place_of_a_recipe_is_one_line_with_the_option_for_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    run = config.compose(config.parse(["recipe=baseline"], cwd=tmp_path), cwd=tmp_path)
    file.write_text(config.to_yaml(run))
    with pytest.raises(ConfigError) as caught:
        config.recipe(file)
    assert str(caught.value) == f"{file}: is a whole run, not a recipe; type --config {file}"


def test_a_wrong_extends_names_the_file_that_says_it(tmp_path: Path) -> None:
    file = tmp_path / "child.yaml"
    file.write_text("extends: lama_int8\n")
    with pytest.raises(ConfigError) as caught:
        config.recipe(file)
    assert str(caught.value).startswith(f"{file}: extends: lama_int8: unknown recipe 'lama_int8'; did you mean llama_int8")
