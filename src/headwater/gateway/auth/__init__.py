"""Who a client is and what it may do: tokens, keys, tickets, admins, authorization.

Nothing here knows HTTP; `headwater.gateway.http` passes in what a request shows.
"""
