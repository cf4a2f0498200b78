"""Where a stream writes to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.pipeline.offsets import Offset

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame


class Sink:
    """Takes the batches of a stream. One is made for every start of the stream.

    A batch may come again: after a crash, and when it was written but not yet noted as done. It is
    then the same rows under the same number, and must have its effect once.
    """

    @property
    def begin(self) -> Offset | None:
        """Where a new stream begins, if the sink is who knows."""
        return None

    @property
    def begins_anew(self) -> bool:
        """Whether what a stream remembers from before means nothing any more."""
        return False

    def write(self, batch: DataFrame, batch_id: int) -> int | None:
        """Returns how many changes it took; None for all that Spark says came in."""
        raise NotImplementedError

    def seen(self) -> list[pa.Table]:
        """What the batches since the last call contained, as `audit.counted` tells it; nothing for
        sinks that do not count."""
        return []

    def close(self) -> None:
        """Called once, when the stream has ended or failed."""
