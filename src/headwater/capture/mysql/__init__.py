"""The source MySQL and MariaDB: tables read in chunks, changes read from the binary log.

Everything that only turns bytes or text into values is pure (`positions`, `events`, `rows`,
`values`, `types`, `statements`, `assembly`) and imports no driver. `connection`, `describe`,
`checks`, `binlog` and `source` talk to the server, through PyMySQL in threads. Mirrors and the log
are elsewhere.
"""
