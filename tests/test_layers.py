"""Habits that keep the package easy to read: imports point down the layers, and nothing heavy is loaded early."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import optforge

ROOT = Path(optforge.__file__).parent

GROUPS = ("transforms", "backends", "workloads", "models", "data")
LAYERS = {
    0: "errors spec",
    1: "registry select measure kernels calibrate atomic cache callables checkpoint compiling distributed fetch idx isolate logs masks"
    " pretrained processes progress safe_yaml schemes share single_row toolchain training",
    2: " ".join(GROUPS),
    3: "recipe config compare gate plan engine execution export record report artifact preflight environment rows sensitivity sharded"
    " verdicts sweep training_execution tune xla",
    4: "cli api lightning __main__",
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names.split()}

HEAVY = ("torch", "transformers", "lightning", "triton", "torchao", "jax", "numpy", "jinja2")
HELP_SECONDS = 0.3
HELP_TOLERANCE = 3.0
"""How many times slower than the aim a busy test machine may be."""


def _modules() -> list[str]:
    """Dotted names, below `optforge`, of every module of the package."""
    names = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(part for part in parts if part != "__init__"))
    return [name for name in names if name]


def _top(module: str) -> str:
    return module.partition(".")[0]


def _imports(module: str) -> Iterator[str]:
    """What a module imports of this package at run time, below `optforge`; imports for type checkers do not count."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in _without_type_checking(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name[len("optforge.") :] for alias in node.names if alias.name.startswith("optforge."))
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module == "optforge":
                yield from (alias.name for alias in node.names if alias.name != "__version__")
            elif node.module.startswith("optforge."):
                yield node.module[len("optforge.") :]


def _without_type_checking(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from (inner for statement in node.orelse for inner in ast.walk(statement))
            continue
        yield node
        yield from _without_type_checking(node)


def _layer(module: str) -> int:
    """The base.py files are contracts, one layer below what keeps to them; -1 for a module that belongs to no layer."""
    if _top(module) in GROUPS and module.endswith(".base"):
        return 1
    return LAYER_OF.get(_top(module), -1)


@pytest.mark.parametrize("module", _modules())
def test_imports_point_down_the_layers(module: str) -> None:
    top = _top(module)
    assert top in LAYER_OF, f"optforge/{top} belongs to no layer; add it to LAYERS"
    for imported in _imports(module):
        other = _top(imported)
        assert other in LAYER_OF, f"{module} imports {imported}, which belongs to no layer"
        assert _layer(imported) <= _layer(module), f"{module} imports {imported}, which lies above it"


@pytest.mark.parametrize("module", [name for name in _modules() if _top(name) in GROUPS and not name.endswith(".base")])
def test_files_of_the_second_layer_do_not_know_other_groups(module: str) -> None:
    strangers = [name for name in _imports(module) if _top(name) in GROUPS and not name.endswith(".base")]
    assert [name for name in strangers if _top(name) != _top(module)] == []


@pytest.mark.parametrize("module", [name for name in _modules() if _layer(name) == 0])
def test_the_lowest_layer_knows_only_the_standard_library(module: str) -> None:
    tree = ast.parse(ROOT.joinpath(f"{module}.py").read_text(encoding="utf-8"))
    names = {_top(alias.name) for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {_top(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert names <= set(sys.stdlib_module_names) | {"optforge"}


@pytest.mark.parametrize(
    "code",
    [
        "import optforge",
        "import optforge.spec, optforge.errors, optforge.registry",
        "import sys; sys.argv = ['optforge', '--help']; from optforge.cli.app import app; app(standalone_mode=False)",
        "import sys; sys.argv = ['optforge', 'run', '--help']; from optforge.cli.app import app; app(standalone_mode=False)",
        "from optforge.cli import run, show, listing",
    ],
)
def test_nothing_heavy_is_loaded_early(code: str) -> None:
    check = f"{code}\nimport sys; print('loaded:', *sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1].strip() == "loaded:"


def test_help_answers_at_once() -> None:
    """CPU time of the whole command, less that of a bare interpreter, so that a busy machine disturbs little."""
    bare = min(_cpu_seconds("pass") for _ in range(3))
    shown = min(_cpu_seconds("import sys; sys.argv = ['optforge', '--help']; from optforge.cli.app import main; main()") for _ in range(3))
    assert shown - bare < HELP_SECONDS * HELP_TOLERANCE


def _cpu_seconds(code: str) -> float:
    wrapped = f"import atexit, sys, time; atexit.register(lambda: print(time.process_time(), file=sys.stderr))\n{code}"
    done = subprocess.run([sys.executable, "-c", wrapped], capture_output=True, text=True, check=True, timeout=60)
    return float(done.stderr.split()[-1])
