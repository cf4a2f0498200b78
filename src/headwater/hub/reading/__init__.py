"""What the hub reads from the database beside the log: tables, rights, and rows in a snapshot.

`tables` looks up captured tables, and `row_security` decides what a role may read. `snapshot_pool`
has the connections that import the snapshot of a flush, and `snapshot_queries` reads rows in it.
Reading the log belongs in `headwater.log`.
"""
