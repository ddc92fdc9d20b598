"""Realistic reports of each kind, built from the dataclasses; the figures are made up and agree with one another."""

from __future__ import annotations

from optforge.spec import Downgrade, Measurement, QualityResult, Ratio, Report, StepReport

TOKENS = 256


def measured(p50_ms: float, *, weights: int, peak: int, spread: float = 0.02, **more: object) -> Measurement:
    """A row of prefill over 256 tokens whose samples have the given median."""
    samples = [p50_ms / 1000 * (1 + spread * (index - 4) / 4) for index in range(9)]
    return Measurement(
        latency_ms={"p50": p50_ms, "p90": p50_ms * (1 + 0.8 * spread), "mean": p50_ms * 1.004, "stdev": p50_ms * spread / 2, "n": 9},
        tokens_per_s=TOKENS / p50_ms * 1000,
        compile_time_s=more.pop("compile_time_s", None),
        compiles=more.pop("compiles", None),
        graph_breaks=0,
        peak_memory_bytes=peak,
        memory={"allocated": None, "reserved": None, "process": peak},
        weight_bytes=weights,
        samples_s=samples,
        baseline_samples_s=[value * 1.3 for value in samples],
        steady=True,
        **more,
    )


def ratio(value: float, spread: float = 0.02) -> Ratio:
    return Ratio(value=value, low=value * (1 - spread), high=value * (1 + spread))


def quality(increase: float = 0.007, kl: float = 0.021, missed: list[str] | None = None) -> QualityResult:
    return QualityResult(
        perplexity=24.13 * (1 + increase),
        baseline_perplexity=24.13,
        perplexity_increase=increase,
        kl=kl,
        kl_kind="full",
        agreement=0.934,
        sqnr_db=27.3,
        count=4096,
        data="wikipedia",
        missed=missed or [],
    )


def receipt(what: str, count: int, before: int, after: int) -> dict[str, object]:
    touched = [
        {
            "name": f"model.layers.{i}.mlp.down_proj",
            "what": what,
            "bytes_before": before,
            "bytes_after": after,
            "dtypes": {"weight": "int8"},
        }
        for i in range(count)
    ]
    return {
        "touched": touched,
        "skipped": {"lm_head": "tied to model.embed_tokens (tied: skip)"},
        "ignored": [],
        "unmatched": [],
        "renamed": {"model.layers.0.self_attn.qkv_proj": [f"model.layers.0.self_attn.{n}_proj" for n in "qkv"]} if "packed" in what else {},
        "kernels": {"optforge::linear_int8_dynamic": count} if "int8" in what else {},
        "bytes_before": before * count,
        "bytes_after": after * count,
        "total_bytes": 269_060_352,
        "decisions": {},
        "notes": [],
    }


def _predicted(target: str) -> dict[str, object]:
    common = {"label": "predicted", "basis": "roofline at the published peaks, an upper bound on speed", "bound": "memory", "notes": []}
    baseline = {**common, "latency_ms": 0.41, "tokens_per_s": 624_000.0, "flops": 6.9e10, "bytes": 2.8e8, "weight_bytes": 269_060_352}
    optimized = {**common, "latency_ms": 0.256, "tokens_per_s": 1_000_000.0, "flops": 6.9e10, "bytes": 1.7e8, "weight_bytes": 163_000_000}
    return {
        "hardware": target,
        "label": "predicted",
        "baseline": baseline,
        "steps": [{"name": "fuse", **baseline}, {"name": "weights", **optimized}],
        "optimized": optimized,
        "speedup": 1.6,
    }


