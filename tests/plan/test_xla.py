"""The program that XLA compiles for a TPU that is not here: its figures against counts by hand, its arithmetic against PyTorch's,
and what is said where XLA cannot be asked."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from optforge import config, isolate
from optforge.errors import PlanError
from optforge.plan import xla
from optforge.plan.make import Plan, make
from optforge.xla.request import PACKAGES, TOPOLOGIES, Compiled

needs_extra = pytest.mark.skipif(
    any(find_spec(name) is None for name in PACKAGES), reason="needs the extra xla: pip install 'optforge[xla]'"
)

TINY = ("model=llama3_1b", "model.layers=2", "data=random_tokens")
"""Two blocks of the Llama 3.2 1B shape: width 2048, hidden 8192, 32 query and 8 key/value heads of 64, tied head of 128,256."""
LAYERS, WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD, VOCABULARY = 2, 2048, 8192, 32, 8, 64, 128_256
BLOCK = 2 * WIDTH * WIDTH + 2 * WIDTH * KV_HEADS * HEAD + 3 * WIDTH * HIDDEN
"""Weights of one block's linears."""

WITHOUT_EXTRA = f"""
import importlib.machinery
found = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.partition(".")[0] in {PACKAGES!r} else found(name, *rest)
)
"""
"""A sitecustomize: the extra's packages are as if they had never been installed."""


def plan(*overrides: str) -> Plan:
    return make(config.compose(config.parse([*TINY, *overrides], cwd=Path.cwd()), cwd=Path.cwd()), executes=False)


def optforge(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_EXTRA)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "optforge", *arguments, f"output_dir={tmp_path / 'out'}"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.case("B43")
def test_a_run_for_a_tpu_without_the_extra_ends_in_one_line(tmp_path: Path) -> None:
    done = optforge(tmp_path, "run", "recipe=baseline", "hardware=tpu_v5e", *TINY)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert errors == [
        "error: hardware=tpu_v5e: needs jax, torchax and libtpu, which are not importable; "
        "pip install 'optforge[xla]', or see what is known without: optforge plan hardware=tpu_v5e"
    ]
    assert "Traceback" not in done.stderr


@pytest.mark.case("B43")
def test_a_plan_without_the_extra_says_what_brings_it_and_the_rest_stands(tmp_path: Path) -> None:
    done = optforge(tmp_path, "plan", "recipe=baseline", "hardware=tpu_v5e", *TINY)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "needs jax, torchax and libtpu, which are not importable; pip install 'optforge[xla]'" in said
    assert "bound" in said
    assert "tok/s" in said


@pytest.mark.case("B43")
def test_fp8_activations_are_lowered_or_refused_before_xla_sees_them() -> None:
    lowered = plan("recipe=llama_fp8", "hardware=tpu_v5e")
    assert [(item.requested, item.runs_as) for item in lowered.downgrades] == [("quantize/fp8_dynamic", "quantize/fp8_weight")]
    with pytest.raises(PlanError, match="fp8"):
        plan("recipe=llama_fp8", "hardware=tpu_v5e", "downgrade=forbid")


def test_every_tpu_profile_has_a_topology() -> None:
    profiles = [config.hardware(option.name) for option in config.options("hardware") if option.name != "auto"]
    tpus = [profile for profile in profiles if profile.backend == "xla"]
    assert tpus
    assert {profile.arch for profile in tpus} <= set(TOPOLOGIES)


def test_an_unknown_architecture_is_named() -> None:
    planned = plan("recipe=baseline", "hardware=tpu_v5e")
    planned.target = replace(planned.target, arch="v99")
    assert "v99" in str(xla.compile_for(planned).reason)


@needs_extra
def test_a_compile_that_takes_too_long_is_recorded() -> None:
    found = xla.compile_for(plan("recipe=baseline", "hardware=tpu_v5e"), timeout_s=0.2)
    assert not found.known
    assert found.reason == "the compile ended early: still running after 0.2 s, stopped"


@pytest.mark.parametrize("given", [{}, {"optimal_seconds": -90.0}])
def test_seconds_that_xla_does_not_know_are_null(given: dict[str, float]) -> None:
    found = xla.describe(Compiled(device="TPU v5 lite", cost=given), config.hardware("tpu_v5e"))
    assert found.figures["optimal_ms"] is None
    assert found.figures["flops"] is None
    assert found.figures["cost_analysis"] == given


def declared() -> tuple[list[bool], int]:
    """In a process of its own: whether each overload is there after a declaration, and how many a second one adds."""
    import torch

    from optforge.xla import overloads

    _kept = overloads.declare_removed()
    there = [name in getattr(torch.ops.aten, operator).overloads() for operator, names in overloads.REMOVED.items() for name in names]
    return there, 0 if overloads.declare_removed() is None else 1


def test_removed_overloads_are_declared_once() -> None:
    there, again = isolate.call(declared, timeout_s=120)
    assert all(there)
    assert len(there) == 21
    assert again == 0


