"""The commands. Typer parses the options that are OptForge's own and hands everything else on, in order, to Hydra.

This file imports nothing heavy: help and completion answer at once, and each command imports what it needs when it is
called.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from optforge.cli.completion import NOUNS, complete_noun, complete_override
from optforge.cli.failures import guard, tell
from optforge.errors import EXIT_USER, ConfigError, Problem

if TYPE_CHECKING:
    from optforge.cli.run import Request

app = typer.Typer(
    name="optforge",
    help="Make a PyTorch model faster or smaller from a recipe, and prove by measurement that it is.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

PASS_THROUGH = {"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
"""Options that Typer does not know (`-m`, `--cfg job`) stay in their place among the overrides."""


# Optional[...], because Typer reads these annotations at run time and the style of `X | None` makes no difference to it
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Argument(
        metavar="[OVERRIDES]...",
        help="key=value, such as recipe=llama_fp8 hardware=a100 steps.weights.group_size=64, and Hydra's own flags (-m, --cfg job)",
        autocompletion=complete_override,
        show_default=False,
    ),
]
Config = Annotated[Optional[Path], typer.Option("--config", metavar="FILE", help="Repeat a run written by `optforge show`.")]  # noqa: UP045
Set = Annotated[Optional[list[str]], typer.Option("--set", metavar="STEP.KEY=VALUE", help="Change a step; needs no quotes.")]  # noqa: UP045
Drop = Annotated[Optional[list[str]], typer.Option("--drop", metavar="STEP", help="Leave a step out.")]  # noqa: UP045
Add = Annotated[Optional[list[str]], typer.Option("--add", metavar="STEP=KIND/OPTION", help="Add a step.")]  # noqa: UP045
Debug = Annotated[bool, typer.Option("--debug", metavar="", help="Show tracebacks.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", metavar="", help="Show the log while the command works.")]
AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from optforge import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[  # read by its callback
        bool, typer.Option("--version", metavar="", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """A callback keeps `run` a sub-command however many commands there are."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(EXIT_USER)


@app.command("run", context_settings=PASS_THROUGH)
def run(
    *,
    overrides: Overrides = None,
    config: Config = None,
    set_: Set = None,
    drop: Drop = None,
    add: Add = None,
    debug: Debug = False,
    verbose: Verbose = False,
) -> None:
    """Run a recipe, or several with -m, and write a report.

    Exit codes: 0 done and ok; 1 crashed; 2 something to change; 3 a limit was missed; 130 and 143 interrupted.
    """
    with guard(debug=debug):
        from optforge.cli.run import run_command

        request = _request(overrides, config, set_=set_, drop=drop, add=add)
        raise typer.Exit(run_command(replace(request, debug=debug, verbose=verbose)))


