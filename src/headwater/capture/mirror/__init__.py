"""Mirrors: the tables in PostgreSQL that equal tables of a source. Here is how a mirror is
created, copied, changed and removed, and what the database stores about sources. Nothing here reads
a source: that is `headwater.capture.running`."""
