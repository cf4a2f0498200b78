"""Reactive queries and mutations: the functions that an application registers.

`registry` and `functions` hold what is registered; `arguments`, `results` and `types` check and
encode values; `context` is what a function gets; `events` are handlers of `hw.on`. `execution` runs
functions in the database, and `analysis` finds which tables and rows a statement reads. Sharing and
updating results belongs in `headwater.hub.reactive`.
"""
