"""`optforge export`: a saved model in the format of another engine, checked in that engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from optforge.errors import EXIT_OK, ConfigError, Problem, TrustError, near
from optforge.spec import EXPORT_FORMATS, Json


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of `export` as Typer parsed them."""

    run: Path
    format: str
    out: Path | None = None
    trust: bool = False


def export_command(request: Request) -> int:
    """Exports, prints what was written and how close it is, and returns the exit code.

    Raises:
        UserError: something must be changed first; nothing was written.
        ExportError: the export computes something else in its engine; it was removed.
    """
    if request.format not in EXPORT_FORMATS:
        fix = near(request.format, EXPORT_FORMATS) or f"one of {', '.join(EXPORT_FORMATS)}"
        raise ConfigError(Problem(where="--format", what=f"{request.format!r} is no format", fix=fix))
    from rich.console import Console

    from optforge import logs
    from optforge.export import export_saved
    from optforge.report import terminal

    with logs.quiet("torch", "transformers"), terminal.Progress(Console(stderr=True)) as progress:
        try:
            record = export_saved(request.run, request.format, request.out, trust=request.trust, progress=progress)
        except TrustError as error:  # its words are those of `run`, whose overrides this command does not take
            told = (replace(problem, fix=problem.fix.replace("trust=true", "--trust")) for problem in error.problems)
            raise TrustError(*told) from error
    for line in lines(record):
        print(line)
    return EXIT_OK


def lines(record: dict[str, Json]) -> Sequence[str]:
    """What was written, how it was checked, and what to know."""
    check = record["check"]
    error, allowed = (f"{check[key]:.1e}" for key in ("relative_error", "allowed"))
    versions = ", ".join(f"{name} {version}" for name, version in check["versions"].items())
    sizes = ", ".join(" x ".join(map(str, size.values())) for size in check["sizes"])
    axes = " x ".join(check["sizes"][0])
    return [
        f"{record['format']}: {record['bytes'] / 1e6:,.1f} MB in {record['path']}, loaded by {record['loaded_by']}",
        f"checked in a fresh process ({versions}): relative error {error} of {allowed} allowed, at {axes} of {sizes}",
        *(f"note: {note}" for note in record["notes"]),
    ]
