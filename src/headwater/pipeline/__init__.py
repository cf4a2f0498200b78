"""The data pipeline: every change of the captured tables into a Delta lake, and streaming views.

Each folder imports only the folders above it in this list:

    stream   the log as a Spark stream: source, offsets, checkpoints, progress
    spark    Spark itself: its Java, its session, its log, how other programs use it
    lake     the Delta tables of a lake, and how their files are written
    reading  requests about the past: state at a moment, changes, history, audit
    replay   writes a table again from its events
    views    streaming views, maintained in PostgreSQL
    jobs     what a running pipeline does: streaming queries, snapshots, trimming

`application` runs all of it as a program. `files`, `permissions`, `packages` and `failpoints` are
used by all folders; `process` runs a pipeline as a child process. Installed with
`headwater[spark]`.
"""
