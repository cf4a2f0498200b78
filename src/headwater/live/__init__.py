"""Live queries: which queries a change affects, and how it changes each result.

Pure: nothing here awaits, reads a clock or does I/O. Where memory cannot decide, it returns what to
read from the database (`needs`), and the hub brings the rows. Read it in this order:

    kinds        how values of each column type are compared in memory
    columns      errors for columns that cannot be used
    filters/     conditions on rows: as a tree, in Python, in SQL, as index terms
    order        sort keys that compare as PostgreSQL does
    layout       how a window stores a row
    query        a live query: table, filter, order, limit, cursor, columns, mode
    statements   the SQL for what memory cannot decide
    window       the first N rows in order, exact after every transaction
    streamed     the keys of matching rows, without order
    steps        the steps from one list of keys to another
    comparison   the difference between a result and the database
    router       which queries a change may affect
    view         the state that identical queries share
    feed         a filter over changes
    sizes        how much memory a value takes
"""
