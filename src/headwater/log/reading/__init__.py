"""Reads changes from the log in whole transactions, in an order that is safe for every row.

`reader` does one read, `follow` reads for ever, `progress` remembers how far a reader is when
connections and servers fail. When to read is decided in `waking/`.
"""
