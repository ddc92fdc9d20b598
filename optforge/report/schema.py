"""Generates the JSON Schemas of report.json and plan.json from the dataclasses in `spec.py` and `plan/document.py`.

The dataclasses are the one definition; the files in `docs/` are what this prints, and tests compare the two.

    python -m optforge.report.schema report > docs/report.schema.json
    python -m optforge.report.schema plan > docs/plan.schema.json
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import textwrap
import types
import typing
from typing import Any

from optforge.plan.document import OUTCOMES, SCHEMA_VERSION, PlanFile, Study, Verdict
from optforge.plan.document import STATUSES as PLAN_STATUSES
from optforge.report.codec import field_types
from optforge.spec import VERDICTS, Json, Report, StepReport

STATUSES = ("complete", "incomplete", "failed", "oom")
SCALARS: dict[type, Json] = {type(None): "null", str: "string", bool: "boolean", int: "integer", float: ["number", "null"]}
"""A float is null where the figure was not finite (its path then stands in `nonfinite`)."""
CHOICES: dict[tuple[type, str], Json] = {
    (Report, "schema_version"): {"const": 1},
    (Report, "status"): {"enum": list(STATUSES)},
    (Report, "verdict"): {"enum": list(VERDICTS)},
    (StepReport, "verdict"): {"enum": list(VERDICTS)},
    (PlanFile, "schema_version"): {"const": SCHEMA_VERSION},
    (Study, "status"): {"enum": list(PLAN_STATUSES)},
    (Verdict, "outcome"): {"enum": list(OUTCOMES)},
}
"""What the type of a field cannot say."""


def report_schema() -> dict[str, Json]:
    """The JSON Schema (draft 2020-12) of report.json."""
    return _schema(Report, "OptForge report, schema_version 1")


def plan_schema() -> dict[str, Json]:
    """The JSON Schema (draft 2020-12) of plan.json."""
    return _schema(PlanFile, f"OptForge plan, schema_version {SCHEMA_VERSION}")


def _schema(kind: type, title: str) -> dict[str, Json]:
    definitions: dict[str, Json] = {}
    root = _object(kind, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **root,
        "$defs": dict(sorted(definitions.items())),
    }


def _object(kind: type, definitions: dict[str, Json]) -> dict[str, Json]:
    texts = _field_docs(kind)
    properties = {}
    for name, hint in field_types(kind).items():
        described = {"description": texts[name]} if name in texts else {}
        properties[name] = {**_type(hint, definitions), **CHOICES.get((kind, name), {}), **described}
    return {
        "type": "object",
        "description": inspect.cleandoc(kind.__doc__ or ""),
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _type(hint: Any, definitions: dict[str, Json]) -> dict[str, Json]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_type(option, definitions) for option in inner]}
    if origin is list:
        return {"type": "array", "items": _type(inner[0], definitions)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type(inner[1], definitions)}
    if dataclasses.is_dataclass(hint):
        kind = typing.cast(type, hint)
        if kind.__name__ not in definitions:
            definitions[kind.__name__] = {}  # holds the name while its fields are walked
            definitions[kind.__name__] = _object(kind, definitions)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    return {"type": SCALARS[hint]}


def _field_docs(kind: type) -> dict[str, str]:
    """Field name -> the string that stands under it in the source, which is its reference text."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for line, following in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(following, ast.Expr):
            docs[line.target.id] = inspect.cleandoc(ast.literal_eval(following.value))
    return docs


def main(which: str = "report") -> None:
    print(json.dumps({"report": report_schema, "plan": plan_schema}[which](), indent=2))


if __name__ == "__main__":
    main(*sys.argv[1:])
