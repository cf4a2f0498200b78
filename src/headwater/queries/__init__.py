"""Reactive queries and mutations: the functions an application registers, and what they read.

    functions    Query and Mutation: arguments from type hints, results encoded by their types
    context      what a function is given: `ctx.fetch` and who calls
    statements   the SQL that a function ran, and what it reads
    catalog      follows a statement through views, functions and policies
    analysis     asks the database what a statement reads: tables, columns, a row predicate
    predicate    the row predicate out of a statement as the database prints it
    watches      which executions a change may concern
    mutations    runs a mutation: one transaction, with its actor
    events       `hw.on`

The hub executes queries, shares their results and keeps them fresh (`hub.groups`).
"""
