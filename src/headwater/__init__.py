"""Headwater turns a database into live data.

What is named here is imported when it is first used: a Spark worker needs little of it, and there
are many of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.app import Headwater
    from headwater.client.connection import connect
    from headwater.errors import (
        Behind,
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
    from headwater.gateway.access import AccessRequest, Allow
    from headwater.identity import Identity
    from headwater.live.filter import Filter, c
    from headwater.model import Actor, Change, Column, Position, Table, Transaction
    from headwater.queries.context import BlockingContext, Context, MutationContext
    from headwater.queries.events import ChangeEvent, ErrorEvent, GapEvent, QueryEvent
    from headwater.queries.functions import Mutation, Query

__version__ = "0.1.0.dev0"

__all__ = [
    "AccessRequest",
    "Actor",
    "Allow",
    "Behind",
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
    "GapEvent",
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

_MODULES = {
    "headwater.app": ("Headwater",),
    "headwater.client.connection": ("connect",),
    "headwater.errors": (
        "Behind",
        "CaptureError",
        "ConfigError",
        "ConnectionFailed",
        "DatabaseError",
        "Diverged",
        "EmbeddedError",
        "Forbidden",
        "FunctionFailed",
        "HeadwaterError",
        "InvalidQuery",
        "LimitExceeded",
        "NotFound",
        "NotInstalled",
        "PermissionMissing",
        "Refused",
        "ResultError",
        "ResyncRequired",
        "TimedOut",
        "Unauthorized",
        "Unavailable",
    ),
    "headwater.gateway.access": ("AccessRequest", "Allow"),
    "headwater.identity": ("Identity",),
    "headwater.live.filter": ("Filter", "c"),
    "headwater.model": ("Actor", "Change", "Column", "Position", "Table", "Transaction"),
    "headwater.queries.context": ("BlockingContext", "Context", "MutationContext"),
    "headwater.queries.events": ("ChangeEvent", "ErrorEvent", "GapEvent", "QueryEvent"),
    "headwater.queries.functions": ("Mutation", "Query"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
