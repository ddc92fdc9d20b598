"""Fixtures that many tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No compiled code from before, none left behind: counts of compiles start at zero."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
