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
    FunctionFailed,
    HeadwaterError,
    InvalidQuery,
    LimitExceeded,
    NotFound,
    NotInstalled,
    PermissionMissing,
    Refused,
    ResultError,
    ResyncRequired,
    TimedOut,
    Unauthorized,
    Unavailable,
)
from headwater.identity import Identity
from headwater.live.filter import Filter, c
from headwater.model import Actor, Change, Column, Position, Table, Transaction
from headwater.queries.context import BlockingContext, Context, MutationContext
from headwater.queries.events import ChangeEvent, ErrorEvent, QueryEvent
from headwater.queries.functions import Mutation, Query

__version__ = "0.1.0.dev0"

__all__ = [
    "Actor",
    "BlockingContext",
    "CaptureError",
    "Change",
    "ChangeEvent",
    "Column",
    "ConfigError",
    "ConnectionFailed",
    "Context",
    "DatabaseError",
    "Diverged",
    "EmbeddedError",
    "ErrorEvent",
    "Filter",
    "Forbidden",
    "FunctionFailed",
    "Headwater",
    "HeadwaterError",
    "Identity",
    "InvalidQuery",
    "LimitExceeded",
    "Mutation",
    "MutationContext",
    "NotFound",
    "NotInstalled",
    "PermissionMissing",
    "Position",
    "Query",
    "QueryEvent",
    "Refused",
    "ResultError",
    "ResyncRequired",
    "Table",
    "TimedOut",
    "Transaction",
    "Unauthorized",
    "Unavailable",
    "__version__",
    "c",
    "connect",
]
