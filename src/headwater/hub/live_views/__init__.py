"""Live queries in the hub: one view for identical queries, maintained by the flushes.

`registry` finds, opens and removes views, `view` is one of them with its subscriptions,
`initial_snapshots` reads first results, `steps` and `delivery` update a view in a flush, and
`background` queries the database where row-level security or memory requires it. How a result
changes is computed in `headwater.live`, which is pure.
"""
