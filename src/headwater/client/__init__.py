"""The Python client of a gateway: live queries, change feeds, queries, mutations, topics, channels.

`connection` connects and reconnects, `transports` sends messages over WebSocket or SSE, and
`blocking` is the same client without an event loop. The objects that programs use for subscriptions
are in `subscriptions`, `results`, `channels` and `topics`; their state, without I/O, is in
`session` and `state`. Programs import public names from `headwater`.
"""
