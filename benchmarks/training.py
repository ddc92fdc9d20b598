"""A training step beside the peers: one process a row, rows in turns, so that no training is in another's memory.

    OMP_NUM_THREADS=1 python benchmarks/training.py --model tiny                        # a small shape on this CPU
    python benchmarks/training.py --device cuda --model llama3_1b --batch 4 --sequence 4096       # one H200
    python benchmarks/training.py --device cuda --model llama3_8b --batch 1 --sequence 8192 --curve 200 --rows "optforge_8b;optforge_8b_fp8"

Peers: transformers eager and compiled, in bf16 and with fp32 weights under autocast (whole and block by block); Liger's kernels
under torch.compile; Thunder; torchao's fp8 training. What is not installed is a row that says so. OptForge's rows are its recipes.

Every row trains the same shape from the same random weights on the same real text (bytes of the corpus as tokens, so that any
vocabulary will do) with AdamW. Rows run `--rounds` times, forwards and backwards; a figure is the median over all steps of all rounds,
with the lowest and highest round beside it. MFU is 6 operations a weight and token plus attention in full over the bf16 peak.
`--curve N` also compares losses: N steps of every row beside a plain loop with fp32 master weights.

Writes benchmarks/results/<device>/<date>_training_<model>.json and .md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

RESULTS = Path(__file__).parent / "results"
PEAK_BF16 = {"h200": 989e12, "h100": 989e12, "a100": 312e12}
"""Published dense peaks, as conf/hardware has them."""
MARK = "RESULT "

Step = Callable[[Tensor], Tensor]
"""One update on token ids [batch, sequence]; the loss."""


# --- what is trained -------------------------------------------------------------------------------------------------


def model_of(name: str, dtype: torch.dtype, device: str) -> nn.Module:
    """The shape with random weights, the same for every row."""
    torch.manual_seed(0)
    if name == "tiny":
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=4096, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4
        )
        module: nn.Module = LlamaForCausalLM(config)
    else:
        from optforge.models.llama import Llama, Size

        module = Llama(size=Size[name], dtype="fp32").load(0).module
    return module.to(device=device, dtype=dtype).train()


def text(count: int) -> Tensor:
    """Bytes of the corpus, int64 [count]; repeated where it is shorter."""
    from optforge.data.text import Text

    data = b""
    for document in Text().documents():
        data += document.encode()
        if len(data) >= count:
            break
    found = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    return found.repeat(-(-count // len(found)))[:count]


def work(model: nn.Module, batch: int, sequence: int) -> float:
    """Operations of one step: 6 for each weight that multiplies and token, and attention in full (4 * layers * width * T^2, times 3)."""
    config: Any = model.config
    weights = sum(p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name)
    attention = 12 * config.num_hidden_layers * config.hidden_size * sequence
    return float(batch * sequence) * (6 * weights + attention)


# --- rows ------------------------------------------------------------------------------------------------------------


def plain(model: nn.Module, context: Callable[[], Any] = nullcontext) -> Step:
    """A loop as a user writes it."""
    fused = next(model.parameters()).device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)

    def step(ids: Tensor) -> Tensor:
        with context():
            loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def peer(args: argparse.Namespace, *, dtype: torch.dtype = torch.bfloat16, compiled: str = "", autocast: bool = False) -> tuple[Any, Step]:
    """transformers as it is; `compiled` is `model` or `block`."""
    model = model_of(args.model, dtype, args.device)
    if compiled == "model":
        model.compile()
    elif compiled == "block":
        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.compile()
    context = (lambda: torch.autocast(args.device, dtype=torch.bfloat16)) if autocast else nullcontext
    return model, plain(model, context)


def liger(args: argparse.Namespace) -> tuple[Any, Step]:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama()
    return peer(args, compiled="model")


def thunder(args: argparse.Namespace) -> tuple[Any, Step]:
    from thunder.dynamo import thunderfx

    model = model_of(args.model, torch.bfloat16, args.device)
    step = plain(model)
    model.forward = thunderfx(model.forward)  # type: ignore[method-assign]
    return model, step


def torchao_fp8(args: argparse.Namespace) -> tuple[Any, Step]:
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.config import Float8LinearConfig

    model = model_of(args.model, torch.bfloat16, args.device)
    config = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: "lm_head" not in name)
    model.compile()
    return model, plain(model)


def optforge(args: argparse.Namespace, recipe: str, *overrides: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Step]:
    """A recipe as `optforge run workload=train` would apply it, in the trainer that it runs."""
    from optforge import api
    from optforge.training.loss import own
    from optforge.training.optimizers import Rates
    from optforge.training.stream import Batch, Stream
    from optforge.training.trainer import Options, Trainer

    model = model_of(args.model, dtype, args.device)
    chosen = ["workload=train", f"workload.sequence={args.sequence}", f"workload.batch_size={args.batch}", *overrides]
    api.apply(model, recipe, overrides=chosen)
    given: list[Tensor] = []
    stream = Stream(1, lambda _: Batch(kwargs={"input_ids": given[0], "labels": given[0], "use_cache": False}), batch_size=1)
    trainer = Trainer(model, own, stream, Options(clip=1.0, rates=Rates(learning_rate=1e-4)))

    def step(ids: Tensor) -> Tensor:
        given[:] = [ids]
        return trainer.step()

    return model, step


FULL = "steps.memory={use: checkpointing/selective}"
LEAN = "steps.memory={use: checkpointing/full, share: 0.25}"
"""The plan's answer to 30 GB on the 1B shape: a quarter of the layers compute again (29.8 GB and 69,600 tok/s predicted)."""
ROWS: dict[str, Callable[[argparse.Namespace], tuple[Any, Step]]] = {
    "eager_bf16": peer,
    "compiled_bf16": lambda args: peer(args, compiled="model"),
    "eager_autocast": lambda args: peer(args, dtype=torch.float32, autocast=True),
    "compiled_autocast": lambda args: peer(args, dtype=torch.float32, autocast=True, compiled="model"),
    "blocks_autocast": lambda args: peer(args, dtype=torch.float32, autocast=True, compiled="block"),
    "liger_compiled": liger,
    "thunder": thunder,
    "torchao_fp8": torchao_fp8,
    "optforge_masters": lambda args: optforge(args, "llama_bf16_train"),
    "optforge_masters_lean": lambda args: optforge(args, "llama_bf16_train", LEAN),
    "optforge_fp8": lambda args: optforge(args, "llama_fp8_train"),
    "optforge_stochastic": lambda args: optforge(args, "llama_bf16_train", "steps.precision.use=precision/bf16_stochastic"),
    "optforge_8b": lambda args: optforge(args, "llama_bf16_train", "steps.optimizer.use=optimizer/adamw_8bit", FULL, dtype=torch.bfloat16),
    "optforge_8b_fp8": lambda args: optforge(
        args, "llama_fp8_train", "steps.optimizer.use=optimizer/adamw_8bit", FULL, dtype=torch.bfloat16
    ),
}
MASTERS = ("compiled_autocast", "blocks_autocast", "eager_autocast")
"""Peers with fp32 weights, which the issue's figure is about."""
REFERENCE = "eager_autocast"


