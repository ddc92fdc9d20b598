"""Saves an optimized model so that it loads bit for bit, and loads it.

    <folder>/artifact/
      artifact.json        format_version, tensors, aliases, receipts, sha256 of every file
      model.safetensors    plain tensors only (several files when large)
      run.yaml             the resolved run: names the model whose structure is rebuilt

Loading builds the structure on meta, replays the receipts (no decision is made twice), assigns the tensors and ties
what was tied. The old artifact stays whole until the new one is: everything is written into a temporary folder beside
it, flushed and renamed.
"""

from optforge.artifact.layout import GIVEN, NAME
from optforge.artifact.read import Described, load, load_described, load_into
from optforge.artifact.table import ties
from optforge.artifact.write import require_storable, room, save

__all__ = ["GIVEN", "NAME", "Described", "load", "load_described", "load_into", "require_storable", "room", "save", "ties"]
