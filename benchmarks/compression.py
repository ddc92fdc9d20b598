"""Perplexity of SmolLM2 after quantization by each algorithm, beside llm-compressor on the same weights, samples and text.

Wikipedia text in windows of 512 tokens without overlap; the calibration samples are other text, behind it. The model's channels are
permuted (see models/smollm2.py), since its 4-bit source would otherwise flatter int4; it is a rounded model before anything is done.

    python benchmarks/compression.py                               # every row, 16,384 tokens, 32 samples
    python benchmarks/compression.py --rows gptq,peer_gptq --tokens 2048 --samples 8

llm-compressor comes from PyPI into an environment of its own (~/.cache/optforge/peers), which borrows this one's PyTorch and transformers;
where it cannot be installed its rows say so. Writes benchmarks/results/cpu/<date>_compression.json and .md; rows that it ran before under
the same settings are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from pruning import applied, perplexity

from optforge import config, environment
from optforge.backends.cpu import CpuBackend
from optforge.cache import cache_dir
from optforge.calibrate.samples import Samples
from optforge.models.base import Loaded
from optforge.share import alias
from optforge.spec import Quality

RESULTS = Path(__file__).parent / "results" / "cpu"
PEER = "llmcompressor==0.14.0.1"
PEER_NEEDS = ("compressed-tensors==0.19.0", "accelerate", "datasets", "auto-round<=0.15.1", "nvidia-ml-py")
INT4 = {"use": "quantize/int4_weight", "ignore": ["lm_head"]}
INT8 = {"use": "quantize/int8_weight", "ignore": ["lm_head"]}
ROTATED = {"use": "rotate/hadamard"}
ROWS: dict[str, list[dict[str, Any]]] = {
    "as loaded": [],
    "int8": [INT8],
    "rtn": [INT4],
    "gptq": [INT4 | {"algorithm": "gptq"}],
    "awq": [INT4 | {"algorithm": "awq"}],
    "hqq": [INT4 | {"algorithm": "hqq"}],
    "rotated": [ROTATED],
    "rotated_rtn": [ROTATED, INT4],
    "rotated_gptq": [ROTATED, INT4 | {"algorithm": "gptq"}],
    "int8_dynamic": [INT8 | {"use": "quantize/int8_dynamic"}],
    "int8_dynamic_smooth": [INT8 | {"use": "quantize/int8_dynamic", "smooth": 0.5}],
}
PEERS = {"peer_rtn": "rtn", "peer_gptq": "gptq", "peer_awq": "awq"}
AIMS = {"gptq": 27.5, "awq": 28.5}
"""Largest perplexity that the project aims at; int8 is to lie within 0.5% of the model as loaded."""


@dataclass(kw_only=True)
class Row:
    """One model: what was done to it, and what it then is."""

    name: str
    steps: list[dict[str, Any]]
    perplexity: float | None
    seconds: float
    notes: list[str] = field(default_factory=list)


def run(loaded: Loaded, name: str, ids: torch.Tensor, samples: Samples, options: argparse.Namespace) -> Row:
    start = time.perf_counter()
    module = alias(loaded.module)
    steps = [{**own, **({"samples": options.samples} if needs_data(own) else {})} for own in ROWS[name]]
    receipts = applied(module, loaded.module, steps, samples, options.samples)
    seconds = time.perf_counter() - start
    return Row(
        name=name,
        steps=steps,
        perplexity=perplexity(module, ids),
        seconds=seconds,
        notes=[note for receipt in receipts for note in receipt.notes],
    )


def needs_data(fields: dict[str, Any]) -> bool:
    return fields.get("algorithm") in ("gptq", "awq") or "smooth" in fields


def peer(loaded: Loaded, name: str, ids: torch.Tensor, samples: Samples, options: argparse.Namespace) -> Row:
    """The same by llm-compressor in its own environment, or why there is no figure."""
    python = environment_of_peer()
    if isinstance(python, str):
        return Row(name=name, steps=[], perplexity=None, seconds=0, notes=[python])
    folder = cache_dir() / "peers" / "input"
    loaded.module.save_pretrained(folder)  # type: ignore[operator]  # a transformers model
    loaded.tokenizer.save_pretrained(folder)
    taken = samples.take(options.samples, tokens=512, step="peer")
    calibration = torch.cat([kwargs["input_ids"] for _, kwargs in taken.examples])
    torch.save({"calibration": calibration, "evaluated": ids}, folder / "tokens.pt")
    script = Path(__file__).with_name("compression_peer.py")
    done = subprocess.run([str(python), str(script), str(folder), PEERS[name]], capture_output=True, text=True, check=False)
    if done.returncode:
        return Row(name=name, steps=[], perplexity=None, seconds=0, notes=[f"{PEER} failed: {done.stderr.strip().splitlines()[-1]}"])
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return Row(name=name, steps=[{"by": PEER, **found["recipe"]}], perplexity=found["perplexity"], seconds=found["seconds"])


def environment_of_peer() -> Path | str:
    """The Python that has llm-compressor, made on the first call; or why there is none."""
    home = cache_dir() / "peers" / PEER.replace("==", "-")
    python = home / "bin" / "python"
    if (home / "ready").exists():
        return python
    try:
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True, capture_output=True, text=True)
        places = subprocess.run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True, capture_output=True, text=True
        )
        borrowed = str(Path(torch.__file__).parents[1])
        Path(places.stdout.strip(), "zz_borrowed.pth").write_text(borrowed + "\n")
        pip = [str(python), "-m", "pip", "install", "-q"]
        subprocess.run([*pip, "--no-deps", PEER, PEER_NEEDS[0]], check=True, capture_output=True, text=True)
        subprocess.run([*pip, *PEER_NEEDS[1:]], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        last = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        return f"{PEER} could not be installed: {last}"
    (home / "ready").touch()
    return python


def main() -> None:
    names = [*ROWS, *PEERS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--tokens", type=int, default=16_384, help="evaluated, in windows of 512")
    parser.add_argument("--samples", type=int, default=32, help="of 512 tokens, for what is calibrated")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date.today().isoformat()}_compression")
    options = parser.parse_args()
    wanted = options.rows.split(",")
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"no row {unknown[0]!r}; there are {', '.join(names)}")
    composed = config.compose(config.parse(["recipe=baseline", "hardware=cpu"], cwd=Path.cwd()), cwd=Path.cwd())
    loaded = composed.model.source.load(0)
    ids = composed.data.source.tokens(loaded, options.tokens, 0)
    samples = Samples(loaded=loaded, data=composed.data.source, data_name="wikipedia", quality=Quality(tokens=options.tokens))
    rows = kept(options)
    for name in wanted:
        if name not in rows:
            rows[name] = peer(loaded, name, ids, samples, options) if name in PEERS else run(loaded, name, ids, samples, options)
        print(line(rows[name]), flush=True)
        write([rows[each] for each in names if each in rows], options)


def kept(options: argparse.Namespace) -> dict[str, Row]:
    """Rows of an earlier call under the same settings."""
    path = options.out.with_suffix(".json")
    if not path.is_file():
        return {}
    stored = json.loads(path.read_text())
    if stored["tokens"] != options.tokens or stored["samples"] != options.samples:
        return {}
    return {row["name"]: Row(**row) for row in stored["rows"] if row["perplexity"] is not None}


def line(row: Row) -> str:
    figure = "n/a" if row.perplexity is None or not math.isfinite(row.perplexity) else f"{row.perplexity:.2f}"
    aim = f" (aim: at most {AIMS[row.name]})" if row.name in AIMS else ""
    return f"| {row.name} | {figure}{aim} | {row.seconds:.0f} |" + (f" {row.notes[0]} |" if row.perplexity is None else "  |")


def write(rows: list[Row], options: argparse.Namespace) -> None:
    options.out.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "benchmarks/compression.py", *sys.argv[1:]])
    facts = {
        "command": command,
        "tokens": options.tokens,
        "samples": options.samples,
        "peer": PEER,
        "environment": environment.collect(CpuBackend()),
        "rows": [asdict(row) for row in rows],
    }
    options.out.with_suffix(".json").write_text(json.dumps(facts, indent=1, default=str) + "\n")
    head = [
        f"# Quantization of SmolLM2, {date.today().isoformat()}",
        "",
        f"`{command}`; perplexity on {options.tokens:,} tokens of Wikipedia in windows of 512, calibrated on {options.samples}",
        "samples of 512 tokens behind them; int4 rows: groups of 64, zero points, the head left as it is. Peer:",
        f"{PEER}. Seconds: of the steps alone, one core that others used too.",
        "",
        "| row | perplexity | seconds | |",
        "|---|---|---|---|",
    ]
    options.out.with_suffix(".md").write_text("\n".join([*head, *map(line, rows)]) + "\n")


if __name__ == "__main__":
    main()
