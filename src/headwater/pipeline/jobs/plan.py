"""The plan of a pipeline: its streams and its settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import msgspec

from headwater import limits
from headwater.errors import ConfigError
from headwater.pipeline.jobs.events_sink import EventsSink
from headwater.pipeline.lake import events
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.stream.checkpoints import Checkpoint
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.sink import StreamSink
from headwater.pipeline.views.definitions import StreamingView
from headwater.pipeline.views.sink import ViewSink

LOOK_SECONDS = 0.2
"""How often a running pipeline checks its streams."""

_VIEW_SECONDS = 0.05
"""How often the stream of a view looks for changes."""


VIEW_PREFIX = "view."
"""The stream of view `revenue` is called `view.revenue`."""

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
    view: str | None = None
    """The view that it maintains, if any."""

    reads_itself: bool = False
    """Whether the sink reads the log between a batch's offsets itself. Spark's batch then has no
    rows, and costs next to nothing to plan."""


def _last_event(lake: Lake) -> Offset | None:
    return events.last_offset(lake.events_path)


EVENTS = StreamJob("events", EventsSink, _last_event, reads_itself=True)

JOBS: tuple[StreamJob, ...] = (EVENTS,)


def view_job(view: StreamingView) -> StreamJob:
    """The stream of a view. A view of several tables reads whole transactions only: a join must
    have the same transactions of each of its tables."""
    return StreamJob(
        f"{VIEW_PREFIX}{view.name}",
        partial(ViewSink, view),
        tables=view.sources,
        seconds=_VIEW_SECONDS,
        rows_max=_EVERYTHING if len(view.tables) > 1 else None,
        view=view.name,
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


def chosen(names: Sequence[str], jobs: tuple[StreamJob, ...] = JOBS) -> tuple[StreamJob, ...]:
    """The jobs of these names, or all where no name is given. ConfigError for an unknown name."""
    known = {job.name: job for job in jobs}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"the pipeline has no stream {name!r}", hint=f"It has: {', '.join(known)}."
            )
    return tuple(known[name] for name in names) or jobs
