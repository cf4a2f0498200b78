"""The state of each subscription in a client, folded from messages. Pure: no I/O and no clock.

One module for each kind of subscription, and `replica` for rows and deltas. Which subscription a
message is for is decided in `client.session`; waiting and sending belong in `client.connection`.
"""
