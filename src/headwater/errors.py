"""All errors that a user can meet.

    HeadwaterError
    ├── ConfigError            a setting, argument or file is wrong
    ├── DatabaseError          PostgreSQL refused or could not be reached
    │   └── PermissionMissing  … because the role lacks a privilege
    ├── NotInstalled           the schema `headwater` is missing or of another version
    ├── CaptureError           a table cannot be captured
    │   ├── TableLocked        … or read now, because another session has locked it
    │   └── SourceError        … because its source cannot be read
    │       ├── SourceUnavailable  … now; trying again may help
    │       ├── SourceRefused      … as it is: a right, a setting, a table, a type
    │       └── PositionLost       … from where it was: the changes no longer exist
    ├── InvalidQuery           a filter, order or live query does not fit its table
    ├── ResyncRequired         the log no longer reaches back to a position
    ├── Diverged               a replica no longer equals the result it follows
    ├── Unauthorized           a token is missing or not valid
    ├── Forbidden              the user may not do this
    ├── NotFound               there is no such session or subscription
    ├── LimitExceeded          a quota or a bound is reached
    ├── Unavailable            the gateway cannot serve now
    │   └── Behind             … a position that the client has already seen
    ├── Refused                a query or mutation refused, with its own reason
    ├── FunctionFailed         a query or mutation failed unexpectedly
    ├── ResultError            what a query or mutation returned cannot be sent
    ├── TimedOut               a query or mutation took too long
    ├── ConnectionFailed       a gateway cannot be reached
    ├── EmbeddedError          the embedded PostgreSQL could not be used
    └── PipelineError          the data pipeline cannot continue

Each has a stable `code` for programs, a `hint` that says what to do, and `retryable`. Errors of the
driver are translated once, where they are raised, with `from`. Assertions are for our own bugs
only.
"""

from __future__ import annotations


class HeadwaterError(Exception):
    """Base of all; `str(error)` is the message without the hint."""

    code = "headwater_error"
    retryable = False
    retry_after: float | None = None
    """The seconds after which to try again, if known."""

    def __init__(self, message: str, *, hint: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if code is not None:
            self.code = code


class ConfigError(HeadwaterError):
    code = "config"


class DatabaseError(HeadwaterError):
    code = "database"
    retryable = True


class PermissionMissing(DatabaseError):
    code = "permission"
    retryable = False


class NotInstalled(HeadwaterError):
    code = "not_installed"


class CaptureError(HeadwaterError):
    code = "capture"


class TableLocked(CaptureError):
    """A table cannot be read now: another session has locked it, such as to alter it. It can be
    read when that session has ended its transaction."""

    code = "locked"
    retryable = True


class SourceError(CaptureError):
    """A source database cannot be read."""

    code = "source"


class SourceUnavailable(SourceError):
    """The source cannot be reached, or ended the connection. Trying again may help."""

    code = "source_unavailable"
    retryable = True


class SourceRefused(SourceError):
    """The source cannot be captured as it is: a right, a setting, a table or a type is wrong."""

    code = "source_refused"


class PositionLost(SourceError):
    """The source no longer has the changes after a position. `headwater source resnapshot NAME`
    copies its tables again."""

    code = "position_lost"


class InvalidQuery(HeadwaterError):
    """`path` names the place in the query that is wrong: `where[2].value`."""

    code = "invalid_query"

    def __init__(self, message: str, *, path: str = "", hint: str | None = None) -> None:
        super().__init__(f"{path}: {message}" if path else message, hint=hint)
        self.path = path


class ResyncRequired(HeadwaterError):
    code = "resync"


class Diverged(HeadwaterError):
    """A delta does not fit the rows of the replica, or the hash of the result differs."""

    code = "diverged"
    retryable = True


class EmbeddedError(HeadwaterError):
    code = "embedded"


class PipelineError(HeadwaterError):
    """`retryable` if waiting may help: a full disk, a cluster that cannot be reached."""

    code = "pipeline"

    def __init__(self, message: str, *, hint: str | None = None, retryable: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.retryable = retryable


class Unauthorized(HeadwaterError):
    """The token is missing or not valid."""

    code = "unauthorized"


class Forbidden(HeadwaterError):
    code = "forbidden"


class NotFound(HeadwaterError):
    code = "not_found"


class LimitExceeded(HeadwaterError):
    code = "limit"
    retryable = True
    retry_after: float

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        code: str | None = None,
        retry_after: float = 1.0,
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.retry_after = retry_after


class Unavailable(HeadwaterError):
    """The gateway cannot serve this now: it is starting, stopping or without its database."""

    code = "unavailable"
    retryable = True


class Behind(Unavailable):
    """This gateway has not read a position that the client has seen at another gateway."""

    code = "behind"
    retry_after = 1.0


class ConnectionFailed(HeadwaterError):
    """A client could not reach a gateway, or lost its connection and could not reconnect."""

    code = "connection"
    retryable = True


class Refused(HeadwaterError):
    """For applications to raise in their queries and mutations: the caller gets the message, the
    hint and the code as they are."""

    code = "refused"


class FunctionFailed(HeadwaterError):
    code = "function_failed"


class ResultError(HeadwaterError):
    code = "result"


class TimedOut(HeadwaterError):
    code = "timed_out"
    retryable = True
