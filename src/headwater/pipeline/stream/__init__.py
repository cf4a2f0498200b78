"""The log as a Spark stream.

`source` is the PySpark data source, `planning` decides what a batch reads, `parts` are its rows,
`worker` reads them, and `offsets` and `checkpoints` say how far a stream is. `sink` is the contract
of the code that writes its batches, `progress` what a stream reports. The sinks, and the code that
runs streaming queries, are in `headwater.pipeline.jobs` and `headwater.pipeline.views`.
"""
