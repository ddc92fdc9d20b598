"""Loads an exported artifact in its own engine and runs it: a program of its own, which OptForge starts and never imports.

    python -I reload.py request.json

It refuses every import of OptForge, since an artifact that needs it would fail wherever it is served. It reads the request and the
inputs beside it, and writes the outputs and an answer: versions, what the loader reported, seconds. Its log is what it prints.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

REQUEST, ANSWER, INPUTS, OUTPUTS = "request.json", "answer.json", "inputs.safetensors", "outputs.safetensors"

Run = Callable[[Mapping[str, Any]], tuple[Any, ...]]
"""One call: tensors by name in, tensors out."""


class NoOptForge(MetaPathFinder):
    """Makes `import optforge` fail here, however it is installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "optforge":
            raise ImportError(f"the artifact needs {name}, which the engine that will serve it does not have")


def hugging_face(folder: Path, options: Mapping[str, Any], answer: dict[str, Any]) -> Run:
    """`from_pretrained` of the folder alone, without a network and without the folder's own code."""
    import torch
    import transformers

    engine: Any = transformers  # parts of it are untyped
    engine.logging.set_verbosity_error()
    engine.logging.disable_progress_bar()
    auto = getattr(engine, options["auto"])
    dtype = getattr(torch, options["dtype"])
    model, found = auto.from_pretrained(folder, dtype=dtype, local_files_only=True, output_loading_info=True)
    answer["loading"] = {key: sorted(map(str, names)) for key, names in found.items() if names}
    if "text" in options:
        ids = engine.AutoTokenizer.from_pretrained(folder, local_files_only=True)(options["text"])["input_ids"]
        answer["tokenizer"] = list(ids) == options["ids"]
    cache = {"use_cache": False} if options["auto"] == "AutoModelForCausalLM" else {}

    def run(inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        found = model(**inputs, **cache)
        return (found.logits,) if hasattr(found, "logits") else tuple(value for value in found.values() if isinstance(value, torch.Tensor))

    return run


def torch_export(folder: Path, options: Mapping[str, Any], answer: dict[str, Any]) -> Run:
    import torch

    program = torch.export.load(folder / options["file"]).module()
    return lambda inputs: _flat(program(**{name: value.to(options["device"]) for name, value in inputs.items()}))


def aot_inductor(folder: Path, options: Mapping[str, Any], answer: dict[str, Any]) -> Run:
    import torch._inductor

    program = torch._inductor.aoti_load_package(str(folder / options["file"]))
    return lambda inputs: _flat(program(**{name: value.to(options["device"]) for name, value in inputs.items()}))


def onnx(folder: Path, options: Mapping[str, Any], answer: dict[str, Any]) -> Run:
    import onnxruntime
    import torch

    session = onnxruntime.InferenceSession(folder / options["file"], providers=["CPUExecutionProvider"])
    return lambda inputs: tuple(
        torch.from_numpy(value) for value in session.run(None, {name: value.numpy() for name, value in inputs.items()})
    )


ENGINES: dict[str, tuple[Callable[[Path, Mapping[str, Any], dict[str, Any]], Run], tuple[str, ...]]] = {
    "transformers": (hugging_face, ("transformers", "compressed-tensors", "torch")),
    "torch_export": (torch_export, ("torch",)),
    "aot_inductor": (aot_inductor, ("torch",)),
    "onnx": (onnx, ("onnxruntime",)),
}
"""Engine -> its loader, and the packages whose versions are told."""


def main(request_path: Path) -> None:
    sys.meta_path.insert(0, NoOptForge())
    import torch
    from safetensors.torch import load_file, save_file

    request = json.loads(request_path.read_text(encoding="utf-8"))
    load, packages = ENGINES[request["engine"]]
    answer: dict[str, Any] = {"versions": _versions(packages)}
    start = time.perf_counter()
    with torch.no_grad():
        run = load(Path(request["folder"]), request["options"], answer)
        answer["load_s"] = time.perf_counter() - start
        given = load_file(request_path.with_name(INPUTS))
        made: dict[str, torch.Tensor] = {}
        for number in range(request["count"]):
            prefix = f"{number}/"
            outputs = run({name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)})
            made |= {f"{prefix}{index}": value.detach().cpu().contiguous() for index, value in enumerate(outputs)}
    answer["seconds"] = time.perf_counter() - start
    save_file(made, request_path.with_name(OUTPUTS))
    request_path.with_name(ANSWER).write_text(json.dumps(answer), encoding="utf-8")


def _flat(found: Any) -> tuple[Any, ...]:
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(Path(sys.argv[1]))
