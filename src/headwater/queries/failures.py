"""What a caller is told when a query or mutation fails.

Our own errors reach the caller as they are. What nobody foresaw becomes an opaque id: the details
are in the log under it, and told to `hw.on("error")`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import errors

from headwater.errors import (
    ConfigError,
    DatabaseError,
    Forbidden,
    FunctionFailed,
    HeadwaterError,
    InvalidQuery,
    ResultError,
    TimedOut,
    Unavailable,
)
from headwater.identity import ANONYMOUS, Identity
from headwater.log.follow import is_lost
from headwater.queries.events import ErrorEvent, Events
from headwater.queries.functions import Function

logger = logging.getLogger(__name__)


def as_error(
    error: Exception,
    function: Function,
    *,
    identity: Identity = ANONYMOUS,
    trace_id: str = "",
    events: Events | None = None,
) -> HeadwaterError:
    """The error that a function's caller gets; logged once if nobody foresaw it, and told to those
    who listen. `identity` is as whom the function ran."""
    found, error_id = _expected(error, function, identity), None
    if found is None:
        error_id = secrets.token_hex(8)
        logger.error("%s failed (%s, trace %s)", function.label, error_id, trace_id, exc_info=error)
        found = FunctionFailed(
            f"{function.label} failed; the log has it under {error_id}",
            hint="If it goes on, give this id to whoever runs the application.",
        )
    if events is not None and events.wanted("error"):
        events.emit(
            ErrorEvent(
                function=function.name,
                kind=function.kind,
                error=error,
                code=found.code,
                error_id=error_id,
                trace_id=trace_id,
                user_id=identity.user,
            )
        )
    return found


@contextmanager
def as_callers_see(
    function: Function, identity: Identity, trace_id: str, events: Events | None
) -> Iterator[None]:
    """Raise what a function's caller gets for whatever goes wrong inside."""
    try:
        yield
    except Exception as error:
        found = as_error(error, function, identity=identity, trace_id=trace_id, events=events)
        if found is error:
            raise
        raise found from error


def timed_out(function: Function, seconds: float) -> TimedOut:
    return TimedOut(
        f"{function.label} took longer than {seconds:g} seconds",
        hint=f"Make it quicker, or give it longer: @hw.{function.kind}(timeout=…), or the setting"
        f" {function.kind}_timeout.",
    )


def _expected(error: Exception, function: Function, identity: Identity) -> HeadwaterError | None:
    """Our error for one that can be told; None for what nobody foresaw."""
    match error:
        case ConfigError():
            return None  # A mistake in the function: for those who wrote it, not for its caller.
        case DatabaseError(code=DatabaseError.code):
            return _away(function)  # Its message says where the database is.
        case HeadwaterError():
            return error
        case psycopg.Error():
            return _of_database(error, function, identity)
    return None


def _of_database(
    error: psycopg.Error, function: Function, identity: Identity
) -> HeadwaterError | None:
    said = error.diag.message_primary or "no reason given"
    match error:
        case errors.QueryCanceled():
            return TimedOut(
                f"{function.label} was given up by the database: {said}",
                hint=f"Make it quicker, or raise the setting {function.kind}_timeout.",
            )
        case errors.SerializationFailure() | errors.DeadlockDetected() | errors.LockNotAvailable():
            return DatabaseError(
                f"{function.label} met others who write: {said}",
                code="conflict",
                hint=_AGAIN[function.kind],
            )
        case errors.FeatureNotSupported() | errors.InvalidSqlStatementName() if (
            "cached plan" in said or "prepared statement" in said
        ):
            return DatabaseError(
                f"{function.label} met a statement that had to be prepared again: {said}",
                code="conflict",
                hint=_AGAIN[function.kind],
            )
        case errors.InvalidParameterValue() if said.startswith("headwater: "):
            # What headwater.signal was given; that may have come from the caller.
            return InvalidQuery(said.removeprefix("headwater: "), hint=error.diag.message_hint)
        case errors.InsufficientPrivilege() if identity.role is not None:
            return Forbidden(
                f"role {identity.role}: {said}",
                hint="Grant the role what the function needs, or register it with trusted=True."
                " Tables with row-level security of other owners also need the setting"
                " question_url.",
            )
        case errors.DataError() if not error.sqlstate and "too large" in str(error):
            return ResultError(
                f"{function.label} met a value that Python cannot hold: {error}",
                hint="Cast it to text in SQL.",
            )
        case errors.DataError() if not error.sqlstate and "NUL" in str(error):
            return InvalidQuery("a text holds a NUL, which PostgreSQL cannot", path="args")
        case (
            errors.DataError()
            | errors.UndefinedFunction()
            | errors.DatatypeMismatch()
            | errors.AmbiguousFunction()
        ) if function.is_sql:
            return InvalidQuery(said if error.sqlstate else str(error), path="args")
    return _away(function) if is_lost(error) else None


def _away(function: Function) -> Unavailable:
    return Unavailable(f"{function.label} could not reach the database", hint=_AGAIN[function.kind])


_AGAIN = {"query": "Try again.", "mutation": "Nothing was written. Try again."}
