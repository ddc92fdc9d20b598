"""Decode and prefill beside the peers, every row of a case in the same alternating rounds of one process.

    python benchmarks/inference.py                                                    # SmolLM2 on this CPU
    python benchmarks/inference.py --device cuda --model llama3_8b --cases decode     # one H200
    python benchmarks/inference.py --device cuda --model llama3_8b --cases "long;batch;prefill" --rows "plain;optforge"

Peers: transformers eager; transformers with a static cache under `torch.compile` in each mode of the device; the same with torchao
(fp8 per row and int4; given up after `--limit-s`); Thunder where it is installed; and a plain decoder as gpt-fast writes one
(benchmarks/plain_decoder.py), since that is the best that PyTorch does by itself. Floors are the bytes that a step must read over
the bandwidth that this run measured first (for prefill, operations over the product rate). Contexts above 2,048 are filled with
noise instead of a prompt: times do not depend on what the cache holds.

`--fresh-cache` gives the compilers an empty cache, so that compile times are cold ones; run again without it for warm ones.
Writes benchmarks/results/<device>/<date>_inference_<model>.json and .md; cases and rows of the same day that are not run again are kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from plain_decoder import PlainDecoder
from torch import Tensor, nn

import optforge
from optforge import environment, registry
from optforge.backends.base import Candidate, CompileOptions
from optforge.compiling import compile_
from optforge.kernels import kv_cache
from optforge.measure import compiles, timing
from optforge.measure.machine import peaks
from optforge.measure.machine.point import Peaks
from optforge.measure.size import nbytes, weight_bytes
from optforge.share import alias
from optforge.spec import Measure
from optforge.workloads.decode import DecodeWork, _State
from optforge.workloads.prefill import PrefillWork

RESULTS = Path(__file__).parent / "results"
PROMPTED = 2048
"""Longest context that is a real prompt."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is run, and what issue 6 asks of each row: name -> (against, factor)."""

    name: str
    batch: int
    context: int
    new_tokens: int
    """0: the prompt alone."""
    rows: tuple[str, ...]
    goals: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Row -> what it is held against (`floor`, `peers`, or another row) and the factor to reach."""


PEERS = ("eager", "compile", "reduce-overhead", "torchao fp8", "torchao int4", "thunder", "plain")
CPU_CASES = (
    Case(
        name="decode",
        batch=1,
        context=128,
        new_tokens=32,
        rows=("eager", "compile", "plain", "optforge bf16", "optforge int8"),
        goals={"optforge bf16": ("compile", 1.3), "optforge int8": ("compile", 2.0)},
    ),
)
CUDA_CASES = (
    Case(
        name="decode",
        batch=1,
        context=512,
        new_tokens=64,
        rows=(*PEERS, "optforge bf16", "optforge fp8", "optforge int4"),
        goals={"optforge bf16": ("floor", 0.85), "optforge fp8": ("floor", 0.75), "optforge int4": ("floor", 0.60)},
    ),
    *(
        Case(
            name=f"long, batch {batch}",
            batch=batch,
            context=8192,
            new_tokens=32,
            rows=("reduce-overhead", "plain", "optforge bf16", "optforge fp8 + fp8 cache"),
            goals={"optforge bf16": ("floor", 0.75), "optforge fp8 + fp8 cache": ("floor", 0.75)},
        )
        for batch in (1, 8)
    ),
    Case(
        name="very long",
        batch=1,
        context=131_072,
        new_tokens=16,
        rows=("plain", "optforge fp8 + fp8 cache"),
        goals={"optforge fp8 + fp8 cache": ("floor", 0.70)},
    ),
    *(
        Case(
            name=f"batch {batch}",
            batch=batch,
            context=512,
            new_tokens=32,
            rows=("reduce-overhead", "plain", "optforge bf16", "optforge fp8"),
            goals={"optforge fp8": ("peers", 1.3)},
        )
        for batch in (8, 64)
    ),
    Case(
        name="prefill",
        batch=1,
        context=8192,
        new_tokens=0,
        rows=("eager", "compile", "optforge bf16", "optforge fp8 dynamic"),
        goals={"optforge bf16": ("floor", 0.75), "optforge fp8 dynamic": ("optforge bf16", 1.45)},
    ),
)
RECIPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "optforge bf16": ("llama_bf16", ()),
    "optforge int8": ("llama_int8", ()),
    "optforge fp8": ("llama_fp8", ("steps.weights.use=quantize/fp8_weight",)),
    "optforge fp8 + fp8 cache": ("llama_fp8", ("steps.weights.use=quantize/fp8_weight", "steps.cache={use: kv_cache/fp8}")),
    "optforge fp8 dynamic": ("llama_fp8", ()),
    "optforge int4": ("llama_int4", ("steps.weights.group_size=128",)),
}


class TimeOut(BaseException):  # no compiler takes it for an error of its own
    """A row took longer than its limit."""


@dataclass(kw_only=True)
class Row:
    """One way to run a case."""

    name: str
    call: Callable[[], Any] | None = None
    why_not: str | None = None
    compile_time_s: float | None = None
    weight_bytes: int | None = None
    cache_bytes: int | None = None
    floor_s: float | None = None
    """The least time of one call at the measured bandwidth or product rate."""
    peak_bytes: int | None = None
    """Peak of the allocator while the row was made and run the first time, less what was there before (CUDA)."""
    tokens: list[list[int]] | None = None
    samples_s: list[float] = field(default_factory=list)


class NoiseWork(DecodeWork):
    """Decodes over a cache that holds noise where a long prompt would be."""

    context: int = 0

    def ready(self, module: nn.Module) -> None:
        known = self._states.get(module)
        cache = known.cache if known is not None else kv_cache.new_cache(module, self.context + self.new_tokens)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            if known is None:
                module(input_ids=self.ids[:, :8], past_key_values=cache, use_cache=True, logits_to_keep=1)
        for tensor in kv_cache.tensors(cache):
            if tensor.is_floating_point():
                tensor.normal_()
            elif tensor.dtype is torch.uint8:
                tensor.random_(0, 0x70)  # finite in either 8-bit float
            else:
                tensor.random_(-127, 127)
        lengths = [layer.cumulative_length for layer in cache.layers]
        for length in lengths:
            length.fill_(self.context)
        starts = [length.clone() for length in lengths]
        self._states[module] = _State(cache=cache, lengths=lengths, starts=starts, first=self.ids[:, :1].clone(), widths=())

    def bytes(self, module: nn.Module) -> int | None:
        found = DecodeWork(ids=self.ids.new_empty(self.ids.shape[0], self.context), new_tokens=self.new_tokens)
        return found.bytes(module)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises `TimeOut` in the main thread after `seconds`."""

    def stop(*_: Any) -> None:
        raise TimeOut(f"given up after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Bench:
    """One model on one device, and what its rows are held against."""

    def __init__(self, options: argparse.Namespace, backend: Any) -> None:
        self.options, self.backend, self.device = options, backend, torch.device(options.device)
        loaded, self.data = source(options).load(), registry.get("data", "text" if options.model == "smollm2" else "tokens")()
        loaded.module = backend.place(loaded.module.eval())
        self.loaded, self.base = loaded, loaded.module
        say("peaks of this machine")
        self.peaks: Peaks = peaks.peaks(self.device, lambda _: None)

    def work(self, case: Case) -> DecodeWork | PrefillWork:
        shape = (case.batch, min(case.context, PROMPTED) if case.new_tokens else case.context)
        ids = self.data.tokens(self.loaded, shape[0] * shape[1], 0).reshape(shape).to(self.device)
        self.base.config.max_position_embeddings = max(self.base.config.max_position_embeddings, case.context + case.new_tokens + 1)
        if not case.new_tokens:
            return PrefillWork(ids=ids)
        if case.context <= PROMPTED:
            return DecodeWork(ids=ids, new_tokens=case.new_tokens)
        work = NoiseWork(ids=ids, new_tokens=case.new_tokens)
        work.context = case.context
        return work

    def made(self, case: Case, name: str) -> Row:
        """A row, run until it compiles no more; one that fails or takes too long says so and has no call."""
        row, work = Row(name=name), self.work(case)
        self.backend.free()
        before = torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            with limited(self.options.limit_s):
                self._fill(row, case, name, work)
        except TimeOut as error:
            row.call, row.why_not = None, str(error)
        except Exception as error:
            row.call, row.why_not = (
                None,
                f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}",
            )
        if self.device.type == "cuda":
            row.peak_bytes = torch.cuda.max_memory_allocated() - before
        torch.compiler.reset() if row.call is None else None
        return row

    def _fill(self, row: Row, case: Case, name: str, work: DecodeWork | PrefillWork) -> None:
        if name == "plain":
            plain = PlainDecoder(self.base, work.ids, case.new_tokens, case.context if case.context > PROMPTED else None)
            row.call = plain.run
            row.cache_bytes = sum(nbytes(layer[key]) for layer in plain.layers for key in ("keys", "values"))
            row.weight_bytes = weight_bytes(self.base)
            self._floor(row, case, self.base, work)
        else:
            module = self.module(case, name)
            row.call = lambda: work.run(module)
            work.ready(module)
            row.cache_bytes = sum(map(nbytes, work.kept(module)))
            row.weight_bytes = weight_bytes(module)
            self._floor(row, case, module, work)
        seen = compiles.first_calls(row.call, self.backend.synchronize)
        row.compile_time_s = seen.seconds
        found = row.call()
        if case.new_tokens and isinstance(found, Tensor):
            row.tokens = found.tolist()

    def _floor(self, row: Row, case: Case, module: nn.Module, work: DecodeWork | PrefillWork) -> None:
        if case.new_tokens:
            moved = work.bytes(module)
            row.floor_s = None if moved is None or self.peaks.bandwidth_bytes_per_s is None else moved / self.peaks.bandwidth_bytes_per_s
        else:
            operations, rate = work.flops(self.base), self.peaks.flops.get("fp8" if "fp8" in row.name else "bf16")
            row.floor_s = None if operations is None or rate is None else operations / rate

    def module(self, case: Case, name: str) -> nn.Module:
        """The model of a row, over the base's own weights, compiled as the row says."""
        module: nn.Module = alias(self.base)
        if name in RECIPES:
            recipe, overrides = RECIPES[name]
            workload = ["workload=decode", f"workload.context={min(case.context, PROMPTED)}", f"workload.batch_size={case.batch}"]
            if not case.new_tokens:
                workload = ["workload=prefill", f"workload.prompt_tokens={case.context}", f"workload.batch_size={case.batch}"]
            hardware = "cpu" if self.device.type == "cpu" else self.options.hardware
            optforge.apply(module, recipe, hardware=hardware, overrides=[*workload, *overrides])
            return module
        if name.startswith("torchao"):
            torchao_(module, name)
        if name == "thunder":
            return thunder(module)
        if name != "eager":
            mode = "default" if name == "compile" else "reduce-overhead"
            compile_(module, CompileOptions(mode=mode))
        return module