def steps_agree() -> dict[str, list[float]]:
    """In a process of its own: a prompt's pass and a decode step as JAX runs them on the CPU, beside PyTorch's."""
    from optforge.xla import compile as of_xla

    _kept = of_xla.load_torchax()
    import torch
    from torchax.ops import mappings
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    from optforge.xla.step import _DecodeStep

    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=128
    )
    model = LlamaForCausalLM._from_config(shape, attn_implementation="sdpa").eval().requires_grad_(False)
    cache = StaticCache(config=shape, max_cache_len=16)
    token = model(input_ids=torch.arange(8)[None], past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    kept = [tensor.clone() for layer in cache.layers for tensor in (layer.keys, layer.values)]
    length = cache.layers[0].cumulative_length.clone()
    expected = model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)

    program = torch.export.export(_DecodeStep(model), (token, length, *kept))
    run, decomposed = of_xla.as_jax(program)
    stored = {**decomposed.state_dict, **decomposed.constants}
    states = [stored[spec.target] for spec in decomposed.graph_signature.input_specs if spec.target is not None]
    *changed, chosen = run(*(mappings.t2j(tensor) for tensor in (*states, token, length, *kept)))
    after = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    worst = [float((mappings.j2t(ours) - theirs).abs().max()) for ours, theirs in zip(changed, after, strict=True)]
    moved = [float((theirs - before).abs().max()) for theirs, before in zip(after, kept, strict=True)]
    return {"chosen": [int(chosen[0, 0]), int(expected)], "worst": worst, "moved": moved}


@needs_extra
def test_a_decode_step_in_jax_chooses_pytorchs_token_and_fills_its_cache() -> None:
    found = isolate.call(steps_agree, timeout_s=240)
    assert found["chosen"][0] == found["chosen"][1]
    assert min(found["moved"]) > 1e-3, "the step wrote to every layer's cache"
    assert max(found["worst"]) < 1e-5


def products_agree() -> tuple[bool, bool]:
    """In a process of its own: the two lowerings of ours on the CPU, bit for bit."""
    from optforge.xla import compile as of_xla

    _kept = of_xla.load_torchax()
    import torch
    from torchax.ops import mappings, ops_registry

    torch.manual_seed(0)
    a, b = torch.randint(-128, 128, (5, 700), dtype=torch.int8), torch.randint(-128, 128, (700, 9), dtype=torch.int8)
    product = ops_registry.all_aten_ops[torch.ops.aten._int_mm].func(mappings.t2j(a), mappings.t2j(b))
    same_product = torch.equal(mappings.j2t(product).long(), a.long() @ b.long())
    bits = torch.arange(256, dtype=torch.uint8)
    viewed = ops_registry.all_aten_ops[torch.ops.aten.view.dtype].func(mappings.t2j(bits), torch.float8_e4m3fn)
    return same_product, torch.equal(
        mappings.j2t(viewed.astype("float32")).nan_to_num(), bits.view(torch.float8_e4m3fn).float().nan_to_num()
    )


@needs_extra
def test_integer_products_and_fp8_bits_are_exact() -> None:
    assert isolate.call(products_agree, timeout_s=240) == (True, True)


@needs_extra
@pytest.mark.slow
def test_a_prompts_flops_and_arguments_are_those_counted_by_hand() -> None:
    found = xla.compile_for(plan("recipe=baseline", "hardware=tpu_v5e", "workload=prefill", "workload.prompt_tokens=512"))
    assert found.known, found.reason
    tokens = 512
    attention = LAYERS * 2 * 2 * HEADS * tokens * tokens * HEAD
    by_hand = 2 * tokens * LAYERS * BLOCK + attention + 2 * VOCABULARY * WIDTH
    assert found.figures["flops"] == pytest.approx(by_hand, rel=0.03)
    weights = 2 * (LAYERS * BLOCK + VOCABULARY * WIDTH + (2 * LAYERS + 1) * WIDTH)
    assert found.figures["argument_bytes"] == pytest.approx(weights, rel=0.01)
    assert found.figures["fits"] is True
    # no program runs faster than its products at the peak, nor than its weights through the memory
    hardware = config.hardware("tpu_v5e")
    assert hardware.bandwidth_bytes_per_s is not None
    floor_ms = 1e3 * max(by_hand / hardware.peak_flops["bf16"], weights / hardware.bandwidth_bytes_per_s)
    assert floor_ms < found.figures["optimal_ms"] < 10 * floor_ms


@needs_extra
@pytest.mark.slow
def test_a_decode_step_writes_its_cache_in_place_and_int8_weights_stay_int8() -> None:
    sizes = ("workload=decode", "workload.batch_size=2", "workload.context=224", "workload.new_tokens=32")
    found = xla.compile_for(plan("recipe=llama_int8", "hardware=tpu_v6e", *sizes))
    assert found.known, found.reason
    assert found.figures["in_place_bytes"] == 2 * LAYERS * 2 * KV_HEADS * 256 * HEAD * 2
    in_bf16 = 2 * (LAYERS * BLOCK + VOCABULARY * WIDTH)
    left = LAYERS * WIDTH * HIDDEN + VOCABULARY * WIDTH  # the recipe leaves down_proj and the head in bf16
    by_hand = in_bf16 - (LAYERS * BLOCK + VOCABULARY * WIDTH - left) + found.figures["in_place_bytes"]
    assert found.figures["argument_bytes"] == pytest.approx(by_hand, rel=0.01)
