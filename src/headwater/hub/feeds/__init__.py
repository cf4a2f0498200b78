"""Change feeds in the hub, and the change events that the application itself receives.

`registry` sends the changes of each flush to the feeds that carry them, `view` is what identical
feeds share, and `subscription` is one subscriber: live, catching up from the log, or paused.
`change_events` calls the handlers of `hw.on("change")`. A feed's filter belongs in
`headwater.live.feed`.
"""
