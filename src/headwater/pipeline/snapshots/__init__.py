"""Reads whole tables from the database with Spark's tasks, and saves them as snapshots of the lake.

The driver opens and exports one snapshot of the database, and divides the tables into ranges of
blocks. Tasks read these from the server as Arrow. What a snapshot in the lake looks like is in
`lake/snapshots.py`; when one is due is decided in `jobs/snapshot_schedule.py`.
"""
