"""Headwater turns a database into live data."""

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from headwater.app import Headwater
    from headwater.client.connection import connect
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

_HOMES = {
    "BlockingContext": "queries.context",
    "ChangeEvent": "queries.events",
    "Context": "queries.context",
    "ErrorEvent": "queries.events",
    "Headwater": "app",
    "Mutation": "queries.functions",
    "MutationContext": "queries.context",
    "Query": "queries.functions",
    "QueryEvent": "queries.events",
    "connect": "client.connection",
}


def __getattr__(name: str) -> Any:
    """Load what is used: a command that asks a running pipeline needs nearly nothing of this."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"headwater.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