def ok_stand_in() -> Report:
    """Faster, quality held, measured on the CPU for an A100, with a downgrade and alternatives."""
    weights, smaller = 269_060_352, 163_000_000
    baseline = measured(143.0, weights=weights, peak=1_210_000_000)
    compiled = measured(129.0, weights=weights, peak=1_180_000_000, compile_time_s=38.2, compiles=2)
    fused = measured(121.3, weights=weights, peak=1_170_000_000, compile_time_s=35.9, compiles=2)
    final = measured(88.4, weights=smaller, peak=1_050_000_000, compile_time_s=42.7, compiles=2)
    steps = [
        StepReport(
            name="compile",
            kind="compile",
            use="compile/inductor",
            verdict="ok",
            seconds=0.03,
            measured=compiled,
            vs_previous=ratio(1.11),
            vs_baseline=ratio(1.11),
            receipt=receipt("compiled", 30, 0, 0),
        ),
        StepReport(
            name="fuse",
            kind="fuse",
            use="fuse/decoder",
            verdict="ok",
            seconds=0.8,
            measured=fused,
            vs_previous=ratio(1.063),
            vs_baseline=ratio(1.18),
            vs_compiled_baseline=ratio(1.063),
            quality=quality(0.0, 0.0001),
            receipt=receipt("packed from q_proj, k_proj, v_proj", 60, 1_327_104, 1_327_104),
        ),
        StepReport(
            name="weights",
            kind="quantize",
            use="quantize/fp8_weight",
            verdict="ok",
            seconds=2.1,
            measured=final,
            vs_previous=ratio(1.372),
            vs_baseline=ratio(1.62),
            vs_compiled_baseline=ratio(1.46),
            quality=quality(),
            receipt=receipt("fp8_weight", 120, 1_769_472, 886_000),
        ),
    ]
    reason = "a100 has no fp8 matrix units: fp8_dynamic runs as fp8_weight"
    alternatives = [
        {"use": "quantize/int8_dynamic", "predicted_speedup": 1.83, "note": "has int8 matrix units"},
        {"use": "quantize/int8_weight", "predicted_speedup": 1.6, "note": "half the bytes, bf16 products"},
        {"use": "quantize/int4_weight", "predicted_speedup": 2.21, "note": "a quarter of the bytes, costs more quality"},
    ]
    return Report(
        status="complete",
        verdict="ok",
        reason="1.46x faster than the compiled baseline",
        recipe={
            "name": "llama_fp8",
            "description": "FP8 weights and activations, fused decoder blocks, compiled",
            "goal": "throughput",
            "limits": {"max_kl": 0.05, "max_perplexity_increase": 0.03},
            "source": "recipes/llama_fp8.yaml",
        },
        target={"name": "a100", "description": "NVIDIA A100 SXM 80 GB", "arch": "sm_80"},
        device={"name": "cpu", "is_target": False, "arch": "x86_64"},
        model={
            "name": "smollm2_135m",
            "kind": "smollm2",
            "dtype": "bf16",
            "parameters": 134_515_008,
            "weights": "trained",
            "notes": ["the source weights were 4-bit already: every figure is a second rounding on top"],
        },
        data={"name": "wikipedia", "kind": "text"},
        workload={"name": "prefill", "kind": "prefill", "batch_size": 1, "context": 256, "unit": "tokens", "units": 256},
        baseline=baseline,
        compiled_baseline=compiled,
        steps=steps,
        optimized=final,
        speedup={"vs_baseline": ratio(1.62), "vs_compiled_baseline": ratio(1.46)},
        quality=quality(),
        generations=[
            {
                "prompt": "The history of algebra begins",
                "baseline": " in the ancient world, where scholars of Babylon solved quadratic equations by completing the square.",
                "optimized": " in the ancient world, where the scholars of Babylon solved linear and quadratic equations by geometry.",
            }
        ],
        predicted=_predicted("a100"),
        downgrades=[
            Downgrade(
                step="weights", requested="quantize/fp8_dynamic", runs_as="quantize/fp8_weight", reason=reason, alternatives=alternatives
            )
        ],
        warnings=["2 of 9 samples of the baseline lie 3% above its median"],
        environment={
            "versions": {"optforge": "0.1.0", "python": "3.11.2", "torch": "2.13.0+cpu", "triton": "3.7.1"},
            "platform": "Linux x86_64",
            "cores": 2,
            "backend": "cpu",
            "device": {"model_name": "Example CPU", "threads": 2},
        },
        command="optforge run recipe=llama_fp8 hardware=a100",
        started="2026-11-30T14:00:00+00:00",
        seconds=171.0,
        folder="outputs/llama_fp8/a100/2026-11-30_14-00-00",
    )


