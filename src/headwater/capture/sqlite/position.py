"""Where a reader of the queue is.

A position names the last queue row that was read. That row stays in the queue until a later one is
acknowledged, so a position can be verified: the row must exist, with the same time. If it does not,
the queue was emptied, or the file was replaced by another one or by an older copy.
"""

from __future__ import annotations

import msgspec

from headwater.errors import PositionLost


class QueuePosition(msgspec.Struct, frozen=True):
    """`generation` is the random name of the queue. `epoch` counts changes of captured tables'
    columns; a reader with an older one has not received all `SchemaChange` yet.

    >>> position = QueuePosition("5f1c", 42, "2461363.0", 1)
    >>> str(position)
    '5f1c/42/2461363.0/1'
    >>> QueuePosition.parse(str(position)) == position
    True
    """

    generation: str
    id: int
    at: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.generation}/{self.id}/{self.at}/{self.epoch}"

    @classmethod
    def parse(cls, text: str) -> QueuePosition:
        try:
            generation, id, at, epoch = text.split("/")
            return cls(generation, int(id), at, int(epoch))
        except ValueError:
            raise PositionLost(
                f"{text!r} is not a position of a SQLite queue",
                hint="copy the tables again: headwater source resnapshot NAME",
            ) from None

    def contains(self, other: QueuePosition) -> bool:
        return self.generation == other.generation and self.id >= other.id
