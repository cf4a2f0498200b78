"""Filters: conditions on the rows of one table, as a tree, in SQL, in Python and in index terms.

All of it is pure. `check` types a filter against its table, `compile` decides rows in memory
exactly as the database does, `sql` writes it for the database. What a query does with the rows that
match belongs in `headwater.live`.
"""
