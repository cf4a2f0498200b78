"""MongoDB as a source: its collections are read with snapshot reads, and followed with a change
stream.

`texts`, `positions`, `columns`, `pipeline` and `transactions` are pure: they turn BSON
values and events into what the contract of a source needs. `connection`, `collections`, `stream`,
`checks` and `source` talk to the server, with PyMongo's asynchronous API. Writing the mirror lies
elsewhere.
"""

try:
    import pymongo as pymongo
except ImportError:  # pragma: no cover
    from headwater.errors import ConfigError

    raise ConfigError(
        "a MongoDB source needs PyMongo, which is not installed",
        hint='Install it: pip install "headwater[mongodb]"',
    ) from None