# --- one row, in a process of its own --------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each timed step, losses of all steps, peak bytes."""
    cuda = args.device == "cuda"
    model, step = ROWS[args.row](args)
    steps = max(args.warmup + args.steps, args.curve)
    ids = text(steps * args.batch * args.sequence).reshape(steps, args.batch, args.sequence).to(args.device)
    flops, losses, seconds = work(model, args.batch, args.sequence), [], []
    begin = time.perf_counter()
    first = 0.0
    for index in range(steps):
        if cuda:
            torch.cuda.synchronize()
            if index == args.warmup:
                torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        losses.append(step(ids[index]))
        if cuda:
            torch.cuda.synchronize()
        if index == args.warmup - 1:
            first = time.perf_counter() - begin
        if args.warmup <= index < args.warmup + args.steps:
            seconds.append(time.perf_counter() - start)
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    return {
        "seconds": seconds,
        "losses": torch.stack(losses).float().tolist(),
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "warm_s": first,
        "flops": flops,
        "weights": dtypes,
    }


def child(args: argparse.Namespace, row: str) -> dict[str, Any]:
    """The result of a row, or why there is none."""
    command = [sys.executable, __file__, "--row", row]
    for name in ("model", "device", "batch", "sequence", "steps", "warmup", "curve"):
        command += [f"--{name}", str(getattr(args, name))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {args.limit_s} s"}
    line = next((line for line in reversed(done.stdout.splitlines()) if line.startswith(MARK)), None)
    if line is None:
        last = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": last[-1][:300] if last else f"exit code {done.returncode}"}
    found: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return found


# --- all rows --------------------------------------------------------------------------------------------------------


def summary(runs: list[dict[str, Any]], args: argparse.Namespace, peak: float | None) -> dict[str, Any]:
    good = [run for run in runs if "error" not in run]
    if not good:
        return {"error": runs[-1]["error"]}
    rounds = [median(run["seconds"]) for run in good]
    step = median([second for run in good for second in run["seconds"]])
    tokens = args.batch * args.sequence
    return {
        "tokens_per_s": tokens / step,
        "step_ms": 1e3 * step,
        "rounds_ms": [1e3 * min(rounds), 1e3 * max(rounds)],
        "mfu": good[0]["flops"] / step / peak if peak else None,
        "peak_bytes": max(run["peak_bytes"] or 0 for run in good) or None,
        "warm_s": good[0]["warm_s"],
        "weights": good[0]["weights"],
        "losses": good[0]["losses"],
    }


def render(found: dict[str, dict[str, Any]], head: str) -> str:
    lines = [
        head,
        "",
        "| row | tok/s | step, ms (rounds) | MFU | peak | warm after | weights | loss |",
        "|---|---:|---:|---:|---:|---:|---|---:|",
    ]
    for name, row in found.items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} | | | | | | |")
            continue
        low, high = row["rounds_ms"]
        mfu = f"{row['mfu']:.1%}" if row["mfu"] else "n/a"
        peak = f"{row['peak_bytes'] / 1e9:.1f} GB" if row["peak_bytes"] else "n/a"
        last = row["losses"][-10:]
        cells = (
            name,
            f"{row['tokens_per_s']:,.0f}",
            f"{row['step_ms']:,.1f} ({low:,.1f} to {high:,.1f})",
            mfu,
            peak,
            f"{row['warm_s']:.0f} s",
            " ".join(row["weights"]),
            f"{sum(last) / len(last):.4f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def limits(found: dict[str, dict[str, Any]], model: str) -> list[str]:
    """What issue 7 asks of one H200, and whether it was reached."""
    said = []
    for name in ("optforge_masters", "optforge_masters_lean") if model == "llama3_1b" else ():
        own = found.get(name, {})
        if "tokens_per_s" not in own:
            continue
        peers = [row["tokens_per_s"] for key, row in found.items() if not key.startswith("optforge") and "tokens_per_s" in row]
        best, rate = max(peers, default=0.0), own["tokens_per_s"]
        said.append(f"{name}: at least 66,000 tok/s with fp32 masters: {rate:,.0f}, {_reached(rate >= 66_000)}")
        said.append(f"{name}: no slower than the best peer ({best:,.0f}): {_reached(rate >= best)}")
        said.append(f"{name}: peak at most 30 GB: {own['peak_bytes'] / 1e9:.1f}, {_reached(own['peak_bytes'] <= 30e9)}")
    if model == "llama3_8b":
        for name in ("optforge_8b", "optforge_8b_fp8"):
            if "tokens_per_s" in found.get(name, {}):
                row = found[name]
                said.append(f"{name}: at least 11,500 tok/s: {row['tokens_per_s']:,.0f}, {_reached(row['tokens_per_s'] >= 11_500)}")
                said.append(f"{name}: under 130 GB: {row['peak_bytes'] / 1e9:.1f}, {_reached(row['peak_bytes'] < 130e9)}")
        both = [found.get(name, {}).get("tokens_per_s") for name in ("optforge_8b_fp8", "optforge_8b")]
        if all(both):
            said.append(f"fp8 at least 1.10 times bf16: {both[0] / both[1]:.2f}, {_reached(both[0] >= 1.10 * both[1])}")
    return said


def _reached(yes: bool) -> str:
    return "reached" if yes else "missed"


def curves(found: dict[str, dict[str, Any]], steps: int) -> list[str]:
    """Mean loss of the last tenth of the steps, beside a plain loop with fp32 weights."""
    reference = found.get(REFERENCE, {}).get("losses")
    if not steps or not reference:
        return []
    tail = max(1, steps // 10)
    base = sum(reference[-tail:]) / tail
    return [
        f"{name}: loss over the last {tail} of {steps} steps {sum(row['losses'][-tail:]) / tail:.4f}, {REFERENCE} {base:.4f}"
        for name, row in found.items()
        if "losses" in row and name != REFERENCE
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny, llama3_1b or llama3_8b")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a round")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--curve", type=int, default=0, help="steps whose losses are compared")
    parser.add_argument("--rows", default=";".join(ROWS))
    parser.add_argument("--limit-s", type=float, default=900.0, help="seconds after which a row is given up")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(MARK + json.dumps(measure(args)), flush=True)
        return
    name = torch.cuda.get_device_name(0) if args.device == "cuda" else "cpu"
    peak = next((value for key, value in PEAK_BF16.items() if key in name.lower()), None)
    rows = args.rows.split(";")
    runs: dict[str, list[dict[str, Any]]] = {row: [] for row in rows}
    for turn in range(args.rounds):
        for row in rows if turn % 2 == 0 else reversed(rows):
            if turn and any("error" in run for run in runs[row]):
                continue
            runs[row].append(child(args, row))
            print(f"round {turn + 1}, {row}: {runs[row][-1].get('error') or median(runs[row][-1]['seconds'])}", flush=True)
    found = {row: summary(runs[row], args, peak) for row in rows}
    command = "python benchmarks/training.py " + " ".join(sys.argv[1:])
    title = f"# Training {args.model}, batch {args.batch}, sequence {args.sequence}, on {name}"
    head = f"{title}\n\n{date.today()}, torch {torch.__version__}, `{command}`"
    said = [*limits(found, args.model), *curves(found, args.curve)]
    page = render(found, head) + "".join(f"\n- {line}" for line in said) + "\n"
    print(page)
    folder = RESULTS / ("cpu" if args.device == "cpu" else "h200" if "h200" in name.lower() else name.lower().replace(" ", "_"))
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{date.today()}_training_{args.model}"
    stem.with_suffix(".md").write_text(page)
    kept = {"command": command, "device": name, "torch": torch.__version__, "rows": found}
    stem.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
