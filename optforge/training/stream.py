"""The batches of a training, in an order that a seed decides and from a position that can be stored.

Every pass over the data has an order of its own. The order depends on the seed and on the pass alone, never on how often the stream
was stopped, so that a training that is resumed sees what it would have seen. With several ranks each takes its part of
every batch; the position counts global batches, so it means the same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from optforge.spec import Json

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Arguments of one forward pass, and the labels of its items where the model does not take them itself."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    labels: Tensor | None = None


class Stream:
    """Endless batches over `items` items."""

    def __init__(
        self, items: int, take: Callable[[Sequence[int]], Batch], *, batch_size: int, seed: int = 0, rank: int = 0, ranks: int = 1
    ) -> None:
        """
        Args:
            items: how many there are; a batch larger than that holds some of them twice.
            take: makes a batch of the items of these numbers.
            batch_size: items of one rank's batch.
            seed: decides the order.
            rank, ranks: which part of each global batch of `ranks * batch_size` items is handed out.
        """
        assert items > 0, "a stream needs an item"
        self.items, self.take, self.batch_size, self.seed, self.rank, self.ranks = items, take, batch_size, seed, rank, ranks
        self.position = 0
        """Global batches handed out so far."""
        self._pass: tuple[int, list[int]] | None = None

    def next(self) -> Batch:
        """The next batch."""
        first = (self.position * self.ranks + self.rank) * self.batch_size
        self.position += 1
        return self.take([self._item(first + offset) for offset in range(self.batch_size)])

    def again(self, *, seed: int | None = None) -> Stream:
        """The same data from the beginning, in the order of another seed where one is given."""
        return Stream(
            self.items,
            self.take,
            batch_size=self.batch_size,
            seed=self.seed if seed is None else seed,
            rank=self.rank,
            ranks=self.ranks,
        )

    def state_dict(self) -> dict[str, Json]:
        """What decides everything that follows."""
        return {"position": self.position, "seed": self.seed, "items": self.items, "global_batch": self.batch_size * self.ranks}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Goes to a stored position.

        Raises:
            ValueError: it is that of other data or of another global batch; says both numbers.
        """
        own = self.state_dict()
        for name, words in (("items", "items of data"), ("global_batch", "items in a global batch")):
            if state[name] != own[name]:
                raise ValueError(f"the stored training had {state[name]} {words}, this one has {own[name]}")
        self.position, self.seed, self._pass = int(state["position"]), int(state["seed"]), None

    def _item(self, number: int) -> int:
        """The item that is the `number`th of the endless order."""
        turn, place = divmod(number, self.items)
        if self._pass is None or self._pass[0] != turn:
            import torch

            draw = torch.Generator().manual_seed(1_000_003 * self.seed + turn)
            self._pass = turn, torch.randperm(self.items, generator=draw).tolist()
        return self._pass[1][place]
