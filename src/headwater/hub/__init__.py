"""The hub: follows the log and sends each change to the subscriptions that it concerns.

`hub` joins everything, `flush` takes the new changes to the parts, and `part` is the contract
between them. Each kind of subscription has a folder: `live_views`, `reactive`, `topics`, `feeds`.
`subscriptions` has what these share, and `reading` what they ask the database. How a result
changes is computed in `headwater.live`; clients and tokens belong in `headwater.gateway`.
"""
