"""Typed tables: the current state of each captured table and its history, as plain Delta tables
that any engine opens.

`eras` decides what is due, `steps` computes it in Spark, `writes` commits it. `typed_table` does
this for one table, `job` for all of them beside the streams. `columns`, `values` and `layout` say
what the tables look like. How they are used is in docs/howto/lake-tables.md.
"""
