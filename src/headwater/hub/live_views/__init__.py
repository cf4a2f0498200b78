"""Live queries in the hub: one view for identical queries, maintained by the flushes.

`registry` finds, opens and removes views, `view` is one of them with its subscriptions,
`initial_snapshots` reads first results, `steps` and `delivery` take a view through a flush, and
`background` asks the database what row-level security and memory leave open. How a result changes
is computed in `headwater.live`, which is pure.
"""