def torchao_(module: nn.Module, name: str) -> None:
    """torchao's own weights and activations, head left alone as in the other rows."""
    from torchao import quantization as ao

    if "fp8" in name:
        config: Any = ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow())
    else:
        config = ao.Int4WeightOnlyConfig(group_size=128)
    ao.quantize_(module, config, filter_fn=lambda one, path: isinstance(one, nn.Linear) and "lm_head" not in path)


def thunder(module: nn.Module) -> nn.Module:
    import thunder as lightning_thunder  # not installed everywhere, and then the row says so

    return lightning_thunder.compile(module, recipe="hf-transformers")  # type: ignore[no-any-return]


def source(options: argparse.Namespace) -> Any:
    if options.model == "smollm2":
        return registry.get("models", "smollm2")(dtype="bf16")
    kind = registry.get("models", "llama")
    sizes = {member.value: member for member in type(kind().size)}
    return kind(size=sizes[options.model], layers=options.layers)


def timed(rows: list[Row], seconds: float, synchronize: Callable[[], None]) -> bool:
    """Fills each row's samples from the same rounds."""
    running = [row for row in rows if row.call is not None]
    candidates = [Candidate(name=row.name, call=row.call) for row in running if row.call is not None]
    if not candidates:
        return False
    found, steady = timing.time_together(
        candidates, synchronize=synchronize, options=Measure(warmup=2, min_rounds=8, max_s=seconds, steady=0.005)
    )
    for row, samples in zip(running, found, strict=True):
        row.samples_s = samples
    return steady


