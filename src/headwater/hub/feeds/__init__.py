"""Change feeds in the hub, and the change events that the application itself receives.

`registry` hands the changes of each flush to the feeds that want them, `subscription` is one
subscriber: live, catching up from the log, or paused.
"""
