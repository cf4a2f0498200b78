"""Reactive queries and mutations: the functions an application registers, and what they read.

    registry     what an application has registered, by name
    functions    Query and Mutation, as they are called
    arguments    from type hints; what tells two calls apart
    results      encoded by their types (`types`: what is known of these)
    context      what a function is given: `ctx.fetch` and who calls
    placeholders `%s` and `%(name)s` as the server has them
    sending      one statement and its rows, within bounds
    statements   the SQL that a function ran, and what it reads
    catalog      follows a statement through views, functions and policies
    analysis     asks the database what a statement reads: tables, columns, a row predicate
    predicate    the row predicate out of a statement as the database prints it
    watches      which executions a change may concern
    acting       as whom a transaction acts: role, claims, actor
    pool         connections that go back as they came
    running      a function within its time; queries called from Python
    mutations    runs a mutation: one transaction, with its actor
    failures     what a caller is told when a function fails
    events       `hw.on`

The hub executes queries, shares their results and keeps them fresh (`hub.groups`).
"""