def described(case: Case, rows: list[Row]) -> list[dict[str, Any]]:
    """Each row as plain data, with its share of the floor, its goal, and how many tokens are those of the first row."""
    peers = [row for row in rows if not row.name.startswith("optforge") and row.samples_s]
    best = min(peers, key=lambda row: timing.summary(row.samples_s)["p50"] or 0.0, default=None)
    first = next((row.tokens for row in rows if row.tokens is not None), None)
    found = []
    for row in rows:
        facts = {key: value for key, value in asdict(row).items() if key not in ("call", "tokens")} if row.call is None else _plain(row)
        facts["batch"], facts["context"], facts["new_tokens"] = case.batch, case.context, case.new_tokens
        if row.samples_s:
            latency = timing.summary(row.samples_s)
            seconds = (latency["p50"] or 0.0) / 1e3
            facts["latency_ms"] = latency
            facts["tokens_per_s"] = case.batch * (case.new_tokens or case.context) / seconds
            facts["of_floor"] = row.floor_s / seconds if row.floor_s else None
            facts["against"] = {other.name: asdict(timing.ratio(row.samples_s, other.samples_s)) for other in rows if other.samples_s}
            if best is not None:
                facts["best_peer"] = best.name
            facts["goal"] = _goal(case, row, facts, best)
        if row.tokens is not None and first is not None:
            pairs = [(a, b) for ours, theirs in zip(row.tokens, first, strict=True) for a, b in zip(ours, theirs, strict=True)]
            facts["same_tokens"] = [sum(a == b for a, b in pairs), len(pairs)]
        found.append(facts)
    return found


