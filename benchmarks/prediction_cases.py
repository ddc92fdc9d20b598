"""The whole models that benchmarks/prediction.py holds predictions against, in order of importance."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration. `rows` are what is measured of it: `eager` as loaded, `recipe` with every step."""

    overrides: tuple[str, ...]
    rows: tuple[str, ...] = ("eager", "recipe")

    @property
    def model(self) -> tuple[str, ...]:
        """What decides the weights: cases that agree in it share a loaded model."""
        return tuple(text for text in self.overrides if text.partition("=")[0].split(".")[0] == "model")


def cpu_cases() -> list[Case]:
    language = "model=smollm2_135m"
    decode = ("workload=decode", "workload.new_tokens=16")
    found = []
    for batch in (1, 4):
        found.append(_case("llama_bf16", language, *decode, f"workload.batch_size={batch}"))
        found.append(_case("llama_int8", language, *decode, f"workload.batch_size={batch}", rows=("recipe",)))
    for tokens in (256, 64, 512):
        for batch in (1, 4):
            sizes = ("workload=prefill", f"workload.prompt_tokens={tokens}", f"workload.batch_size={batch}")
            found.append(_case("llama_bf16", language, *sizes))
            found.append(_case("llama_int8", language, *sizes, rows=("recipe",)))
    for model in ("efficientnet_lite0", "fashion_cnn"):
        for dtype in ("fp32", "bf16"):
            for batch in (1, 8, 32):
                # folding batch norms in bf16 changes EfficientNet's outputs more than fuse/conv_bn allows
                left_out = ("~steps.weights", *(["~steps.fuse"] if dtype == "bf16" else []))
                sizes = ("workload=forward", f"workload.batch_size={batch}", *left_out)
                found.append(_case("vision_int8", f"model={model}", f"model.dtype={dtype}", *sizes))
    return found


def cuda_cases() -> list[Case]:
    """At most nine minutes on an H200: captured decoding compiles the whole model, so the 8B shape has 8 of its 32 layers there.

    Most are bound by the device. What the host bounds (decoding that nothing compiled) is as noisy as the host: the same case took
    217 and 318 ms in two sessions on such machines. One of these stands last.
    """
    small, large, eight = ("model=llama3_1b",), ("model=llama3_8b",), ("model=llama3_8b", "model.layers=8")
    captured = ("workload=decode", "workload.new_tokens=16", "workload.context=512", "steps.compile.mode=reduce_overhead")
    found = [_case(recipe, *small, *captured, "workload.batch_size=1", rows=("recipe",)) for recipe in ("llama_bf16", "llama_fp8")]
    for batch, tokens in ((4, 2048), (16, 512), (1, 2048)):
        found += _prompts(small, batch, tokens)
    for recipe, batch in (("llama_bf16", 16), ("llama_fp8", 64), ("llama_bf16", 64)):
        found.append(_case(recipe, *small, *captured, f"workload.batch_size={batch}", rows=("recipe",)))
    for batch, tokens in ((4, 2048), (1, 4096)):
        sizes = ("workload=train", f"workload.batch_size={batch}", f"workload.sequence={tokens}")
        found.append(_case("baseline", *small, *sizes, rows=("eager",)))
    for batch, tokens in ((1, 2048), (16, 512)):
        found += _prompts(large, batch, tokens)
    for recipe, batch in (("llama_bf16", 1), ("llama_bf16", 16), ("llama_fp8", 16), ("llama_fp8", 1)):
        found.append(_case(recipe, *eight, *captured, f"workload.batch_size={batch}", rows=("recipe",)))
    found.append(_case("llama_bf16", *small, *captured, "workload.batch_size=1", rows=("eager",)))
    return found


def _prompts(model: tuple[str, ...], batch: int, tokens: int) -> list[Case]:
    """Prefill as loaded, in bf16 and in fp8."""
    sizes = ("workload=prefill", f"workload.prompt_tokens={tokens}", f"workload.batch_size={batch}")
    return [_case("llama_bf16", *model, *sizes), _case("llama_fp8", *model, *sizes, rows=("recipe",))]


def _case(recipe: str, *overrides: str, rows: tuple[str, ...] = ("eager", "recipe")) -> Case:
    return Case(overrides=(f"recipe={recipe}", *overrides), rows=rows)


def title(case: Case) -> str:
    """The overrides in short: `llama_bf16 llama3_1b decode batch_size=1`."""
    named = (text.removeprefix("recipe=").removeprefix("model=").removeprefix("workload=") for text in case.overrides)
    return " ".join(f"without {text.split('.')[-1]}" if text.startswith("~") else text.split(".")[-1] for text in named)
