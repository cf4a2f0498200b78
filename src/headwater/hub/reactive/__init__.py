"""Reactive queries in the hub: functions that run again when the rows they read have changed.

`registry` has the groups of equal calls, and `group` is one of them with its subscriptions.
`execution` runs a function, `query_pool` and `replica_pool` have the connections, and `placement`
chooses between them. What a statement reads is found in `headwater.queries.analysis`.
"""