def on_target() -> Report:
    """Measured on the target itself, with published peaks, shares of them, and energy."""
    report = ok_stand_in()
    report.target = {"name": "h200", "description": "NVIDIA H200 SXM", "arch": "sm_90"}
    peaks = {"peak_flops": {"bf16": 989e12, "fp8": 1979e12}, "bandwidth_bytes_per_s": 4.8e12}
    report.device = {"name": "h200", "is_target": True, "arch": "sm_90", **peaks}
    report.workload = {**report.workload, "flops": 68_000_000_000}
    report.predicted = _predicted("h200")
    report.downgrades = []
    rows = [report.baseline, report.compiled_baseline, *(step.measured for step in report.steps)]
    for row, p50, mfu, mbu, energy in zip(
        rows, (3.1, 1.9, 1.9, 1.7, 1.3), (0.02, 0.036, 0.036, 0.04, 0.053), (0.1, 0.2, 0.2, 0.2, 0.16), (2, 1.3, 1.3, 1.2, 0.8), strict=True
    ):
        assert row is not None
        row.latency_ms = {"p50": p50, "p90": p50 * 1.02, "mean": p50, "stdev": 0.01, "n": 40}
        row.tokens_per_s, row.mfu, row.mbu, row.energy_j = TOKENS / p50 * 1000, mfu, mbu, float(energy)
    return report


def regression() -> Report:
    """Slower than the compiled baseline on a stand-in."""
    report = ok_stand_in()
    report.verdict = "regression"
    slow = measured(151.7, weights=163_000_000, peak=1_050_000_000, compile_time_s=42.7)
    report.steps[-1].measured = report.optimized = slow
    report.steps[-1].verdict = "regression"
    report.steps[-1].vs_previous = ratio(0.8)
    report.speedup = {"vs_baseline": ratio(0.94), "vs_compiled_baseline": ratio(0.85)}
    return report


def failed_quality() -> Report:
    """Fast, but a limit was missed."""
    report = ok_stand_in()
    report.verdict = "failed_quality"
    missed = ["perplexity increase is 24.5%, the limit is 3.0%", "KL of logits is 0.211, the limit is 0.05"]
    report.quality = report.steps[-1].quality = quality(0.245, 0.211, missed)
    report.steps[-1].verdict = "failed_quality"
    return report


def incomplete() -> Report:
    """What lies on the disk after a kill during the second step: mostly nulls."""
    report = ok_stand_in()
    report.status, report.verdict, report.reason = "incomplete", "incomplete", "interrupted"
    report.baseline, report.baseline_reason = None, "the baseline does not fit: 28.1 GB needed, 16 GB free"
    report.steps = report.steps[1:2]
    report.steps[0].verdict, report.steps[0].vs_previous = "incomplete", None
    report.steps[0].vs_baseline = report.steps[0].quality = report.steps[0].receipt = None
    report.compiled_baseline = report.optimized = report.quality = None
    report.speedup, report.generations = {}, []
    return report


def out_of_memory() -> Report:
    report = incomplete()
    report.status = report.verdict = "oom"
    report.reason = "cpu ran out of memory"
    report.steps[0].verdict = "oom"
    report.error = {
        "type": "OutOfMemory",
        "message": "needs 28.1 GB, 16 GB are free",
        "memory": {"process": 16_000_000_000},
        "workload": {"context": 256},
    }
    return report


def empty() -> Report:
    """The defaults: what a reader must survive."""
    return Report()


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'`|[x](http://e.vil)\x00"


def hostile() -> Report:
    """Names, prompts and texts that try to become markup."""
    report = ok_stand_in()
    report.recipe["name"] = report.recipe["description"] = report.model["name"] = report.command = HOSTILE
    report.device["name"] = report.target["name"] = report.folder = report.started = HOSTILE
    report.warnings = [HOSTILE]
    report.generations = [{"prompt": HOSTILE, "baseline": HOSTILE, "optimized": f"{HOSTILE} [red]x[/red]"}]
    report.environment = {HOSTILE: HOSTILE}
    report.steps[0].name = report.steps[0].use = report.steps[0].reason = HOSTILE
    report.downgrades[0].reason = report.downgrades[0].step = HOSTILE
    report.steps[1].receipt = {**(report.steps[1].receipt or {}), "skipped": {HOSTILE: HOSTILE}, "notes": [HOSTILE]}
    return report


ALL = {build.__name__: build for build in (ok_stand_in, on_target, regression, failed_quality, incomplete, out_of_memory, empty, hostile)}
