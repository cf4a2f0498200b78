"""Runs sources: reads them, applies their changes to the mirrors and reports their state. A runner
has one source, the supervisor has all sources of a database. What a source is like is in
`headwater.capture.source`, and how a mirror is written in `headwater.capture.mirror`."""
