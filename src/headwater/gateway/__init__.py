"""SSE and WebSocket for live queries and change feeds: sessions, auth, quotas, the ASGI app."""
