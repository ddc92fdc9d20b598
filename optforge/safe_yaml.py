"""Reads a YAML file that a stranger sent: data only, limited in size, depth and count, with a line for every complaint.

Recipe files and saved runs travel between people, so they are read here and nowhere else. The parser is PyYAML's; what
is made of its nodes is decided here. Tags, interpolations (`${...}`) and Hydra's package headers are refused, duplicate
keys are refused with both lines, and the readings of YAML 1.1 that surprise (`010` is 8, `1:30` is 90, `yes` is true,
`695e0514` is infinity) do not happen: such a scalar stays text, and the type of the field that it is meant for decides.
"""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from optforge.errors import ConfigError, Problem
from optforge.spec import Json

MAX_BYTES = 256 * 1024
MAX_DEPTH = 24
MAX_NODES = 20_000

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?((0|[1-9][0-9]*)\.[0-9]*([eE][-+]?[0-9]+)?|\.[0-9]+([eE][-+]?[0-9]+)?|(0|[1-9][0-9]*)[eE][-+][0-9]+)")
_MAX_DIGITS = 40
_WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None, "true": True, "True": True, "TRUE": True}
_WORDS |= {"false": False, "False": False, "FALSE": False}
_PACKAGE_HEADER = re.compile(r"^\s*#\s*@package\b", re.MULTILINE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def scalar(text: str) -> bool | int | float | str | None:
    """What an unquoted scalar means: null, a boolean, a number that can be read in one way only, or text."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > _MAX_DIGITS:
        return text
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


def read(path: Path) -> Json:
    """The content of the YAML file `path` as plain data.

    Raises:
        ConfigError: there is no such file, or it is not a small, single, plain YAML document.
    """
    return loads(read_text(path), str(path))


def read_text(path: Path) -> str:
    """The text of a file that is meant to hold YAML, refused when it is not a regular file, too large, or not text."""
    where = str(path)
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise _error(where, "is not a regular file", "give the path of a YAML file")
        if info.st_size > MAX_BYTES:
            raise _error(where, f"holds {info.st_size:,} bytes, more than the {MAX_BYTES:,} that a YAML file of OptForge may have")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        tried = f"{path.absolute()}: {error.strerror or error}"
        raise _error(where, "cannot be read", tried) from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _error(where, "is not a text file in UTF-8") from error
    if "\x00" in text:
        raise _error(where, "is a binary file, not YAML")
    return text


def loads(text: str, where: str) -> Json:
    """The content of one YAML document as plain data; `where` names it in complaints.

    Raises:
        ConfigError: with file and line, in one line.
    """
    if len(text) > MAX_BYTES:
        raise _error(where, f"holds more than the {MAX_BYTES:,} characters that a YAML file of OptForge may have")
    header = _PACKAGE_HEADER.search(text)
    if header:
        line = text.count("\n", 0, header.end()) + 1
        raise _error(f"{where}:{line}", "has a Hydra package header; this file is data", "remove the line with @package")
    try:
        node = _Composer(text, where).get_single_node()
    except yaml.YAMLError as error:
        raise ConfigError(_syntax_problem(error, text, where)) from error
    if node is None:
        raise _error(where, "is empty")
    return _Builder(text, where).build(node)


class _Composer(yaml.SafeLoader):
    """PyYAML's composer with a limit on depth and nodes, and without tags."""

    def __init__(self, text: str, where: str) -> None:
        super().__init__(text)
        self._where = where
        self._depth = 0
        self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # PyYAML's stubs leave this method untyped
        line = event.start_mark.line + 1
        if getattr(event, "tag", None):
            raise _error(f"{self._where}:{line}", f"has the tag {_shown(event.tag)}; this file is data", "remove the tag")
        self._depth += 1
        self._nodes += 1
        if self._depth > MAX_DEPTH:
            raise _error(f"{self._where}:{line}", f"is nested more than {MAX_DEPTH} levels deep")
        if self._nodes > MAX_NODES:
            raise _error(f"{self._where}:{line}", f"holds more than {MAX_NODES:,} values")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Builder:
    """Makes plain data of composed nodes; counts again, because aliases multiply."""

    def __init__(self, text: str, where: str) -> None:
        self._text = text
        self._where = where
        self._count = 0
        self._open: set[int] = set()

    def build(self, node: yaml.Node) -> Json:
        self._count += 1
        if self._count > MAX_NODES:
            raise _error(self._at(node), f"holds more than {MAX_NODES:,} values once its aliases are expanded")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if id(node) in self._open:
            raise _error(self._at(node), "holds an alias of itself")
        self._open.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            built: Json = [self.build(item) for item in node.value]
        else:
            assert isinstance(node, yaml.MappingNode)  # PyYAML has no fourth kind of node
            built = self._mapping(node)
        self._open.discard(id(node))
        return built

    def _scalar(self, node: yaml.ScalarNode) -> bool | int | float | str | None:
        text: str = node.value
        if "${" in text:
            raise _error(self._at(node), f"has the interpolation {_shown(text)}; this file is data", "write the value itself")
        if node.style is None:
            return scalar(text)
        if node.style == '"' and text.startswith("re:") and _CONTROL.search(text):
            written = self._text[node.start_mark.index + 1 : node.end_mark.index - 1]
            raise ConfigError(_single_quotes(self._at(node), written))
        self._check_printable(node)
        return text

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Json]:
        lines: dict[str, int] = {}
        own: dict[str, Json] = {}
        merged: dict[str, Json] = {}
        for key_node, value_node in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.value == "<<" and key_node.style is None:
                for mapping in self._merge_sources(value_node):
                    merged = mapping | merged
                continue
            key, line = self._key(key_node), key_node.start_mark.line + 1
            if key in lines:
                raise _error(self._where, f"has the key {key!r} twice, in line {lines[key]} and in line {line}", "keep one of them")
            lines[key] = line
            own[key] = self.build(value_node)
        return merged | own

    def _merge_sources(self, node: yaml.Node) -> Iterator[dict[str, Json]]:
        for source in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            built = self.build(source)
            if not isinstance(built, dict):
                raise _error(self._at(node), "merges (<<) something that is not a mapping")
            yield built

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode) or not node.value:
            raise _error(self._at(node), "has a key that is not a word")
        if "${" in node.value:
            raise _error(self._at(node), f"has the interpolation {_shown(node.value)} as a key")
        self._check_printable(node)
        return str(node.value)

    def _check_printable(self, node: yaml.ScalarNode) -> None:
        """Double quotes can spell characters that a terminal obeys."""
        if _CONTROL.search(node.value.replace("\n", "").replace("\t", "")):
            raise _error(self._at(node), f"has a control character in {_shown(node.value)!r}", "remove it")

    def _at(self, node: yaml.Node) -> str:
        return f"{self._where}:{node.start_mark.line + 1}"


