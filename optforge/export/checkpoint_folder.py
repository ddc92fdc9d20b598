"""The files of a transformers checkpoint beside its weights: config, generation config, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optforge.export.base import Subject
from optforge.spec import Json

if TYPE_CHECKING:
    from optforge.export.unpack import Unpacked


def write(subject: Subject, unpacked: Unpacked, folder: Path, quantization: dict[str, Json] | None = None) -> list[str]:
    """Writes them into `folder`; returns what a reader must know of them."""
    unpacked.config.save_pretrained(folder)
    if quantization is not None:
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(config | {"quantization_config": quantization}, indent=2) + "\n", encoding="utf-8")
    generation: Any = subject.generation_config or getattr(subject.module, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
    if subject.tokenizer is not None:
        subject.tokenizer.save_pretrained(folder)
        return []
    return ["no tokenizer is in the folder: the model came without one"] if subject.family == "causal_lm" else []


def options(subject: Subject, unpacked: Unpacked, dtype: str) -> dict[str, Json]:
    """What the reload check's engine `transformers` is told."""
    auto = "AutoModelForCausalLM" if subject.family == "causal_lm" else type(unpacked.structure).__name__
    found: dict[str, Json] = {"auto": auto, "dtype": dtype}
    if subject.tokenizer is not None:
        text = "The quick brown fox, 3.14 and\nwhat follows."
        found |= {"text": text, "ids": list(subject.tokenizer(text)["input_ids"])}
    return found
