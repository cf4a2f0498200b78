"""Channels: messages and presence between clients, through every gateway. Nothing is stored.

definitions   what an application declares: names, and who may join and publish
notes         what gateways say to each other, and how it fits into NOTIFY
presence      who is where, as one gateway knows it
bus           one connection that speaks, and one that listens
rooms         the channels that somebody follows here
"""
