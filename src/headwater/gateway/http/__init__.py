"""HTTP, SSE and WebSocket: the ASGI app, its server, requests, streams and transports.

What requests mean is decided in `headwater.gateway`; here is how they are carried.
"""