@app.command("plan", context_settings=PASS_THROUGH)
def plan(
    *,
    overrides: Overrides = None,
    config: Config = None,
    set_: Set = None,
    drop: Drop = None,
    add: Add = None,
    as_json: AsJson = False,
    no_kernels: Annotated[
        bool, typer.Option("--no-kernels", metavar="", help="Compile nothing: neither kernels nor XLA's program.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Say what a recipe will do on hardware that need not be here: fit, speed, downgrades, kernels. Loads no weights.

    Comma lists compare: hardware=a100,h100 or recipe=llama_fp8,llama_int8. Exit codes: 0 planned; 2 something to change.
    """
    with guard(debug=debug):
        from optforge.cli.plan import plan_command

        request = _request(overrides, config, set_=set_, drop=drop, add=add)
        raise typer.Exit(plan_command(replace(request, debug=debug), as_json=as_json, kernels=not no_kernels))


@app.command("compare")
def compare(
    *,
    runs: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="RUN", help="Folders of runs or sweeps, report.json files, names of recipes.", show_default=False),
    ] = None,
    by: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--by", metavar="FIGURE", help="What ranks them: latency, throughput, memory, size, quality or cost."),
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", metavar="", help="Compare also what was measured under different conditions.")
    ] = False,
    markdown: Annotated[Optional[Path], typer.Option("--markdown", metavar="FILE", help="Write Markdown; - prints it.")] = None,  # noqa: UP045
    csv: Annotated[Optional[Path], typer.Option("--csv", metavar="FILE", help="Write csv; - prints it.")] = None,  # noqa: UP045
    json: Annotated[Optional[Path], typer.Option("--json", metavar="FILE", help="Write JSON; - prints it.")] = None,  # noqa: UP045
    html: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--html", metavar="FILE", help="Where the page goes; else into the sweep, or under outputs/comparisons/."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Lay runs side by side: table, Pareto plot, what each step gained, what they differ in.

    Refuses what was measured under different conditions. Exit codes: 0 compared; 2 something to change.
    """
    with guard(debug=debug):
        from optforge.cli.compare import Request, compare_command

        files = {"markdown": markdown, "csv": csv, "json": json, "html": html}
        raise typer.Exit(compare_command(Request(runs=tuple(runs or ()), by=by, anyway=anyway, files=files)))


@app.command("gate")
def gate(
    *,
    words: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            metavar="RUN | OVERRIDES", help="Folders of runs, or report.json files; with --ab, overrides of both sides.", show_default=False
        ),
    ] = None,
    baseline: Annotated[Optional[Path], typer.Option("--baseline", metavar="FILE", help="What to hold the run against.")] = None,  # noqa: UP045
    limits: Annotated[Optional[Path], typer.Option("--limits", metavar="FILE", help="Limits as YAML.")] = None,  # noqa: UP045
    limit: Annotated[Optional[list[str]], typer.Option("--limit", metavar="LIMIT", help="Such as 'latency_ms.p50 <= +3%'.")] = None,  # noqa: UP045
    update: Annotated[bool, typer.Option("--update", metavar="", help="Make the runs the new baseline.")] = False,
    strict: Annotated[bool, typer.Option("--strict", metavar="", help="Fail also where a limit is undecided.")] = False,
    junit: Annotated[Optional[Path], typer.Option("--junit", metavar="FILE", help="Write JUnit XML.")] = None,  # noqa: UP045
    markdown: Annotated[Optional[Path], typer.Option("--markdown", metavar="FILE", help="Write a summary.")] = None,  # noqa: UP045
    ab: Annotated[bool, typer.Option("--ab", metavar="", help="Run versions A and B in turns, and hold B against A.")] = False,
    a: Annotated[Optional[list[str]], typer.Option("--a", metavar="OVERRIDE", help="An override of side A alone.")] = None,  # noqa: UP045
    b: Annotated[Optional[list[str]], typer.Option("--b", metavar="OVERRIDE", help="An override of side B alone.")] = None,  # noqa: UP045
    env_a: Annotated[Optional[Path], typer.Option("--env-a", metavar="PYTHON", help="Interpreter of side A.")] = None,  # noqa: UP045
    env_b: Annotated[Optional[Path], typer.Option("--env-b", metavar="PYTHON", help="Interpreter of side B.")] = None,  # noqa: UP045
    dir_a: Annotated[Optional[Path], typer.Option("--dir-a", metavar="FOLDER", help="Where side A starts: a git worktree.")] = None,  # noqa: UP045
    dir_b: Annotated[Optional[Path], typer.Option("--dir-b", metavar="FOLDER", help="Where side B starts.")] = None,  # noqa: UP045
    pairs: Annotated[Optional[int], typer.Option("--pairs", metavar="N", help="Pairs of processes with --ab.")] = None,  # noqa: UP045
    debug: Debug = False,
) -> None:
    """Hold a run to limits, for CI: against a stored baseline, or two versions in one session.

    Exit codes: 0 no limit missed; 1 crashed; 2 something to change; 3 a limit was missed.
    """
    with guard(debug=debug):
        from optforge.cli.gate import Request, gate_command

        request = Request(
            words=tuple(words or ()),
            baseline=baseline,
            limits=limits,
            limit=tuple(limit or ()),
            update=update,
            strict=strict,
            junit=junit,
            markdown=markdown,
            ab=ab,
            a=tuple(a or ()),
            b=tuple(b or ()),
            env_a=env_a,
            env_b=env_b,
            dir_a=dir_a,
            dir_b=dir_b,
            pairs=pairs,
        )
        raise typer.Exit(gate_command(request))


@app.command("export")
def export(
    *,
    run_folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run with save=true, or its artifact/.", show_default=False)
    ],
    format_: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="compressed_tensors, huggingface, torch_export, aot_inductor or onnx.")
    ],
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", metavar="FOLDER", help="Where to write; else export/FORMAT in the run's folder."),
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", metavar="", help="Allow code that the run names to be imported.")] = False,
    debug: Debug = False,
) -> None:
    """Write a saved model in the format of another engine, and check it there in a fresh process.

    Exit codes: 0 written and checked; 1 it computes something else there; 2 something to change.
    """
    with guard(debug=debug):
        from optforge.cli.export import Request, export_command

        raise typer.Exit(export_command(Request(run=run_folder, format=format_, out=out, trust=trust)))


