"""SQLite files as a source.

`source` is the contract of `headwater.capture.source`: triggers in the file write images of every
changed row into a queue table, whichever program writes. `hooks` is the other way, for one process:
apsw's hooks call a function with each committed transaction. The mirror and the log are elsewhere.
"""
