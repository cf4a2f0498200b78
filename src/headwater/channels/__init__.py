"""Channels: messages and presence between clients of all gateways, without storage.

`definitions` holds what an application declares. `registry` holds the channels with subscribers at
this gateway, `presence` the members of all gateways. `bus` sends `bus_messages` between gateways by
NOTIFY. Sessions and access checks of clients belong in `headwater.gateway`.
"""