@app.command("tune", context_settings=PASS_THROUGH)
def tune(
    *,
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            metavar="[OVERRIDES]...",
            help="model=, hardware=, workload= as for run; recipe=A,B to start from; limits.max_kl=0.05; tune.budget_s=900",
            autocompletion=complete_override,
            show_default=False,
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Find the fastest recipe for a model, a workload and this hardware, within limits, in a given time.

    Writes best.yaml, a recipe to run and to share. Exit codes: 0 found; 1 nothing could be measured; 2 something to change;
    3 no recipe meets the limits; 130 and 143 interrupted, the best so far kept.
    """
    with guard(debug=debug):
        from optforge.cli.tune import Request, tune_command

        raise typer.Exit(tune_command(Request(argv=tuple(overrides or ()), debug=debug, command=_typed())))


@app.command("tune-final", hidden=True)
def tune_final(folder: Annotated[Path, typer.Argument(metavar="FOLDER")], debug: Debug = False) -> None:
    """The process in which `tune` times its finalists together."""
    with guard(debug=debug):
        from optforge.cli.tune import final_command

        raise typer.Exit(final_command(folder))


@app.command("sensitivity", context_settings=PASS_THROUGH)
def sensitivity(
    *,
    overrides: Overrides = None,
    schemes: Annotated[Optional[str], typer.Option("--schemes", metavar="A,B", help="Schemes to look at.")] = None,  # noqa: UP045
    samples: Annotated[Optional[int], typer.Option("--samples", metavar="N", help="Samples to run.")] = None,  # noqa: UP045
    tokens: Annotated[Optional[int], typer.Option("--tokens", metavar="N", help="Tokens of each sample of text.")] = None,  # noqa: UP045
    check: Annotated[Optional[int], typer.Option("--check", metavar="N", help="Layers to measure alone, the worst.")] = None,  # noqa: UP045
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say which layers of a model bear being rounded, and which to leave out: a list to paste as ignore.

    Takes model=, data=, hardware= as run does, and recipe= for its limits and for the steps before quantization.
    Exit codes: 0 measured; 2 something to change.
    """
    with guard(debug=debug):
        from optforge.cli.sensitivity import Wanted, sensitivity_command

        request = replace(_request(overrides, None, set_=None, drop=None, add=None), debug=debug)
        wanted = Wanted(schemes=schemes, samples=samples, tokens=tokens, check=check, as_json=as_json)
        raise typer.Exit(sensitivity_command(request, wanted))


@app.command("show", context_settings=PASS_THROUGH)
def show(
    *,
    overrides: Overrides = None,
    config: Config = None,
    set_: Set = None,
    drop: Drop = None,
    add: Add = None,
    origins: Annotated[bool, typer.Option("--origins", metavar="", help="Say where each value came from.")] = False,
    debug: Debug = False,
) -> None:
    """Print the whole resolved run as YAML, for `optforge run --config`."""
    with guard(debug=debug):
        from optforge.cli.show import show_command

        show_command(_request(overrides, config, set_=set_, drop=drop, add=add), origins=origins)


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(metavar="NOUN", help=", ".join(NOUNS), autocompletion=complete_noun, show_default=False)] = "",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List what can be named in a run, each with one line."""
    with guard(debug=debug):
        from optforge.cli.listing import list_command

        list_command(what, as_json=as_json)


@app.command("doctor")
def doctor(as_json: AsJson = False, debug: Debug = False) -> None:
    """Say what this machine has, what is missing, what that costs, and what brings it."""
    with guard(debug=debug):
        from optforge.cli.doctor import doctor_command

        raise typer.Exit(doctor_command(as_json=as_json))


hardware = typer.Typer(help="Measure this machine.", no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})
app.add_typer(hardware, name="hardware")


@hardware.command("measure")
def measure(
    *,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", metavar="", help="Measure single operators too (minutes), for predictions on this machine.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Measure the peaks of this machine's device, and print them as a profile: optforge hardware measure > mine.yaml.

    hardware=./mine.yaml takes the file, here and elsewhere; hardware=auto takes what was measured here from the cache.
    """
    with guard(debug=debug):
        from optforge.cli.hardware import measure_command

        measure_command(calibrate=calibrate)


