"""What admins ask a gateway beside live data: its tables, its log, a record's history, how a live
query is served. The console's pages show the answers; docs/reference/protocol.md describes them.

Everything here is bounded in rows and time, and reads as Headwater's own database role: an admin
sees all of the log.
"""
