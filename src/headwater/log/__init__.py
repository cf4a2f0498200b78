"""The log of changes: the table that capture writes to, and everything that reads it.

`reading/` reads changes as an application receives them, `waking/` says when to read. The modules
here say what a position means: which changes are between two positions, whether the log still has
them, and which positions consumers saved. Live queries and the pipeline build on this; nothing here
knows them.
"""