@hardware.callback()
def _hardware() -> None:
    """A callback keeps `measure` a sub-command."""


kernels = typer.Typer(help="The package's own kernels.", no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})
app.add_typer(kernels, name="kernels")

Names = Annotated[Optional[list[str]], typer.Argument(metavar="[OPERATOR]...", help="Some of them; else all.", show_default=False)]  # noqa: UP045
Rows = Annotated[int, typer.Option("--rows", metavar="N", min=1, max=16, help="Sequences at a time.")]
Tokens = Annotated[int, typer.Option("--context", metavar="N", min=1, help="Tokens in the cache.")]


@kernels.command("list")
def kernels_list(*, as_json: AsJson = False, debug: Debug = False) -> None:
    """List the operators with the dtypes and arches that they take."""
    with guard(debug=debug):
        from optforge.cli.kernels import list_command

        raise typer.Exit(list_command(as_json=as_json))


@kernels.command("check")
def kernels_check(*, names: Names = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Hold the kernels against float64, on the GPU at hand or under Triton's interpreter.

    Exit codes: 0 all right; 1 one is wrong; 2 something to change.
    """
    with guard(debug=debug):
        from optforge.cli.kernels import check_command

        raise typer.Exit(check_command(names or (), as_json=as_json))


@kernels.command("bench")
def kernels_bench(*, names: Names = None, rows: Rows = 1, context: Tokens = 8192, debug: Debug = False) -> None:
    """Time the kernels on Llama-3-8B's shapes, as a share of what the memory allows. Needs a GPU."""
    with guard(debug=debug):
        from optforge.cli.kernels import bench_command

        raise typer.Exit(bench_command(names or (), rows=rows, context=context))


@kernels.command("tune")
def kernels_tune(
    *,
    names: Names = None,
    rows: Rows = 1,
    context: Tokens = 8192,
    budget_s: Annotated[float, typer.Option("--budget-s", metavar="S", min=1, help="Seconds in all.")] = 300,
    debug: Debug = False,
) -> None:
    """Find the fastest configurations for this GPU, and keep them in the cache folder. Needs a GPU."""
    with guard(debug=debug):
        from optforge.cli.kernels import tune_command

        raise typer.Exit(tune_command(names or (), rows=rows, context=context, budget_s=budget_s))


@app.command("version")
def version() -> None:
    """Print the version."""
    from optforge import __version__

    typer.echo(__version__)


def _request(
    overrides: list[str] | None, config: Path | None, *, set_: list[str] | None, drop: list[str] | None, add: list[str] | None
) -> Request:
    """What commands that take a run's overrides were given."""
    from optforge.cli.run import Request

    return Request(
        argv=tuple(overrides or ()),
        config=config,
        set_=tuple(set_ or ()),
        drop=tuple(drop or ()),
        add=tuple(add or ()),
        command=_typed(),
    )


def _typed() -> str:
    """The command as it was typed, for the report."""
    return shlex.join(["optforge", *sys.argv[1:]])


def main() -> None:
    """The console script. What Typer refuses is told like every other mistake, not in a box of its own."""
    try:
        code = app(prog_name="optforge", standalone_mode=False)
    except typer.TyperException as error:
        command = getattr(getattr(error, "ctx", None), "command_path", "optforge")
        problem = Problem(where=command, what=error.format_message().rstrip("."), fix=f"see {command} --help")
        code = tell(ConfigError(problem), debug="--debug" in sys.argv)
    sys.exit(code)
