"""Headwater turns a database into live data."""

from headwater.app import Headwater
from headwater.client.connection import connect
from headwater.errors import (
    CaptureError,
    ConfigError,
    ConnectionFailed,
    DatabaseError,
    Diverged,
    EmbeddedError,
    Forbidden,
    HeadwaterError,
    InvalidQuery,
    LimitExceeded,
    NotFound,
    NotInstalled,
    PermissionMissing,
    ResyncRequired,
    Unauthorized,
    Unavailable,
)
from headwater.identity import Identity
from headwater.live.filter import Filter, c
from headwater.model import Actor, Change, Column, Position, Table, Transaction

__version__ = "0.1.0.dev0"

__all__ = [
    "Actor",
    "CaptureError",
    "Change",
    "Column",
    "ConfigError",
    "ConnectionFailed",
    "DatabaseError",
    "Diverged",
    "EmbeddedError",
    "Filter",
    "Forbidden",
    "Headwater",
    "HeadwaterError",
    "Identity",
    "InvalidQuery",
    "LimitExceeded",
    "NotFound",
    "NotInstalled",
    "PermissionMissing",
    "Position",
    "ResyncRequired",
    "Table",
    "Transaction",
    "Unauthorized",
    "Unavailable",
    "__version__",
    "c",
    "connect",
]
