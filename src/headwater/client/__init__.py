"""The Python client of a gateway: live queries, change feeds, queries, mutations, topics, channels.

`connection` keeps the connection, `transports` carries it over WebSocket or SSE, and `blocking` is
the same client without an event loop. What a program holds of a subscription is in `subscriptions`;
what the client knows of it, without input or output, in `session` and `state`. Public names are
imported from `headwater`.
"""
