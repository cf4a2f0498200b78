"""All metrics of Headwater; docs/reference/metrics.md describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headwater.protocol import ResetReason

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """The metrics of a gateway. Each object has its own registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"headwater_{name}", help, labels, registry=registry)

        def gauge(name: str, help: str, *labels: str) -> Gauge:
            return Gauge(f"headwater_{name}", help, labels, registry=registry)

        def histogram(name: str, help: str) -> Histogram:
            return Histogram(f"headwater_{name}", help, registry=registry, buckets=_SECONDS)

        self.flushes = counter("flushes_total", "Flushes with changes")
        self.flush_seconds = histogram("flush_seconds", "Time from reading the log to sending")
        self.lag_seconds = histogram("lag_seconds", "Time from the write of a change to its frame")
        self.changes = counter("changes_total", "Changes read from the log")
        self.questions = counter("questions_total", "Statements that flushes executed", "kind")
        self.resyncs = counter("resyncs_total", "Views that were read again", "reason")
        self.reconcile_checks = counter(
            "reconcile_checks_total", "Comparisons of results with the database", "kind"
        )
        self.reconcile_skipped = counter(
            "reconcile_skipped_total", "Comparisons that were skipped", "reason"
        )
        self.reconcile_drift = counter(
            "reconcile_drift_total", "Comparisons that found and repaired a difference", "kind"
        )
        for kind in ("live", "topic", "query"):  # alerts need the value 0 to see an increase
            self.reconcile_drift.labels(kind)
        for reason in get_args(ResetReason):
            self.resyncs.labels(reason)
        self.views = gauge("views", "Live queries, each shared one counted once")
        self.views_lagging = gauge(
            "views_lagging", "Live queries that have been behind the flushes for more than a second"
        )
        self.lagging_seconds = gauge(
            "views_lagging_seconds", "For how long the oldest lagging live query has been behind"
        )
        self.query_groups = gauge("query_groups", "Reactive queries, each shared one counted once")
        self.query_executions = counter(
            "query_executions_total", "Executions of reactive queries", "reason"
        )
        self.query_seconds = histogram("query_seconds", "Time of one execution of a query")
        self.query_failures = counter(
            "query_failures_total", "Executions of queries that failed", "code"
        )
        self.query_cache_hits = counter("query_cache_hits_total", "Calls answered from the cache")
        self.topics = gauge("topics", "Topics with followers")
        self.signals = counter("signals_total", "Signals read for topics with followers")
        self.signal_ids_refused = counter(
            "signal_ids_refused_total", "Signalled ids that cannot be a key of their table"
        )
        self.channels = gauge("channels", "Channels with followers")
        self.channel_members = gauge("channel_members", "Members of channels at this gateway")
        self.channel_messages = counter(
            "channel_messages_total", "Messages received for channels with followers"
        )
        self.bus_up = gauge("bus_up", "1 while messages of other gateways are received")
        self.bus_refused = counter(
            "bus_refused_total", "Invalid messages between gateways that were ignored"
        )
        self.replica_up = gauge("replica_up", "1 while queries are executed on the replica")
        self.replica_fallbacks = counter(
            "replica_fallbacks_total", "Queries executed on the database instead of the replica"
        )
        self.database_up = gauge("database_up", "1 while the log is being followed")
        self.subscriptions = gauge("subscriptions", "Open subscriptions", "kind")
        self.sessions = gauge("sessions", "Open connections", "transport")
        self.opened = counter("sessions_opened_total", "Connections opened", "transport")
        self.overflows = counter("overflows_total", "Subscriptions that fell behind", "policy")
        self.memory_bytes = gauge(
            "memory_bytes", "Bytes for subscriptions and clients, shared bytes counted once"
        )
        self.memory_largest_bytes = gauge(
            "memory_largest_bytes", "Bytes for the user with the most"
        )
        self.memory_shed = counter(
            "memory_shed_total",
            "Subscriptions and connections ended because of their memory",
            "code",
        )
        for code in ("bytes_per_user", "bytes_total"):
            self.memory_shed.labels(code)
        self.stalled_bytes = gauge("stalled_bytes", "Bytes waiting for slow clients")
        self.closed = counter(
            "sessions_closed_total", "Connections that the gateway closed", "reason"
        )
        self.refused = counter("refused_total", "Requests refused", "code")
        self.source_state = gauge(
            "source_state", "1 for the state that a source is in", "source", "state"
        )
        self.source_lag_seconds = gauge(
            "source_lag_seconds", "From the last commit at a source to its commit here", "source"
        )
        self.source_lag_bytes = gauge(
            "source_lag_bytes", "Bytes that a source stores for Headwater", "source"
        )
        self.source_up = gauge("source_up", "1 while a process runs the source", "source")
        self.source_copied_rows = gauge(
            "source_copied_rows", "Rows of a source that were copied", "source"
        )
        self.source_estimated_rows = gauge(
            "source_estimated_rows", "Rows of a source to copy, by its own estimate", "source"
        )
        self.source_tables_copying = gauge(
            "source_tables_copying", "Tables of a source that are being copied", "source"
        )
        self.source_changes = counter(
            "source_changes_total", "Changes of a source that were applied", "source"
        )
        self.source_transactions = counter(
            "source_transactions_total", "Transactions of a source that were applied", "source"
        )
        self.cursor_lag_seconds = gauge(
            "cursor_lag_seconds",
            "Age of the first change that is after a cursor",
            "cursor",
        )
        self.cursor_left_seconds = gauge(
            "cursor_left_seconds", "Time until the log is trimmed past a cursor", "cursor"
        )
        self.cursor_lost = gauge("cursor_lost", "1 if the log was trimmed past a cursor", "cursor")

    def render(self) -> bytes:
        """The text for Prometheus."""
        return generate_latest(self.registry)


