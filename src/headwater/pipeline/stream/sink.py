"""The contract between a stream and what it writes to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater import limits
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.progress import StreamProgress

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame


class StreamSink:
    """Takes the batches of a stream. A new sink is made for every start of the stream.

    What it has stored is the truth about its progress: the stream begins where the sink ends.
    Spark's checkpoint lasts no longer than the stream, so no batch comes twice. A batch that was
    not stored is planned again.
    """

    @property
    def begin(self) -> Offset | None:
        """Where the stream begins, if the sink decides it."""
        return None

    def write(self, parts: DataFrame, batch_id: int) -> int:
        """Write a batch, given by its parts (`parts.PARTS`). Returns how many changes it had."""
        raise NotImplementedError

    def contents(self) -> list[pa.Table]:
        """The contents of the batches since the last call, as `audit.counted` makes them; nothing
        for sinks that do not count."""
        return []

    def progress(self) -> list[StreamProgress]:
        """The progress of what the sink maintains by itself, such as views. Returns at once."""
        return []

    def finish(self) -> None:
        """Called after the last batch of a stream that ends by itself: wait until all of it is
        written."""

    def close(self, seconds: float = limits.PIPELINE_STOP_SECONDS) -> None:
        """Called once, when the stream has ended or failed. Work that takes longer than this is
        abandoned."""
