"""Runs queries and mutations in the database: connections, transactions, statements and errors.

`runner` and `mutations` run one function each within its time. `impersonation` sets the database
role and claims of a transaction, `chunked_fetch` sends one statement, `idempotent_requests` stores
results by key, and `error_mapping` makes the error that a caller gets. What a function is and which
arguments it takes belongs in `headwater.queries`; sharing results of live subscriptions belongs in
`headwater.hub`.
"""
