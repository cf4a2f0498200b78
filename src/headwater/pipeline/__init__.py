"""The data pipeline: every change of the captured tables into a Delta lake, and streaming views.

Each folder imports only the folders above it in this list:

    stream   the log as a Spark stream: source, offsets, checkpoints, progress
    spark    Spark itself: its Java, its session, its log, how other programs use it
    lake     the Delta tables of a lake, and how their files are written
    compaction  joins small files of the lake beside the stream
    reading  requests about the past: state at a moment, changes, history, audit
    replay   writes a table again from its events
    views    streaming views, maintained in PostgreSQL
    tables   the current state and the history of each table, as typed Delta tables
    reconcile  compares tables of the database with the lake, and repairs it
    jobs     what a running pipeline does: streaming queries, snapshots, trimming

`application` runs all of it as a program. `files`, `permissions`, `packages`, `failpoints` and
`job_thread` (the thread of a job beside the streams) are used by all folders; `process` runs a
pipeline as a child process. Installed with `headwater[spark]`.
"""
