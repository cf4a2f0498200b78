"""Turns errors of the database and of the hub into errors for subscribers of a live view."""

from __future__ import annotations

import logging

import psycopg

from headwater import limits
from headwater.database import is_refused, translate
from headwater.errors import (
    DatabaseError,
    Forbidden,
    HeadwaterError,
    InvalidQuery,
    PermissionMissing,
    Unavailable,
)
from headwater.hub.live_views.view import LiveView

logger = logging.getLogger(__name__)

NO_RIGHT = psycopg.errors.InsufficientPrivilege
TABLE_CHANGED = (
    psycopg.errors.UndefinedTable
    | psycopg.errors.UndefinedColumn
    | psycopg.errors.UndefinedFunction
    | psycopg.errors.DatatypeMismatch
)
"""Errors of a statement whose table was altered after it was looked up."""


def refusal(view: LiveView, error: psycopg.Error, url: str) -> HeadwaterError:
    """The error for a statement that the database refused. Subscribers may read it."""
    found = translate(error, url)
    if isinstance(found, PermissionMissing):
        label = view.query.table.label
        if view.scope is None:
            return PermissionMissing(  # not the query's fault
                f"Headwater's own database role may not read {label}: {found}",
                hint=f"grant select on {label} to the role of the gateway's URL",
            )
        role = view.scope.role
        return Forbidden(
            f"role {role} may not read {label}: {found}",
            hint=f'grant select on {label} to "{role}"',
        )
    return _refused(view, error, found) if is_refused(error) else found


def slow_question(view: LiveView) -> HeadwaterError:
    role = "" if view.scope is None else f" as role {view.scope.role}"
    return DatabaseError(
        f"{view.query.table.label}: asking{role} which rows belong to the result took longer than"
        f" {limits.QUESTION_SECONDS_MAX:.0f} seconds, again and again",
        code="slow_query",
        hint="Make what the table's policies look up quick, with an index; or ask for fewer rows.",
    )


def _refused(view: LiveView, error: psycopg.Error, found: HeadwaterError) -> HeadwaterError:
    """The error for a statement that fails each time. Under row-level security, the database's
    message may contain a value that the user may not see, so it goes to the log only."""
    label = view.query.table.label
    if view.scope is None:
        return InvalidQuery(f"{label}: {found}", path="where", hint=found.hint)
    logger.warning(
        "view %d: reading %s as role %s failed: %s", view.id, label, view.scope.role, error
    )
    return Forbidden(
        f"{label} cannot be read as role {view.scope.role}: a policy, or a constant of the query,"
        f" fails with {error.sqlstate}; the log of the gateway has it under view {view.id}",
        hint="Look at the constants of the query, and at whether the claims of the token are what "
        "the policies of the table expect.",
    )


def fault(view: LiveView, error: Exception) -> HeadwaterError:
    return Unavailable(
        f"{view.query.table.label}: a fault in the hub ({type(error).__name__}); the log of the"
        f" gateway has it under view {view.id}",
        code="internal",
        hint="It is tried again by itself, and succeeds once what caused it is gone.",
    )
