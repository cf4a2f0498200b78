"""What a statement reads: tables, columns and rows, found with the database's own parser.

`analyst` answers and caches, `catalog` follows views, functions and policies, `predicate` reads
conditions, `fingerprints` notice alterations, `watches` finds the executions a change may affect.
Running statements belongs in `queries.execution`.
"""
