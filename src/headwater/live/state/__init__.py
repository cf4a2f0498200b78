"""The result of one live query in memory, and how a change alters it.

`window` has the first rows in order, `streamed` the keys of matching rows without order. `steps`
finds the deltas between two lists of keys, `comparison` the difference from the database, `layout`
how a row is stored, and `sizes` the memory it takes. What a query is belongs in `live.query`; the
subscribers of a result belong in `headwater.hub.live_views`.
"""
