"""Runs every benchmark: `python -m benchmarks [--large]`."""

from __future__ import annotations

import sys

from benchmarks import (
    capture,
    fanout,
    gateway,
    groups,
    hostile,
    live,
    loop,
    past,
    pipeline,
    queries,
    reader,
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
    report("Streaming views", views.run(large=large))
    live.main()


if __name__ == "__main__":
    main()
