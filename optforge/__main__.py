"""`python -m optforge` is the console script, for environments whose scripts are not on the path."""

from __future__ import annotations

from optforge.cli.app import main

main()
