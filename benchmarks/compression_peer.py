"""Quantizes a saved model by llm-compressor and prints its perplexity; run by benchmarks/compression.py in the peer's environment.

    python benchmarks/compression_peer.py FOLDER rtn|gptq|awq

FOLDER holds the model (bf16) and tokens.pt: calibration [samples, tokens] and evaluated [count]. The last line printed is JSON.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

WINDOW = 512
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 64}


def recipe(algorithm: str) -> list[Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}}
    if algorithm == "rtn":
        return [QuantizationModifier(config_groups=groups, ignore=["lm_head"])]
    if algorithm == "gptq":
        from llmcompressor.modifiers.gptq import GPTQModifier

        return [GPTQModifier(config_groups=groups, ignore=["lm_head"])]
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    if not torch.accelerator.is_available():  # 0.14.0.1 pins memory for copies to a GPU, which fails where there is none
        IntermediatesCache.pin_memory = lambda self, *args, **kwargs: None
    return [AWQModifier(), QuantizationModifier(config_groups=groups, ignore=["lm_head"])]


def perplexity(module: nn.Module, ids: torch.Tensor) -> float:
    """exp of the mean negative log likelihood, each token of a window but its first."""
    total, count = 0.0, 0
    with torch.no_grad():
        for window in ids.split(WINDOW):
            logits = module(input_ids=window[None], use_cache=False).logits[0, :-1].double()
            total += float(nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
            count += window.numel() - 1
    return math.exp(total / count)


def main() -> None:
    folder, algorithm = Path(sys.argv[1]), sys.argv[2]
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokens = torch.load(folder / "tokens.pt")
    rows = tokens["calibration"]
    data = Dataset.from_dict({"input_ids": rows.tolist(), "attention_mask": torch.ones_like(rows).tolist()})
    steps = recipe(algorithm)
    start = time.perf_counter()
    options: dict[str, Any] = {"num_calibration_samples": len(rows), "max_seq_length": rows.shape[1], "shuffle_calibration_samples": False}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)  # asked for, and not used on token ids
    oneshot(model=model, recipe=steps, processor=tokenizer, **({} if algorithm == "rtn" else {"dataset": data, **options}))
    seconds = time.perf_counter() - start
    told = {"modifiers": [type(step).__name__ for step in steps], "weights": WEIGHTS}
    print(json.dumps({"perplexity": perplexity(model, tokens["evaluated"]), "seconds": seconds, "recipe": told}))


if __name__ == "__main__":
    main()