def _plain(row: Row) -> dict[str, Any]:
    return {key: getattr(row, key) for key in row.__dataclass_fields__ if key not in ("call", "tokens")}


def _goal(case: Case, row: Row, facts: dict[str, Any], best: Row | None) -> dict[str, Any] | None:
    if row.name not in case.goals:
        return None
    against, factor = case.goals[row.name]
    if against == "floor":
        value = facts["of_floor"]
    else:
        other = best.name if against == "peers" and best is not None else against
        value = facts["against"].get(other, {}).get("value")
    return {"against": against, "asked": factor, "found": value, "met": None if value is None else value >= factor}


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        f"# {result['model']} beside its peers, {result['device']}, {result['date']}",
        "",
        f"    {result['command']}",
        "",
        f"Measured in this run: {result['bandwidth'] / 1e9:,.1f} GB/s ({result['how']}); products "
        + ", ".join(f"{dtype} {rate / 1e12:,.2f} TFLOP/s" for dtype, rate in result["flops"].items())
        + f". Load average before timing {result['load_average']:.1f}.",
    ]
    for name, case in result["cases"].items():
        lines += ["", f"## {name}: batch {case['batch']}, context {case['context']:,}, {case['new_tokens']} new tokens", ""]
        lines += [
            "| row | tokens/s | ms p50 / p90 (n) | of the floor | goal | tokens as the first row | compile s | weights + cache, peak MB |"
        ]
        lines += ["|---|---|---|---|---|---|---|---|"]
        lines += [_line(row) for row in case["rows"]]
        lines += ["", f"One process, alternating rounds{'' if case['steady'] else ' (stopped at the time limit, not steady)'}."]
    return "\n".join([*lines, "", json.dumps(result["environment"]["versions"]), ""])


def _line(row: dict[str, Any]) -> str:
    memory = f"{(row['weight_bytes'] or 0) / 1e6:,.0f} + {(row['cache_bytes'] or 0) / 1e6:,.0f}"
    memory += f", {row['peak_bytes'] / 1e6:,.0f}" if row.get("peak_bytes") else ""
    compiled = "-" if row["compile_time_s"] is None else f"{row['compile_time_s']:.0f}"
    if row.get("why_not") or "latency_ms" not in row:
        return f"| {row['name']} | - | {row.get('why_not') or 'not timed'} | | | | {compiled} | |"
    latency, goal = row["latency_ms"], row.get("goal")
    share = "-" if row["of_floor"] is None else f"{row['of_floor']:.2f}"
    asked = ""
    if goal is not None:
        value = "-" if goal["found"] is None else f"{goal['found']:.2f}"
        asked = f"{value} of {goal['against']}, asked {goal['asked']}: {'met' if goal['met'] else 'missed'}"
    same = "/".join(map(str, row["same_tokens"])) if "same_tokens" in row else ""
    rate, times = f"{row['tokens_per_s']:,.1f}", f"{latency['p50']:.1f} / {latency['p90']:.1f} ({latency['n']})"
    return f"| {row['name']} | {rate} | {times} | {share} | {asked} | {same} | {compiled} | {memory} |"


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", file=sys.stderr, flush=True)


