"""Says when to read the log: on NOTIFY when there is little to read, by polling when there is much.

`pace` decides and does no I/O; `waker` and `listener` hold the connections. Reading itself belongs
in `log.reading`.
"""
