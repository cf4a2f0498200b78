"""Joins the small files of a lake beside the stream, so that requests open few files.

`choice` decides which files to join; it is pure. `rewrite` joins files of `events`, ordered by
table, and `job` does it while a pipeline runs. The rows of a Delta table stay the same, and so do
the batches and the offset that it knows.
"""
