"""The error that a caller gets when a query or mutation fails.

Errors of Headwater reach the caller unchanged. An unexpected exception becomes an opaque id; the
gateway's log and handlers of `hw.on("error")` get the details under that id.
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
from headwater.log.reconnect import is_lost
from headwater.queries.events import ErrorEvent, Events
from headwater.queries.functions import Function

logger = logging.getLogger(__name__)


def caller_error(
    error: Exception,
    function: Function,
    *,
    identity: Identity = ANONYMOUS,
    trace_id: str = "",
    events: Events | None = None,
) -> HeadwaterError:
    """The error for the caller of a function. An unexpected one is logged once; handlers get an
    `ErrorEvent`. The function ran as `identity`."""
    found, error_id = _expected(error, function, identity), None
    if found is None:
        error_id = secrets.token_hex(8)
        logger.error("%s failed (%s, trace %s)", function.label, error_id, trace_id, exc_info=error)
        found = FunctionFailed(
            f"{function.label} failed; the gateway's log has it under {error_id}",
            hint="If this continues, give the id to the operator of the application.",
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
def translated_errors(
    function: Function, identity: Identity, trace_id: str, events: Events | None
) -> Iterator[None]:
    """Translate exceptions inside into the error for the caller of the function."""
    try:
        yield
    except Exception as error:
        found = caller_error(error, function, identity=identity, trace_id=trace_id, events=events)
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
    """The error for a caller; None for an unexpected one."""
    match error:
        case ConfigError():
            return None  # A mistake in the function: its authors get it, not the caller.
        case DatabaseError(code=DatabaseError.code):
            return _unreachable(function)  # Its message contains the address of the database.
        case HeadwaterError():
            return error
        case psycopg.Error():
            return _of_database(error, function, identity)
    return None


def _of_database(
    error: psycopg.Error, function: Function, identity: Identity
) -> HeadwaterError | None:
    reason = error.diag.message_primary or "no reason given"
    match error:
        case errors.QueryCanceled():
            return TimedOut(
                f"{function.label} was cancelled by the database: {reason}",
                hint=f"Make it quicker, or raise the setting {function.kind}_timeout.",
            )
        case errors.SerializationFailure() | errors.DeadlockDetected() | errors.LockNotAvailable():
            return DatabaseError(
                f"{function.label} conflicted with another transaction: {reason}",
                code="conflict",
                hint=_RETRY_HINT[function.kind],
            )
        case errors.FeatureNotSupported() | errors.InvalidSqlStatementName() if (
            "cached plan" in reason or "prepared statement" in reason
        ):
            return DatabaseError(
                f"{function.label} used a statement that had to be prepared again: {reason}",
                code="conflict",
                hint=_RETRY_HINT[function.kind],
            )
        case errors.InvalidParameterValue() if reason.startswith("headwater: "):
            # An argument of headwater.signal, which may come from the caller.
            return InvalidQuery(reason.removeprefix("headwater: "), hint=error.diag.message_hint)
        case errors.InsufficientPrivilege() if identity.role is not None:
            return Forbidden(
                f"role {identity.role}: {reason}",
                hint="Grant the role what the function needs, or register it with trusted=True."
                " Tables with row-level security of other owners also need the setting"
                " question_url.",
            )
        case errors.DataError() if not error.sqlstate and "too large" in str(error):
            return ResultError(
                f"{function.label} read a value that Python cannot represent: {error}",
                hint="Cast it to text in SQL.",
            )
        case errors.DataError() if not error.sqlstate and "NUL" in str(error):
            return InvalidQuery("a text has a NUL, which PostgreSQL cannot store", path="args")
        case (
            errors.DataError()
            | errors.UndefinedFunction()
            | errors.DatatypeMismatch()
            | errors.AmbiguousFunction()
        ) if function.is_sql:
            return InvalidQuery(reason if error.sqlstate else str(error), path="args")
    return _unreachable(function) if is_lost(error) else None


def _unreachable(function: Function) -> Unavailable:
    return Unavailable(
        f"{function.label} could not reach the database", hint=_RETRY_HINT[function.kind]
    )


_RETRY_HINT = {"query": "Try again.", "mutation": "Nothing was written. Try again."}
