"""What every data source keeps to: token ids for language models, or batches of inputs and labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from optforge.errors import Problem
from optforge.models.base import Loaded

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class DataSource(Protocol):
    """A frozen dataclass of a data set's YAML keys.

    One whose figures leave a part out for calibration has a method `for_calibration()` too: that part as a source of its own, or None.
    """

    real: bool
    """False for random data, on which no quality is measured."""

    def check(self) -> Iterator[Problem]: ...

    def tokens(self, loaded: Loaded, count: int, seed: int = 0) -> Tensor:
        """The first `count` token ids, int64, shape [count].

        Raises:
            DataError: the data set is missing or shorter than `count`; says both numbers.
        """
        ...

    def batches(self, loaded: Loaded, count: int, batch_size: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor | None]]:
        """`count` items in batches: inputs as the model takes them (fp32), and int64 labels or None."""
        ...

    def prompts(self) -> list[str]:
        """Texts to continue in the report's side-by-side generations; empty for anything but text."""
        ...
