"""Reactive queries in the hub: functions that run again when what they read has changed.

`registry` holds the groups of equal calls, `group` is one of them with its subscriptions,
`execution` runs a function, `query_pool` and `replica_pool` say on which connection. What a
statement reads is found out in `headwater.queries.analysis`.
"""
