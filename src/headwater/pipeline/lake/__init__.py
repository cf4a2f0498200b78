"""The Delta tables of a lake: their schemas, how their files are written, and their upkeep.

There is a module for each table (`events`, `snapshots`, `shapes`, `gaps`, `audit`). `delta` and
`parquet` write tables of any kind, `schemas` and `keys` read rows. What is computed from the tables
is in `headwater.pipeline.reading`; what a running pipeline does with them is in
`headwater.pipeline.jobs`.
"""
