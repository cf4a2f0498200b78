"""Capture from PostgreSQL's write-ahead log, by logical replication.

`pgoutput` decodes the messages, `replication` reads them from a slot, `spool` puts large
transactions on disk until they commit. `source` is the source for a database elsewhere; tables in
Headwater's own database use the same three parts.
"""
