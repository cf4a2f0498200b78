"""The bytes of a binary log: events, table maps, rows and values.

Everything here is pure: bytes in, values out. It imports no driver and opens no connection. What
the events mean together is in `headwater.capture.mysql.assembly`.
"""
