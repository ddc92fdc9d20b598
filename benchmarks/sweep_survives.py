"""A sweep of twelve jobs of which four fail in four ways, killed in the middle and resumed; and what a job costs more than alone.

    python benchmarks/sweep_survives.py [--folder FOLDER] [--timeout-s 60]

The model is a decoder of two layers with random weights, so that a job takes the seconds of its imports. One job crashes, one
calls sys.exit, one runs out of memory, one hangs, and one has an override of 300 characters. The sweep is run whole, then
once more with SIGKILL in its middle and resumed: both must end in the same table. Exit code 1 if they do not.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from optforge.sweep import store
from optforge.sweep.store import Sweep

FACTORY = '''\
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def build(n=0, does="run", note=""):
    """A decoder that never ran anywhere, or one of the ways in which a model of one's own fails."""
    if torch.empty(0).device.type != "meta":
        if does == "crash":
            raise RuntimeError("this factory is broken")
        if does == "exit":
            sys.exit(3)
        if does == "oom":
            raise torch.OutOfMemoryError("tried to allocate 80.00 GiB")
        if does == "hang":
            time.sleep(3600)
    torch.manual_seed(n)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, **sizes))
'''
RECIPE = "name: cast\ndescription: A cast to bf16\ngoal: latency\nsteps:\n  cast: {use: precision/bf16}\n"
MODEL = ["model=module", "model.factory=survivors:build", "model.family=causal_lm", "data=random_tokens", "workload=prefill"]
SETTINGS = ["hardware=cpu", "workload.prompt_tokens=16", "quality.enabled=false", "measure.max_s=0.5"]
LONG = "x" * 300
JOBS = ["n: 0", "does: crash", "n: 1", "n: 2", "does: exit", f"note: {LONG}", "n: 3", "does: oom", "n: 4", "does: hang", "n: 5", "n: 6"]
EXPECTED = ["done", "failed", "done", "done", "failed", "done", "done", "oom", "done", "timeout", "done", "done"]
KILL_AFTER = 5
"""Jobs that have ended when the sweep is killed."""


def prepare(folder: Path) -> None:
    """Writes what the command line needs: the factory, and the recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "survivors.py").write_text(FACTORY, encoding="utf-8")
    (folder / "cast.yaml").write_text(RECIPE, encoding="utf-8")


def sweep_words(timeout_s: float) -> list[str]:
    """The command line of the sweep, after `optforge`."""
    arguments = ",".join(f"{{{job}}}" for job in JOBS)
    return ["run", "-m", "recipe=./cast.yaml", *MODEL, *SETTINGS, f"model.arguments={arguments}", f"sweep.timeout_s={timeout_s:g}"]


def start(words: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """`optforge <words>` in `folder`, where its factory is found."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}
    return subprocess.Popen([sys.executable, "-m", "optforge", *words], cwd=folder, env=env)


def killed_in_the_middle(words: list[str], folder: Path, swept: Path) -> None:
    """Starts the sweep into `swept` and kills it, not asking, while a job runs."""
    process = start([*words, f"hydra.sweep.dir={swept}"], folder)
    while process.poll() is None:
        time.sleep(0.05)
        if store.is_sweep(swept):
            jobs = store.read(swept).jobs
            if sum(job.ended for job in jobs) >= KILL_AFTER and any(job.status == store.RUNNING for job in jobs):
                break
    process.send_signal(signal.SIGKILL)
    process.wait()


def same_table(first: Sweep, second: Sweep) -> bool:
    """Whether two sweeps ended alike; times differ from run to run."""
    rows = [[(job.folder, job.overrides, job.status, job.exit_code, job.error) for job in sweep.jobs] for sweep in (first, second)]
    return rows[0] == rows[1]


def alone_s(folder: Path) -> float:
    """Wall seconds of one good job as a run of its own."""
    begin = time.monotonic()
    words = ["run", "recipe=./cast.yaml", *MODEL, *SETTINGS, "model.arguments={n: 0}"]
    assert start(words, folder).wait() == 0
    return time.monotonic() - begin


def overhead(swept: Sweep, total_s: float, alone: list[float]) -> str:
    """What a good job of the sweep takes more than the same run alone, with all that was measured."""
    good = sorted(job.seconds for job in swept.jobs if job.status == store.DONE and job.seconds is not None)
    between = (total_s - sum(job.seconds or 0.0 for job in swept.jobs)) / len(swept.jobs)
    more = good[len(good) // 2] - sorted(alone)[len(alone) // 2]
    return (
        f"alone: {', '.join(f'{value:.1f}' for value in alone)} s; in the sweep: {', '.join(f'{value:.1f}' for value in good)} s; "
        f"medians differ by {more:+.2f} s, and the sweep itself adds {between:.2f} s a job (its start included)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--folder", type=Path, default=None, help="where to work; a temporary folder if left out")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="after which the job that hangs is ended")
    options = parser.parse_args()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="optforge-sweep-"))).resolve()
    prepare(folder)
    words, whole, killed = sweep_words(options.timeout_s), folder / "whole", folder / "killed"
    alone = [alone_s(folder) for _ in range(3)]
    begin = time.monotonic()
    start([*words, f"hydra.sweep.dir={whole}"], folder).wait()
    total_s = time.monotonic() - begin
    killed_in_the_middle(words, folder, killed)
    print("killed; resuming", flush=True)
    start(["run", "-m", f"sweep.resume={killed}", f"sweep.timeout_s={options.timeout_s:g}"], folder).wait()
    first, second = store.read(whole), store.read(killed)
    print(overhead(first, total_s, alone))
    statuses = [job.status for job in first.jobs]
    same = same_table(first, second)
    print(f"as expected: {statuses == EXPECTED}; killed and resumed to the same table: {same}")
    return 0 if same and statuses == EXPECTED else 1


if __name__ == "__main__":
    sys.exit(main())
