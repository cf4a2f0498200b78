"""Streaming views: a function in PySpark over tables, kept in a table of PostgreSQL.

aggregates   what views are made of, as Spark columns
definitions  what a view is
results      what a view's function made: columns, types, whether it can be kept
weighted     changes as rows that come and go
function     calls a view's function
state        the rows of joined tables, kept in Spark
groups       what a batch adds to a view, as PostgreSQL reads it
tables       the PostgreSQL side of a view
catalog      views for people
sink         keeps a view up to date
"""
