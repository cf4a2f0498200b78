"""Runs the benchmarks: `python -m benchmarks [--large]`.

A peer that is not installed is named in the report, and ours is measured without it.
`benchmarks.sources` needs MariaDB, and runs alone.
"""

from __future__ import annotations

import sys

from benchmarks import (
    capture,
    debezium,
    fanout,
    gateway,
    groups,
    hostile,
    live,
    loop,
    many_tables,
    past,
    pipeline,
    queries,
    reader,
    reconcile,
    start,
    topics,
    views,
    wal_writers,
)
from benchmarks.measure import report


def main() -> None:
    large = "--large" in sys.argv
    report("What capture costs writers", capture.run(large=large))
    report("What capture from the WAL costs writers", wal_writers.run(large=large))
    report("How fast a reader is", reader.run(large=large))
    report("From commit to client", gateway.run(large=large))
    report("Streams", fanout.run(large=large))
    report("Reactive queries, from commit to client", queries.run(large=large))
    report("What reactive queries cost the hub", groups.run(large=large))
    report("Topics, from signal to viewer", topics.run(large=large))
    report("How long one input keeps the loop busy", loop.run(large=large))
    report("What one hostile user costs another", hostile.run(large=large))
    report("The past of a row, without Spark", past.run(large=large))
    report("The pipeline", pipeline.run(large=large))
    report("The start of the pipeline, in seconds", start.run(large=large))
    report("Beside Debezium", debezium.run(large=large))
    report("Streaming views", views.run(large=large))
    report("Many tables", many_tables.run(large=large))
    report("Reconcile", reconcile.run(large=large))
    live.main()


if __name__ == "__main__":
    main()
