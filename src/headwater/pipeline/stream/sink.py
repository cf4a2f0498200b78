"""The contract between a stream and what it writes to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.pipeline.stream.offsets import Offset

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame


class StreamSink:
    """Takes the batches of a stream. A new sink is made for every start of the stream.

    A batch may be repeated: after a crash, or when it was written but not yet recorded as done. It
    then has the same rows and the same number, and must take effect once.
    """

    @property
    def begin(self) -> Offset | None:
        """Where a new stream begins, if the sink decides it."""
        return None

    @property
    def is_new_stream(self) -> bool:
        """Whether the checkpoint from before is obsolete, and must be removed."""
        return False

    def write(self, batch: DataFrame, batch_id: int) -> int | None:
        """Write a batch. Returns how many changes it had; None for Spark's own count."""
        raise NotImplementedError

    def contents(self) -> list[pa.Table]:
        """The contents of the batches since the last call, as `audit.counted` makes them; nothing
        for sinks that do not count."""
        return []

    def close(self) -> None:
        """Called once, when the stream has ended or failed."""
