"""`optforge show`: the whole resolved run, as YAML that `optforge run --config` repeats, or where each value came from."""

from __future__ import annotations

from pathlib import Path

from optforge import config
from optforge.cli import tables
from optforge.cli.run import Request
from optforge.errors import ConfigError, Problem


def show_command(request: Request, *, origins: bool) -> None:
    """Prints pure YAML on stdout; with `origins`, a table of key, value and source.

    Raises:
        ConfigError: a key or value is wrong, or a flag of Hydra's asks for something that only `run` does.
    """
    cwd = Path.cwd()
    arguments = request.parse(cwd)
    if arguments.hydra:
        problem = Problem(
            where=arguments.hydra[0], what="does not go with show, which prints one run", fix="leave it out, or use optforge run"
        )
        raise ConfigError(problem)
    run = config.compose(arguments, cwd=cwd)
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
