"""Streaming views: a PySpark function over tables, whose result is a table of PostgreSQL.

`definitions` and `aggregates` are what applications use; `function`, `plans` and `results` read
what an application has defined. `maintenance` builds one view and applies changes to it, which
`weighted` and `source_rows` bring into Spark; `sink` does that for all views, from one stream.
`storage` writes to PostgreSQL; `catalog` lists and removes views.
"""
