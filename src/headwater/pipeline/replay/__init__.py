"""Replay: builds a table again from its events, or repeats its changes in another table.

`replay` has the operations, `targets` the table in PostgreSQL that a replay writes to.
"""