class PipelineMetrics:
    """The metrics of a running pipeline: of its streams and the jobs beside them, of the Delta
    tables of its lake, and of the tables that it compares with the lake."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def gauge(name: str, help: str, *labels: str) -> Gauge:
            names = labels or ("stream",)
            return Gauge(f"headwater_pipeline_{name}", help, names, registry=registry)

        self.up = gauge("up", "1 while the stream runs")
        self.changes = gauge("changes", "Changes processed since the start")
        self.input_rate = gauge("input_rate", "Changes per second that arrived")
        self.processed_rate = gauge(
            "processed_rate", "Changes per second that were processed during batches"
        )
        self.behind_changes = gauge("behind_changes", "Changes that are not processed yet")
        self.behind_seconds = gauge(
            "behind_seconds", "Age of the oldest change that is not processed yet"
        )
        self.restarts = gauge("restarts", "How often the stream was restarted")
        self.state = gauge("state", "1 for the state that the stream is in", "stream", "state")
        self.error = gauge("error", "1 while the stream reports an error")
        self.lake_files = gauge("lake_files", "Files of a table of the lake", "table")
        self.lake_small_files = gauge("lake_small_files", "Those below a megabyte", "table")
        self.lake_bytes = gauge("lake_bytes", "Bytes of these files", "table")
        self.lake_commit_timestamp_seconds = gauge(
            "lake_commit_timestamp_seconds", "Time of the last commit to the table", "table"
        )
        self.drift_rows = gauge(
            "drift_rows", "Rows that differ from the lake and are not repaired", "table"
        )
        self.compared_timestamp_seconds = gauge(
            "compared_timestamp_seconds", "Time when the table was last compared", "table"
        )

    def render(self) -> bytes:
        """The text for Prometheus."""
        return generate_latest(self.registry)


class Totals:
    """Sets a counter with one label to totals that are counted elsewhere. One that became smaller
    is of another thing with the same name: it begins again."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._totals: dict[str, int] = {}

    def set(self, totals: Mapping[str, int]) -> None:
        """Set all values; names that are not given are forgotten."""
        for name, before in list(self._totals.items()):
            if totals.get(name, -1) < before:
                self._counter.remove(name)
                del self._totals[name]
        for name, now in totals.items():
            self._counter.labels(name).inc(now - self._totals.get(name, 0))
            self._totals[name] = now


def total(counter: Counter) -> int:
    """The sum over all labels."""
    samples = (sample for family in counter.collect() for sample in family.samples)
    return int(sum(sample.value for sample in samples if sample.name.endswith("_total")))


class Quantiles:
    """The median and the 99th percentile of a histogram since the last call."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._before: list[float] = []

    def since_last(self) -> dict[str, float] | None:
        """None if there were no observations."""
        samples = [s for f in self._histogram.collect() for s in f.samples]
        bounds = [float(s.labels["le"]) for s in samples if s.name.endswith("_bucket")]
        counts = [s.value for s in samples if s.name.endswith("_bucket")]
        before, self._before = self._before or [0.0] * len(counts), counts
        seen = [now - then for now, then in zip(counts, before, strict=True)]
        if not seen or not seen[-1]:
            return None
        return {"p50": quantile(bounds, seen, 0.5), "p99": quantile(bounds, seen, 0.99)}


def quantile(bounds: list[float], counts: list[float], share: float) -> float:
    """A quantile from the counts of a histogram's buckets, with linear interpolation between the
    bounds.

    >>> quantile([1, 2, 4, float("inf")], [0, 10, 10, 10], 0.5)
    1.5
    """
    wanted = counts[-1] * share
    low, below = 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count >= wanted:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (wanted - below) / ((count - below) or 1)
        low, below = bound, count
    return low
