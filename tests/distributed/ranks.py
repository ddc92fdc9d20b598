"""What the processes of the tests beside this file run; each writes what it found for the test to read."""

from __future__ import annotations

import copy
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llamas
import torch
import torch.distributed as dist
from torch import Tensor, nn
from toys import TinyLM, token_ids

from optforge.backends.base import CompileOptions
from optforge.backends.cpu import CpuBackend
from optforge.compiling import compile_
from optforge.distributed import world
from optforge.distributed.checkpoint import Checkpoints
from optforge.distributed.fit import fit
from optforge.share import alias
from optforge.spec import Hardware
from optforge.training.optimizers import Rates
from optforge.training.stream import Batch, Stream
from optforge.training.trainer import Options, Trainer
from optforge.transforms.base import Context
from optforge.transforms.fuse import Fuse
from optforge.transforms.quantize import Quantize, SchemeName
from optforge.transforms.shard import Shard
from optforge.workloads.decode import DecodeWork

CPU = Hardware(name="cpu", backend="cpu", arch="x86_64", peak_flops={"fp32": 1e11, "bf16": 1e12, "int8": 2e12})
LARGER = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256}


def context(workload: str = "forward", example: Any = None) -> Context:
    return Context(step="shard", target=CPU, device=CPU, backend=CpuBackend(), workload=workload, example=example)


def tiny(tied: bool) -> nn.Module:
    torch.manual_seed(0)
    return TinyLM(tied=tied)


def decoder(**sizes: Any) -> nn.Module:
    return llamas.module(**{**LARGER, **sizes})


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    out = model(ids)
    return getattr(out, "logits", out)


def off(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def step_of(model: nn.Module, ids: Tensor, seen: int) -> Tensor:
    """One training step on `ids`, of which this device sees the `seen`-th row (all where it is below 0); the loss."""
    own = ids if seen < 0 else ids.chunk(2)[seen]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # Adam makes a whole step of what rounding leaves
    found = logits(model, own)
    loss = nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), own[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def same_after_a_step(model: nn.Module, ids: Tensor, batches: int, **degrees: int) -> dict[str, Any]:
    """Output, loss, weights after one step and the parts held, against one process with the whole batch."""
    alone, spread, before = copy.deepcopy(model), alias(model), copy.deepcopy(model)
    receipt = Shard(**degrees).apply(spread, context("train"))
    with torch.no_grad():
        output = off(logits(spread, ids), logits(alone, ids))
    rank = dist.get_rank() if batches > 1 else -1
    loss = step_of(spread, ids, rank)
    if batches > 1:
        dist.all_reduce(loss)
        loss /= batches
    expected_loss = step_of(alone, ids, -1)
    expected = dict(alone.named_parameters(remove_duplicate=False))
    weights = max(
        float((whole(p.detach()) - expected[name].detach()).abs().max()) for name, p in spread.named_parameters(remove_duplicate=False)
    )
    untouched = all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    held = sum(getattr(p, "_local_tensor", p).numel() for p in spread.parameters())
    return {
        "output": output,
        "loss": abs(float(loss - expected_loss)),
        "weights": weights,
        "held": held,
        "all": sum(p.numel() for p in model.parameters()),
        "touched": len(receipt.touched),
        "baseline_untouched": untouched,
        "tied": len({id(p) for p in spread.parameters()}) < len(list(spread.named_parameters(remove_duplicate=False))),
    }


def quantized(scheme: SchemeName, fuse: bool, ids: Tensor, **degrees: int) -> dict[str, Any]:
    """Logits of a quantized decoder, sharded, against the same one whole."""
    model = decoder(hidden_size=256, intermediate_size=512)
    example = ((), {"input_ids": ids[:, :4], "use_cache": False})
    ctx = context(example=example)
    with torch.no_grad():
        plain = logits(model, ids)
        if fuse:
            Fuse().apply(model, ctx)
        extra = {"group_size": 64, "symmetric": False} if scheme is SchemeName.int4_weight else {}
        Quantize(scheme=scheme, ignore=[], **extra).apply(model, ctx)
        expected = logits(model, ids)
        spread = alias(model)
        Shard(**degrees).apply(spread, ctx)
        found = logits(spread, ids)
    held = sum(getattr(p, "_local_tensor", p).numel() for p in spread.parameters())
    integers = {str(p.dtype) for p in spread.parameters() if not p.is_floating_point()}
    return {
        "output": off(found, expected),
        "from_plain": off(found, plain),
        "whole_from_plain": off(expected, plain),
        "held": held / sum(p.numel() for p in model.parameters()),
        "integers": sorted(integers),
    }


def decoded(compiled: bool) -> dict[str, Any]:
    """Tokens that a decoder over two devices chooses, and those that the whole one does; the cache that a device holds."""
    ids = token_ids(2, 8, vocabulary=256)
    model = decoder()
    spread = alias(model)
    with torch.no_grad():
        Shard(tensor=2).apply(spread, context("decode"))
    if compiled:
        compile_(spread, CompileOptions())
    work, other = DecodeWork(ids=ids, new_tokens=4), DecodeWork(ids=ids, new_tokens=4)
    found, expected = work.run(spread), other.run(model)
    again = work.run(spread)
    held = [sum(tensor.numel() for tensor in one.kept(module)) for one, module in ((work, spread), (other, model))]
    return {"same": bool(torch.equal(found, expected) and torch.equal(again, expected)), "held": held[0] / held[1]}


def report(folder: str, checks: dict[str, Callable[[], Any]]) -> None:
    """Runs the checks, and leaves each one's result, or its error, in this rank's file."""
    found: dict[str, Any] = {}
    for name, check in checks.items():
        begin = time.perf_counter()
        found[name] = check()
        print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)
    (Path(folder) / f"found_{dist.get_rank()}.json").write_text(json.dumps(found))


