"""The HTTP API for the past of single rows: a row as it was at a moment, and its versions.

The rows come from the lake and the log, without Spark (`headwater.pipeline.reading.points`). Users
see what a change feed would show them, and no further back. `access` decides that and is pure;
`reads` bounds time, memory and concurrency; `routes` has the paths.
"""
