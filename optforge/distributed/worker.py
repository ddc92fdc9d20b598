"""One rank that `distributed.launch` started: joins the others, makes the call, and leaves word of what went wrong."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import sys
from pathlib import Path
from typing import Any

from optforge.distributed import failures, world
from optforge.distributed.launch import CALL, Call
from optforge.errors import EXIT_CRASH


def main() -> None:
    """Reads the call from the folder that it is given, and makes it."""
    faulthandler.enable()
    folder = Path(os.environ["OPTFORGE_RANK_FOLDER"])
    rank = int(os.environ["RANK"])
    try:
        call: Call = pickle.loads((Path(sys.argv[1]) / CALL).read_bytes())
        sys.path[:] = [*call.path, *(entry for entry in sys.path if entry not in call.path)]
        module, name = call.address.split(":", 1)
        found = world.found()
        assert found is not None, "the agent sets RANK and WORLD_SIZE"
        with world.joined(found, call.device, call.timeout_s):
            function: Any = getattr(importlib.import_module(module), name)
            function(*pickle.loads(call.packed))
    except BaseException as error:  # told to whoever started the ranks, who tells the user; nothing is hidden
        failures.write(folder, rank, error)
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        # without the interpreter's own ending, which may wait for threads of a process group that has lost its partners
        os._exit(EXIT_CRASH)


if __name__ == "__main__":
    main()
