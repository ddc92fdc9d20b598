"""Fixtures that many tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


def pytest_configure() -> None:
    """A shell that starts the tests in the background ignores interrupts, and every command that a test starts would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No compiled code from before, none left behind: counts of compiles start at zero."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
