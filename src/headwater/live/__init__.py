"""Live queries, maintained: which queries a change touches, and what it does to each result.

Pure. Nothing here awaits, reads a clock or does I/O; where memory cannot know, it says what to ask
the database (`needs`), and the shell that drives it brings the answer. Read it in this order:

    kinds            what memory knows of each column type
    columns          why a column cannot be used
    filter           conditions: the tree, its Python and its JSON form
    filter_check     … against a table: columns exist, values have the column's type
    filter_compile   … as a Python function of a row
    filter_sql       … as SQL with bound values
    filter_terms     … as the index terms the router files them under
    order            sort keys that compare as PostgreSQL does
    layout           how a window stores a row
    query            a live query: table, filter, order, limit, cursor, columns, mode
    statements       the three questions put to the database
    window           the ordered first N, exact after every transaction
    streamed         membership without order
    router           which queries may a change touch?
    view             the state that identical queries share
"""
