"""Turns the errors that a gateway sends into Headwater's exceptions.

Pure. The `code` decides; for an unknown code, the HTTP status. Without a status, an unknown code of
a subscription or call is one of the application: `Refused`.
"""

from __future__ import annotations

import msgspec

from headwater.errors import (
    ConnectionFailed,
    DatabaseError,
    Forbidden,
    HeadwaterError,
    InvalidQuery,
    LimitExceeded,
    NotFound,
    Refused,
    ResultError,
    Unauthorized,
    Unavailable,
)
from headwater.protocol import Error

_BY_STATUS: dict[int, type[HeadwaterError]] = {
    400: InvalidQuery,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    413: LimitExceeded,
    422: Refused,
    429: LimitExceeded,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
}
_CODES: dict[type[HeadwaterError], str] = {
    ConnectionFailed: "outcome_unknown",
    DatabaseError: "conflict still_running",
    Forbidden: "access_changed admin_only authorize_failed content_type host origin token_tenant "
    "token_user",
    HeadwaterError: "internal method",
    InvalidQuery: "idempotency_key_reused",
    LimitExceeded: "bus_busy bytes_per_user bytes_total groups members_per_channel mutations_busy "
    "past_bytes past_requests_per_user publish_rate queries_busy rate requests_per_session "
    "sessions_per_ip sessions_per_user subscriptions_per_channel subscriptions_per_user "
    "tickets_per_user too_large too_slow user_mutations_busy views",
    NotFound: "channel_unknown mutation_unknown past_unknown path query_unknown session_unknown "
    "subscription_unknown topic_unknown",
    ResultError: "result_key result_not_stored result_too_large several_rows too_many_rows",
    Unauthorized: "ticket token_algorithm token_audience token_claims token_expired token_issuer "
    "token_malformed token_missing token_not_yet_valid token_signature",
    Unavailable: "bus slow_client slow_query stopping table_locked",
}
"""Headwater's codes that are more specific than their class. Any other code is an application's."""
_BY_CODE = {code: kind for kind, codes in _CODES.items() for code in codes.split()}
_BY_CLOSE_CODE = {4401: 401, 4403: 403, 4429: 429, 1012: 503, 1013: 503}


def error_of(message: Error, status: int = 0) -> HeadwaterError:
    """The exception for an error of the gateway.

    >>> error_of(Error("forbidden", "orders is not for you"))
    Forbidden('orders is not for you')
    >>> error_of(Error("sold_out", "none is left", id="r1"))
    Refused('none is left')
    """
    kind = _kind(message, status)
    error = kind(message.message, hint=message.hint)
    error.code = message.code
    error.retryable = message.retryable
    if message.retry_after_secs is not None:
        error.retry_after = message.retry_after_secs
    return error


def _kind(message: Error, status: int) -> type[HeadwaterError]:
    by_code = {kind.code: kind for kind in _kinds(HeadwaterError)} | _BY_CODE
    kind = by_code.get(message.code) or _BY_STATUS.get(status)
    if kind is None and message.retry_after_secs is not None:
        return LimitExceeded
    return kind or (HeadwaterError if message.id is None else Refused)


def _kinds(kind: type[HeadwaterError]) -> list[type[HeadwaterError]]:
    """The public errors. Those that a module defines for itself have the code of their parent."""
    children = [each for each in kind.__subclasses__() if each.__module__ == kind.__module__]
    return [kind, *(each for child in children for each in _kinds(child))]


def error_in_body(status: int, body: bytes) -> Error:
    """The error in a response with this status; made from the status if a proxy responded."""
    if error := _decoded_error(body):
        return error
    kind = _BY_STATUS.get(status, HeadwaterError)
    retryable = kind.retryable or status >= 500
    return Error(kind.code, f"the gateway answered with status {status}", retryable=retryable)


def error_of_mutation(status: int, body: bytes) -> Error:
    """The same for a mutation. The error of a proxy does not show whether the mutation ran; the
    gateway knows it when the mutation is repeated."""
    if status >= 500 and _decoded_error(body) is None:
        text = f"a proxy answered the mutation with status {status}, not the gateway"
        return Error("outcome_unknown", text, hint=CHECK_FIRST, retryable=True)
    return error_in_body(status, body)


CHECK_FIRST = "It may have been executed or not: check before you repeat it."


def _decoded_error(body: bytes) -> Error | None:
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.DecodeError:
        return None


def error_of_close(code: int, reason: str) -> HeadwaterError | None:
    """Why a WebSocket was closed; None if the gateway gave no reason."""
    status = _BY_CLOSE_CODE.get(code)
    if status is None:
        return None
    kind = _BY_STATUS[status]
    return error_of(
        Error(kind.code, reason or f"closed with code {code}", retryable=kind.retryable), status
    )


def too_large(bytes_max: int) -> LimitExceeded:
    """The error for a message that is too large; the next connection would receive it again."""
    error = LimitExceeded(
        f"a message is larger than {bytes_max:,} bytes", hint="Ask for fewer rows or columns."
    )
    error.retryable = False
    return error


class _ErrorShape(msgspec.Struct):
    code: str
    message: str
    hint: str | None = None
    retryable: bool = False
    retry_after_secs: float | None = None


class _ErrorBody(msgspec.Struct):
    shape: _ErrorShape = msgspec.field(name="error")

    @property
    def error(self) -> Error:
        shape = self.shape
        return Error(
            shape.code,
            shape.message,
            hint=shape.hint,
            retryable=shape.retryable,
            retry_after_secs=shape.retry_after_secs,
        )
