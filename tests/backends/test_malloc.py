"""Freed memory stays with the process within a session, and is given back after it."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from optforge.backends import malloc

PROGRAM = """
import resource, torch
from optforge.backends import malloc

def faults(count=6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        torch.empty(64 << 20, dtype=torch.uint8).fill_(1)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / count

faults()
usual = faults()
with malloc.kept():
    faults(20)  # until the heap has a place for each block
    kept = faults()
resident = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
print(usual, kept, resident)
"""


@pytest.mark.skipif(malloc.described() != malloc.KEPT, reason="glibc only")
def test_large_results_take_new_pages_outside_of_a_session_and_memory_goes_back_after_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    usual, kept, resident = map(float, done.stdout.split())
    pages = (64 << 20) / resource.getpagesize()
    large = pages / 512  # the system may hand out pages of 2 MiB
    assert usual >= large
    assert kept < 0.6 * usual, "a block that lies between others may take turns with a second one"
    assert resident < 1.5e9