def two(folder: str) -> None:
    ids = token_ids(2, 8)
    wide = token_ids(2, 8, vocabulary=256)
    checks: dict[str, Callable[[], Any]] = {
        "tensor": lambda: same_after_a_step(tiny(False), ids, 1, tensor=2),
        "tensor_tied": lambda: same_after_a_step(tiny(True), ids, 1, tensor=2),
        "fsdp": lambda: same_after_a_step(tiny(False), ids, 2, fsdp=2),
        "fsdp_tied": lambda: same_after_a_step(tiny(True), ids, 2, fsdp=2),
        "data": lambda: same_after_a_step(tiny(False), ids, 2, data=2),
        "decode": lambda: decoded(False),
        "decode_compiled": lambda: decoded(True),
        "llama_tensor": lambda: same_after_a_step(decoder(), wide, 1, tensor=2),
        "llama_fsdp": lambda: same_after_a_step(decoder(tie_word_embeddings=True), wide, 2, fsdp=2),
    }
    for scheme in ("int8_weight", "int4_weight", "fp8_weight", "int8_dynamic", "fp8_dynamic"):
        checks[f"{scheme}_tensor"] = lambda scheme=scheme: quantized(SchemeName[scheme], True, wide, tensor=2)
        checks[f"{scheme}_fsdp"] = lambda scheme=scheme: quantized(SchemeName[scheme], False, wide, fsdp=2)
    report(folder, checks)


def four(folder: str) -> None:
    ids = token_ids(2, 8)
    wide = token_ids(2, 8, vocabulary=256)

    def pair(**degrees: int) -> dict[str, Any]:
        return same_after_a_step(decoder(), wide, 1, **degrees)

    report(
        folder,
        {
            "tensor4": lambda: same_after_a_step(tiny(False), ids, 1, tensor=4),
            "fsdp_tensor": lambda: pair(fsdp=2, tensor=2),
            "data_tensor": lambda: pair(data=2, tensor=2),
            "data_fsdp": lambda: pair(data=2, fsdp=2),
            "int8_weight": lambda: quantized(SchemeName.int8_weight, True, wide, fsdp=2, tensor=2),
        },
    )


def trained(folder: str, steps: int, killed_at: int, fsdp: int) -> None:
    """A training with checkpoints; rank 1 of the first attempt is killed in the middle of a step."""
    rank, attempt = dist.get_rank() if dist.is_initialized() else 0, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    trainer, model = training(fsdp)
    seen: list[int] = []

    def told(step: int, loss: float) -> None:
        seen.append(step)
        if step == killed_at and rank == 1 and attempt == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    losses = fit(trainer, steps=steps, folder=Path(folder) / "checkpoints", every=3, told=told)
    weights = {name: whole(parameter.detach()).double().sum().item() for name, parameter in model.named_parameters()}
    if rank == 0:
        found = {"losses": losses, "first": seen[0] if seen else None, "weights": weights}
        (Path(folder) / "found.json").write_text(json.dumps(found))


def training(fsdp: int) -> tuple[Trainer, nn.Module]:
    """A training whose global batch has 4 items, whatever the number of ranks."""
    model = tiny(True)
    if fsdp > 1:
        Shard(fsdp=fsdp).apply(model, context("train"))
    share = world.share_of(model)
    ids = token_ids(32, 8)

    def objective(module: nn.Module, batch: Batch) -> Tensor:
        own = batch.args[0]
        return nn.functional.cross_entropy(module(own)[:, :-1].flatten(0, 1), own[:, 1:].flatten())

    stream = Stream(
        32, lambda picked: Batch(args=(ids[list(picked)],)), batch_size=4 // fsdp, seed=3, rank=share.batch, ranks=share.batches
    )
    return Trainer(model, objective, stream, Options(rates=Rates(learning_rate=1e-2), clip=1.0)), model


def rank_state(folder: str, load: bool) -> None:
    """Saves, or reads, a checkpoint with state of its own for each rank."""
    trainer, model = training(world.current().size if world.current() else 1)
    checkpoints = Checkpoints(Path(folder) / "own")
    if load:
        checkpoints.load(1, model, trainer.optimizer)
        return
    trainer.step()
    checkpoints.save(1, model, trainer.optimizer, {}, own={"rank": dist.get_rank()})
    checkpoints.finish()
    _, own = checkpoints.load(1, model, trainer.optimizer)
    assert own == {"rank": dist.get_rank()}
