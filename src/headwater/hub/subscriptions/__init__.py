"""What all kinds of subscriptions share: the contract with the gateway, how they begin and end.

`subscriber` is the contract, `subscription` the base class, and `catch_up` the state machine of a
subscription that reads the log before it joins the flushes. `costs` counts what a view costs. What
only one kind of subscription does belongs in the folder of that kind.
"""
