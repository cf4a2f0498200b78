"""Topics in the hub: one query for all subscribers of a name, run once a signal or change.

`registry` routes signals and changes, `topic` is one topic, `rows` reads rows by key, and
`subscription` is one subscriber of it. What an application declares is in `headwater.topics`.
"""
