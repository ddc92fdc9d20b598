"""`optforge show`: the whole resolved run, as YAML that `optforge run --config` repeats, or where each value came from."""

from __future__ import annotations

from pathlib import Path

from optforge import config
from optforge.cli import tables
from optforge.cli.run import Request


def show_command(request: Request, *, origins: bool) -> None:
    """Prints pure YAML on stdout; with `origins`, a table of key, value and source."""
    cwd = Path.cwd()
    run = config.compose(request.parse(cwd), cwd=cwd)
    if origins:
        values = dict(_leaves(run.resolved))
        tables.show([(key, str(values.get(key, "")), source) for key, source in sorted(run.origins.items())])
    else:
        print(config.to_yaml(run), end="")


def _leaves(node: object, prefix: str = "") -> list[tuple[str, object]]:
    """Dotted keys and values of a nested mapping."""
    if isinstance(node, dict) and node:
        return [leaf for key, child in node.items() for leaf in _leaves(child, f"{prefix}.{key}" if prefix else str(key))]
    return [(prefix, node)]
