"""Capture: how the changes of a database get into the log.

There is one way, triggers in PostgreSQL (`postgres`). Reading the log is in `headwater.log`.
"""
