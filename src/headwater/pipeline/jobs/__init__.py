"""What a running pipeline does.

`pipeline` supervises the streaming queries that `plan` names, each a `running_stream`, and the jobs
of `background` beside them. `events_sink` and `ingest` write changes to the lake. `snapshot_job`,
`vacuum_job`, `trim` and `resnapshot` look after the lake. The sink of a streaming view is in
`headwater.pipeline.views`.
"""
