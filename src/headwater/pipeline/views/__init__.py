"""Streaming views: a PySpark function over tables, whose result is a table of PostgreSQL.

`definitions` and `aggregates` are what applications use. `function` calls a view's function,
`results` reads what it made, `weighted` and `state` bring changes and joined tables into Spark,
`groups`, `tables` and `store` write the result to PostgreSQL. `sink` connects a view to its stream;
`catalog` lists and removes views.
"""
