"""Compares tables of the database with the lake, both at one position, and repairs the lake.

`row_hashes` computes the same number for a row in PostgreSQL and in Spark, `comparison` compares
one table, and `tables` all of them, each alone. `repair` makes a snapshot and records a gap;
`drift` is the Delta table with the outcomes. `job` does it on a schedule, beside the streams.
"""
