"""The source MySQL and MariaDB: tables read in chunks, changes read from the binary log.

What only turns bytes or text into values is pure and imports no driver: `wire`, `positions`,
`types`, `values`, `statements`, `bindings`, `assembly`. The others talk to the server, through
PyMySQL in threads. Mirrors and the log are elsewhere.
"""
