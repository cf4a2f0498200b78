"""Topics: an application signals rows, and all viewers get them.

`definitions` and `patterns` hold what an application declares, `access` the functions that decide
who may follow, and `text_streams` writes a text that grows. Reading signalled rows and sending them
belongs in `headwater.hub.topics`.
"""
