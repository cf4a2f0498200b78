"""The HTTP API for admins: tables, the log, the history of a row, how a live query is served.

The console shows the answers; docs/reference/protocol.md describes them.

Everything here is bounded in rows and time, and reads as Headwater's own database role: an admin
sees all of the log. `status` is also what `headwater status` prints.
"""
