"""The plan of a pipeline: its streams and its settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import msgspec

from headwater import limits
from headwater.metrics import PipelineMetrics
from headwater.pipeline.jobs.events_sink import EventsSink
from headwater.pipeline.lake import events
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.stream.checkpoints import Checkpoint
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.sink import StreamSink
from headwater.pipeline.tables.choice import Choice
from headwater.pipeline.views.definitions import StreamingView
from headwater.pipeline.views.sink import ViewsSink

LOOK_SECONDS = 0.2
"""How often a running pipeline checks its streams."""

_VIEW_SECONDS = 0.05
"""The least pause between two batches of the stream of all views."""

VIEWS = "views"
"""The name of the stream of all views."""

_EVERYTHING = 2**62


class StreamJob(msgspec.Struct, frozen=True):
    """A stream from the log to a sink. `begin` says where a new stream begins; None for the
    beginning of the log."""

    name: str
    sink: Callable[[Lake, str, Checkpoint], StreamSink]
    begin: Callable[[Lake], Offset | None] = lambda lake: None
    tables: tuple[str, ...] = ()
    seconds: float | None = None
    """The pause between two batches; None for the pipeline's."""
    rows_max: int | None = None
    """The most changes in one batch; None for the pipeline's."""


def _last_event(lake: Lake) -> Offset | None:
    return events.last_offset(lake.events_path)


EVENTS = StreamJob("events", EventsSink, _last_event)

JOBS: tuple[StreamJob, ...] = (EVENTS,)


def views_job(views: Sequence[StreamingView]) -> StreamJob:
    """The stream of all views. It reads whole transactions only: no view ever shows a part of
    one."""
    return StreamJob(
        VIEWS, partial(ViewsSink, tuple(views)), seconds=_VIEW_SECONDS, rows_max=_EVERYTHING
    )


class PipelinePlan(msgspec.Struct, frozen=True):
    """The streams and settings of a pipeline. With `once` it ends when every change up to now is
    written."""

    url: str
    lake: Lake
    jobs: tuple[StreamJob, ...] = JOBS
    once: bool = False
    seconds: float = 1.0
    rows_max: int | None = None
    """The most changes in one batch; None for the source's own bound."""

    vacuum_keep: timedelta = timedelta(days=7)
    snapshot_events: int = limits.LAKE_SNAPSHOT_EVENTS
    """The number of changes of a table after which another snapshot is made; 0 for no snapshots."""

    retention: timedelta | None = None
    """How long events are stored; None for ever."""

    metrics: PipelineMetrics = msgspec.field(default_factory=PipelineMetrics)

    reconcile: timedelta | None = None
    """How often each table is compared with the lake; None for never."""

    tables: Choice | None = None
    """The typed tables to keep; None for none."""
