"""The gateway: sessions of clients, access, quotas and calls, over SSE and WebSocket.

`auth` decides who a client is and what it may read, `http` speaks HTTP. The other modules join a
session to the hub and know no HTTP. Evaluating live queries belongs in `headwater.hub` and
`headwater.live`; the messages themselves are in `headwater.protocol`.
"""
