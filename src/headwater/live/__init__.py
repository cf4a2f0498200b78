"""Live queries: which queries a change affects, and how it changes each result.

Pure: nothing here awaits, reads a clock or does I/O. If memory cannot decide, it returns what to
read from the database (`needs`), and the hub reads the rows. The modules in reading order:

    kinds        how values of each column type are compared in memory
    columns      errors for columns that cannot be used
    filters/     conditions on rows: as a tree, in Python, in SQL, as index terms
    order        sort keys that compare as PostgreSQL does
    query        a live query: table, filter, order, limit, cursor, columns, mode
    statements   the SQL for what memory cannot decide
    state/       the result of a query in memory, exact after every transaction
    intervals    which intervals contain a value
    router       which queries a change may affect
    view         the state that identical queries share
    feed         a filter over changes
"""