def _syntax_problem(error: yaml.YAMLError, text: str, where: str) -> Problem:
    """A parser error in one line, with the hint for a regular expression in double quotes."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    what = str(getattr(error, "problem", None) or getattr(error, "reason", None) or "is not valid YAML")
    if mark is None:
        return Problem(where=where, what=_shown(what))
    at = f"{where}:{mark.line + 1}"
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    if "???" in line and "'?'" in what:
        return Problem(where=at, what="??? between braces is not valid YAML", fix="write '???' in quotes, or one key a line")
    if "unknown escape character" in what:
        quoted = re.findall(r'"((?:\\.|[^"\\])*)"', line)
        pattern = next((found for found in quoted if "\\" in found), "re:...")
        return _single_quotes(at, pattern)
    if "expected a single document" in what or "another document" in what:
        return Problem(where=at, what="holds more than one YAML document", fix="keep one")
    return Problem(where=at, what=f"is not valid YAML ({_shown(what)}, column {mark.column + 1})")


def _single_quotes(at: str, pattern: str) -> Problem:
    fix = f"write the pattern in single quotes: '{_shown(pattern)}'"
    return Problem(where=at, what="a backslash in double quotes starts an escape", fix=fix)


def _shown(text: str) -> str:
    """Text of a stranger's file as it may stand in a one-line message: short, without control characters."""
    clean = _CONTROL.sub("?", text)
    return clean if len(clean) <= 80 else f"{clean[:77]}..."


def _error(where: str, what: str, fix: str = "") -> ConfigError:
    return ConfigError(Problem(where=where, what=what, fix=fix))


class _Dumper(yaml.SafeDumper):
    """Writes text in quotes wherever `scalar` would read it as something else."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = None if isinstance(scalar(text), str) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def dumps(data: Json, comments: Iterable[str] = ()) -> str:
    """`data` as YAML that `loads` reads back to the same values, keys in their order, after comment lines."""
    head = "".join(f"# {line}\n" for line in comments)
    body: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=False)
    return head + body
