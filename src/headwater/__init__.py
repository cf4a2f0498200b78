"""Headwater turns a database into live data."""

from headwater.app import Headwater
from headwater.errors import (
    CaptureError,
    ConfigError,
    DatabaseError,
    Diverged,
    EmbeddedError,
    HeadwaterError,
    InvalidQuery,
    NotInstalled,
    PermissionMissing,
    ResyncRequired,
)
from headwater.live.filter import c
from headwater.model import Actor, Change, Column, Position, Table, Transaction

__version__ = "0.1.0.dev0"

__all__ = [
    "Actor",
    "CaptureError",
    "Change",
    "Column",
    "ConfigError",
    "DatabaseError",
    "Diverged",
    "EmbeddedError",
    "Headwater",
    "HeadwaterError",
    "InvalidQuery",
    "NotInstalled",
    "PermissionMissing",
    "Position",
    "ResyncRequired",
    "Table",
    "Transaction",
    "__version__",
    "c",
]
