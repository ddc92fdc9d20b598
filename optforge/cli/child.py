"""A job of a sweep: `python -m optforge.cli.child run ...` is `optforge run ...` that ends when its sweep ends.

It is the same command as alone, in a fresh interpreter, so that a job gives the figures that it gives alone.
"""

from __future__ import annotations

import sys

from optforge.cli.app import main
from optforge.sweep.process import end_with_sweep

if __name__ == "__main__":
    end_with_sweep()
    sys.argv[0] = "optforge"
    main()
