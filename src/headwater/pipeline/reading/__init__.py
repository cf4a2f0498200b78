"""Reading the past from a lake: the state of a table at a moment, changes, row histories, audits.

`lake` has the class that people use. `requests` are the same operations as messages, and
`request_server` answers them in a running pipeline. Nothing here writes to the lake, except for
snapshots that `Lake` is asked to make.
"""
