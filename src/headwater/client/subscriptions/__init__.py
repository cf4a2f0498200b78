"""The objects that a program holds for its subscriptions, one module for each kind.

`subscription` has the base class, live queries and change feeds; `results`, `topics` and `channels`
have the others. They wait for messages and hand out values. Folding messages into a state belongs
in `client.state`, sending them in `client.connection`.
"""
