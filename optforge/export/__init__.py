"""Writes optimized models in the formats of other engines, and proves each by loading it in its own engine.

    format               what it holds                                               loaded by
    compressed_tensors   the stored integers, under the model's own names            transformers, vLLM
    huggingface          plain weights in the model's dtype                          transformers
    torch_export         the whole program in plain PyTorch operators, a `.pt2`      torch.export.load
    aot_inductor         the program compiled ahead of time, a `.pt2`                torch._inductor.aoti_load_package
    onnx                 the whole program                                           ONNX Runtime

A folder appears under its name only after a fresh process, without OptForge, has loaded it and computed what the optimized model
computes. One file per format; `reload.py` is that process.
"""

from optforge.export.base import Format, Subject
from optforge.export.formats import FORMATS, require
from optforge.export.of_run import FOLDER, export_saved, foresee, recorded, subject_of
from optforge.export.write import export

__all__ = ["FOLDER", "FORMATS", "Format", "Subject", "export", "export_saved", "foresee", "recorded", "require", "subject_of"]