def write(result: dict[str, Any], folder: Path) -> Path:
    """Writes both files, rows of the same day that were not run again kept, and returns the Markdown one's path."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{result['date']}_inference_{result['model']}"
    data = stem.with_name(stem.name + ".json")
    if data.exists():
        earlier = json.loads(data.read_text())["cases"]
        for name, case in earlier.items():
            fresh = {row["name"] for row in result["cases"].get(name, {"rows": []})["rows"]}
            kept = [row for row in case["rows"] if row["name"] not in fresh]
            result["cases"].setdefault(name, {**case, "rows": []})["rows"][:0] = kept
    data.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    path = stem.with_name(stem.name + ".md")
    path.write_text(table(result))
    return path


def wanted(text: str | None, names: list[str]) -> list[str]:
    """The names that hold one of the parts of `text`, which are divided by ';'; all without a text."""
    if not text:
        return names
    parts = [part.strip() for part in text.split(";")]
    return [name for name in names if any(part in name for part in parts)]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that one run measures, as plain data."""
    from optforge.backends.cpu import CpuBackend
    from optforge.backends.nvidia import NvidiaBackend

    backend = CpuBackend() if options.device == "cpu" else NvidiaBackend()
    cases = CPU_CASES if options.device == "cpu" else CUDA_CASES
    with backend.session(0):
        bench = Bench(options, backend)
        load_average = os.getloadavg()[0]
        results: dict[str, Any] = {}
        for name in wanted(options.cases, [case.name for case in cases]):
            case = next(one for one in cases if one.name == name)
            rows = []
            for row_name in wanted(options.rows, list(case.rows)):
                say(f"{name}: {row_name}")
                rows.append(bench.made(case, row_name))
            say(f"{name}: timing, at most {options.seconds:g} s")
            steady = timed(rows, options.seconds, backend.synchronize)
            sizes = {"batch": case.batch, "context": case.context, "new_tokens": case.new_tokens}
            results[name] = {**sizes, "steady": steady, "rows": described(case, rows)}
            del rows
            gc.collect()
            torch.compiler.reset()
            backend.free()
        facts = environment.collect(backend)
    return {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "benchmarks/inference.py", *sys.argv[1:]]),
        "model": options.model if options.layers is None else f"{options.model}_{options.layers}_layers",
        "device": facts["device"].get("cpu") or facts["device"].get("device"),
        "load_average": load_average,
        "bandwidth": bench.peaks.bandwidth_bytes_per_s,
        "how": bench.peaks.how["bandwidth_bytes_per_s"],
        "flops": bench.peaks.flops,
        "cases": results,
        "environment": facts,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", default="smollm2", help="smollm2, llama3_1b or llama3_8b")
    parser.add_argument("--layers", type=int, help="keep only the first layers of a random model")
    parser.add_argument("--hardware", default="auto", help="OptForge's profile of the device, on CUDA")
    parser.add_argument("--cases", help="names of cases, or parts of them, divided by ';'")
    parser.add_argument("--rows", help="names of rows, or parts of them, divided by ';'")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of a case's timed part")
    parser.add_argument("--limit-s", type=float, default=180.0, help="time limit of a row until it is compiled and has run")
    parser.add_argument("--fresh-cache", action="store_true", help="empty compiler caches: compile times are cold ones")
    parser.add_argument("--folder", type=Path, help="where the results go; benchmarks/results/<cpu or the device's name>")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.fresh_cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor")
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="triton")
    result = run(options)
    name = "cpu" if options.device == "cpu" else str(result["device"]).lower().replace("nvidia", "").strip().split()[0]
    print(write(result, options.folder or RESULTS / name).read_text())


if __name__ == "__main__":
    main()
