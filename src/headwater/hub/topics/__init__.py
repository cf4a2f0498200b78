"""Topics in the hub: rows that are signalled to a name are read once, and sent to all subscribers.

`registry` routes signals and changes, `topic` is one topic, `rows` reads rows by key, and
`subscription` is one subscriber of it. What an application declares is in `headwater.topics`.
"""
