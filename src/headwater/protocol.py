"""The wire protocol: every message between a gateway and its clients, and how it is encoded.

The same messages travel over SSE and WebSocket; docs/reference/protocol.md shows each of them.
Pure: structs in, bytes out. A `Frame` is one message that is encoded at most once for all
receivers. Frames of a shared result carry its `view`; `subscribed` says which subscription of a
client has that view. A receiver has everything up to the `position` of a message, which is also the
SSE `id`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Literal, TypeAlias, assert_never
from zlib import crc32

import msgspec

from headwater.model import (
    Enter,
    Key,
    Leave,
    Match,
    Move,
    Origin,
    Row,
    Table,
    Unmatch,
    Update,
    Value,
)

VERSION = 1

Overflow: TypeAlias = Literal["conflate", "drop", "pause"]
"""What happens to a subscription whose client reads too slowly: `conflate` sends the latest state
only, `drop` drops what does not fit and announces a gap, `pause` drops nothing and reads the log
later."""

FeedFormat: TypeAlias = Literal["headwater", "debezium"]


class _Message(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower, omit_defaults=True):
    pass


# ------------------------------------------------------------------------ from the server


class Hello(_Message, frozen=True):
    """The first message of every connection."""

    session: str
    version: int
    keepalive: float
    """Seconds between keepalives. A client that receives nothing for twice as long reconnects."""
    expires_at: datetime | None = None
    """When the token expires. The connection ends then, unless a new token is sent."""


class Subscribed(_Message, frozen=True):
    """From now on the subscription `id` gets the frames of `view`."""

    id: str
    view: int
    resumed: bool = False
    """Whether it continues after the client's position; if not, a snapshot follows."""
    key: tuple[str, ...] = ()
    """The columns of a live query's primary key, for the values in each `key`."""
    member: str | None = None
    """Of a channel on which the client is present: which of its members the client is."""
    lost: bool = False
    """The database does not have the client's position: it was restored, or lost it in a crash. The
    client must discard that position and all others from before."""


class Unsubscribed(_Message, frozen=True):
    """The client ended the subscription; there are no further messages for it."""

    id: str


class Snapshot(_Message, frozen=True):
    """The whole result at a position. With `more`, further rows follow in further snapshots."""

    view: int
    position: str
    rows: tuple[Enter | Match, ...]
    more: bool = False
    hash: int | None = None


WireDelta: TypeAlias = Enter | Leave | Move | Update | Match | Unmatch
"""A delta in a message. A reset is a separate message."""


class Deltas(_Message, frozen=True):
    """The changes of a result in one flush; the client applies them in order, all together."""

    view: int
    position: str
    at: datetime
    """When the last of these changes was written."""
    deltas: tuple[WireDelta, ...]
    hash: int | None = None
    """The hash of the new result, if a subscriber requested `verify`."""


ResetReason: TypeAlias = Literal[
    "overflow", "resync", "table", "access", "window", "result", "drift"
]


class ResetMessage(_Message, frozen=True, tag="reset"):
    """Replace the result by `rows`. The reason: the client read too slowly (`overflow`), the log
    could not be followed (`resync`), the table was truncated, altered or enabled again (`table`),
    the client's access changed (`access`), the client moved its window (`window`), a query's result
    is sent whole because much of it changed or the query had failed (`result`), or the sent rows
    differed from the database (`drift`)."""

    view: int
    position: str
    reason: ResetReason
    rows: tuple[Enter | Match, ...] = ()
    more: bool = False
    hash: int | None = None


class Gap(_Message, frozen=True):
    """Changes of a feed after `since` and up to `position` were left out. Another feed from `since`
    has them, unless the log has been trimmed past it (`reason` "resync")."""

    view: int
    position: str
    since: str | None
    reason: Literal["overflow", "resync"]


class WireChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """A change of one row in a change feed."""

    seq: int
    table: str
    op: str
    key: dict[str, Value] | None = None
    before: Row | None = None
    after: Row | None = None
    changed: tuple[str, ...] | None = None
    user_id: str | None = None
    function_name: str | None = None
    trace_id: str | None = None
    origin: Origin | None = None
    """Of a change that a source made in a mirror: where it came from."""


class WireTransaction(msgspec.Struct, frozen=True, omit_defaults=True):
    """Changes that became visible together."""

    xid: int
    at: datetime
    changes: tuple[Any, ...]
    """`WireChange`, or Debezium envelopes if these were requested."""
    complete: bool = True
    """False for a part of a very large transaction, which continues in the next message."""


class Changes(_Message, frozen=True):
    """Transactions of a change feed. `position` is where to resume; it may lie before the last
    transaction: discard by `seq` what comes twice."""

    view: int
    position: str
    transactions: tuple[WireTransaction, ...]


class Result(_Message, frozen=True):
    """The result of a reactive query at a position; it replaces the one before."""

    view: int
    position: str
    value: Any = None


class Failed(_Message, frozen=True):
    """A reactive query could not be executed again. The client's result may be out of date; a
    `result` follows when an execution succeeds."""

    view: int
    position: str
    code: str
    message: str
    hint: str | None = None
    retryable: bool = False


class Answer(_Message, frozen=True):
    """The answer to a `query`, `mutate` or `wait` with that `id`, or to another message with that
    `request`. The value of a query contains the position; the position contains the writes of a
    mutation."""

    id: str
    position: str
    value: Any = None


class Upsert(msgspec.Struct, frozen=True, tag_field="op", tag="upsert"):
    """A row of a topic exists, with these values."""

    entity: str
    key: Key
    row: Row


class Remove(msgspec.Struct, frozen=True, tag_field="op", tag="remove"):
    """A row no longer exists, or is no longer in this topic."""

    entity: str
    key: Key


class TopicMessage(_Message, frozen=True, tag="topic"):
    """The rows that were signalled on a topic in one flush, each once with its current values. The
    client resumes from `position`, which may be earlier. Without `ops` the message has only the
    position."""

    view: int
    position: str
    at: datetime
    """When the last of the signals was sent."""
    ops: tuple[Upsert | Remove, ...]


class Poke(_Message, frozen=True):
    """The data behind this topic changed: read it again."""

    view: int
    position: str
    at: datetime


class Message(_Message, frozen=True):
    """A message was published on a channel. Only the last few are stored; a new subscriber gets
    those first."""

    view: int
    id: str
    """The same at all gateways. A client that reconnects may get the message again."""
    data: Any
    at: datetime
    user: str | None = None
    """The user who published it; None for the server."""
    member: str | None = None
    """The member who published it, as in `presence`."""


class Member(msgspec.Struct, frozen=True, omit_defaults=True):
    """A member of a channel: one session of a user, with a state that the client sets."""

    member: str
    user: str | None = None
    state: Any = None


class Presence(_Message, frozen=True):
    """The members of a channel. With `whole`, `joined` are all members and replaces the list;
    otherwise `joined` came or changed their state, and `left` went. With `missed`, messages from
    before may be missing."""

    view: int
    joined: tuple[Member, ...] = ()
    left: tuple[str, ...] = ()
    whole: bool = False
    missed: bool = False


class Error(_Message, frozen=True):
    """With `id`, that subscription or request has ended. Without, it is about a message without an
    id, or about the connection if the gateway closes it next."""

    code: str
    message: str
    hint: str | None = None
    retryable: bool = False
    id: str | None = None
    retry_after_secs: float | None = None


class Keepalive(_Message, frozen=True):
    """The connection is alive and nothing happened. A comment over SSE."""


class Authenticated(_Message, frozen=True):
    """The new token is accepted."""

    expires_at: datetime | None = None


ServerMessage: TypeAlias = (
    Hello | Subscribed | Unsubscribed | Snapshot | Deltas | ResetMessage | Gap | Changes | Result
    | Failed | Answer | Error | Keepalive | Authenticated | TopicMessage | Poke | Message | Presence
)  # fmt: skip


# ------------------------------------------------------------------------ from the client


class ChangesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A change feed: of these tables (none for all), from now on or from a position."""

    tables: tuple[str, ...] = ()
    where: Any = None
    since: str | None = None
    format: FeedFormat = "headwater"


class QueryCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A reactive query by the name it was registered under."""

    name: str
    args: dict[str, Any] = {}
    delta: bool = False
    """Send rows as deltas by their key, like a live query, instead of whole results."""


class ChannelCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A channel by its name. With `present`, become a member, with a state."""

    name: str
    present: bool = False
    state: Any = None


class Subscribe(_Message, frozen=True, forbid_unknown_fields=True):
    """Subscribe to a live query, a reactive query, a change feed, a topic or a channel; exactly one
    of `live`, `query`, `changes`, `topic` and `channel`."""

    id: str
    query: QueryCall | None = None
    live: dict[str, Any] | None = None
    """A live query as docs/reference/live-query.md describes it."""
    changes: ChangesQuery | None = None
    topic: str | None = None
    channel: ChannelCall | None = None
    since: str | None = None
    """The position up to which the client has the query's result, or the topic's signals."""
    after: str | None = None
    """A position that the first data of the subscription must contain. `since` implies it."""
    overflow: Overflow | None = None
    """Default: `conflate` for a live query, `pause` for a change feed."""
    verify: bool = False
    """Whether every batch carries the hash of the result."""


class Unsubscribe(_Message, frozen=True, forbid_unknown_fields=True):
    id: str


class Reanchor(_Message, frozen=True, forbid_unknown_fields=True):
    """Move the window of a live query: it now begins after another cursor. With `request`, the
    answer has that id: it is sent after the new rows."""

    id: str
    after: list[Any] | None = None
    request: str | None = None


class Authenticate(_Message, frozen=True, forbid_unknown_fields=True):
    """Replace the token by a new one of the same user and tenant."""

    token: str


class Ask(_Message, frozen=True, forbid_unknown_fields=True, tag="query"):
    """Get a reactive query's result once. With `after`, one that contains that position."""

    id: str
    name: str
    args: dict[str, Any] = {}
    after: str | None = None


class Mutate(_Message, frozen=True, forbid_unknown_fields=True):
    """Run a mutation. One with the same `idempotency_key` is a repetition: it does not run again,
    and gets the answer that the first one got."""

    id: str
    name: str
    args: dict[str, Any] = {}
    idempotency_key: str | None = None


class Wait(_Message, frozen=True, forbid_unknown_fields=True):
    """Get an answer once everything up to a position has been sent. With the position of a
    mutation, a client reads its own writes."""

    id: str
    position: str


class Publish(_Message, frozen=True, forbid_unknown_fields=True):
    """Publish on the channel of the subscription `id`. With `request`, the answer has that id: it
    is sent when the message was delivered to all gateways. A message with the same
    `idempotency_key` is a repetition, and is not delivered again."""

    id: str
    data: Any
    request: str | None = None
    idempotency_key: str | None = None


class SetState(_Message, frozen=True, forbid_unknown_fields=True, tag="state"):
    """Change the client's state on the channel of the subscription `id`. With `request`, the answer
    has that id."""

    id: str
    state: Any
    request: str | None = None


ClientMessage: TypeAlias = (
    Subscribe | Unsubscribe | Reanchor | Authenticate | Ask | Mutate | Wait | Publish | SetState
)


# ------------------------------------------------------------------------ values


class Wire:
    """Converts a table's rows and deltas to values that JSON can represent: texts for NaN,
    infinities and bytes.

    Rows of a table without such columns are not converted.
    """

    def __init__(self, table: Table) -> None:
        self._plain = {c.name: plain for c in table.columns if _needs_care(c.type)}

    def row(self, row: Row) -> Row:
        if not self._plain:
            return row
        return {name: plain(v) if name in self._plain else v for name, v in row.items()}

    def delta(self, delta: WireDelta) -> WireDelta:
        if not self._plain:
            return delta
        match delta:
            case Enter(key, row, index, cursor):
                return Enter(_values(key), self.row(row), index, _values(cursor))
            case Move(key, row, source, index, cursor):
                return Move(_values(key), self.row(row), source, index, _values(cursor))
            case Update(key, row, index, cursor):
                plain = None if cursor is None else _values(cursor)
                return Update(_values(key), self.row(row), index, plain)
            case Match(key, row):
                return Match(_values(key), self.row(row))
            case Leave(key, index):
                return Leave(_values(key), index)
            case Unmatch(key):
                return Unmatch(_values(key))
            case _:
                assert_never(delta)


def _needs_care(type_: str) -> bool:
    return type_.removesuffix("[]") in ("real", "double precision", "bytea")


def _values(values: Sequence[Value]) -> tuple[Value, ...]:
    return tuple(map(plain, values))


def plain(value: Value) -> Value:
    """Values that JSON cannot represent as PostgreSQL writes them: NaN, the infinities and bytes.

    >>> plain(float("-inf")), plain([b"\\x00", 1.5])
    ('-Infinity', ['\\\\x00', 1.5])
    """
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
        case bytes():
            return "\\x" + value.hex()
        case list():
            return [plain(item) for item in value]
    return value


_encode_sorted: Callable[[object], bytes] = msgspec.json.Encoder(order="sorted").encode


def result_hash(rows: Iterable[tuple[Key, Row]]) -> int:
    """CRC-32 over `[key, row]` of every row as JSON, columns sorted by name, rows in order; numbers
    as `number_text` writes them, because some JSON parsers do not distinguish 1.0 and 1.

    >>> result_hash([((1,), {"id": 1, "name": "a"})])
    1897706822
    """
    checksum = 0
    for key, row in rows:
        checksum = crc32(_encode_sorted((_hashed(key), _hashed(row))), checksum)
    return checksum


def _hashed(value: Any) -> Any:
    match value:
        case float() if math.isfinite(value):
            return msgspec.Raw(number_text(value).encode())
        case list() | tuple():
            return [_hashed(item) if type(item) in _HOLDS_FLOATS else item for item in value]
        case dict():
            return {
                name: _hashed(item) if type(item) in _HOLDS_FLOATS else item
                for name, item in value.items()
            }
    return value


_HOLDS_FLOATS = {float, list, tuple, dict}


def number_text(value: float) -> str:
    """A finite float as ECMAScript writes numbers (RFC 8785, 3.2.2.3): the fewest digits that
    identify it.

    >>> [number_text(value) for value in (1.0, -0.0, 0.1, 1e-7, 1e20, 1.5e21)]
    ['1', '0', '0.1', '1e-7', '100000000000000000000', '1.5e+21']
    """
    if value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    if 1e-4 <= abs(value) < 1e16:
        return repr(value)  # has the fewest digits, and no exponent in this range
    sign, digits, point = _digits(value)
    count = len(digits)
    if count <= point <= 21:
        return sign + digits + "0" * (point - count)
    if 0 < point <= 21:
        return f"{sign}{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    fraction = f".{digits[1:]}" if count > 1 else ""
    return f"{sign}{digits[0]}{fraction}e{point - 1:+d}"


def _digits(value: float) -> tuple[str, str, int]:
    """The sign, the digits that `repr` finds, and how many of them are before the point."""
    whole, _, exponent = repr(abs(value)).partition("e")
    before, _, after = whole.partition(".")
    digits = (before + after).lstrip("0")
    point = len(before + after) - len(after) + int(exponent or 0)
    point -= len(before + after) - len(digits)
    return "-" if value < 0 else "", digits.rstrip("0"), point


# ------------------------------------------------------------------------ frames

_encode: Callable[[object], bytes] = msgspec.json.Encoder().encode
_decode_server = msgspec.json.Decoder(ServerMessage).decode
_decode_client = msgspec.json.Decoder(ClientMessage).decode

KEEPALIVE_SSE = b": keepalive\n\n"


class Shared:
    """Bytes that wait for clients, and may be shared by many of them."""

    __slots__ = ("bytes", "holders")

    def __init__(self, bytes: int) -> None:
        self.bytes = bytes
        self.holders = 0
        """The number of clients that they wait for."""


class Frame:
    """A message and its encodings, each made when it is first needed and then shared."""

    has_id = True
    """Whether its position is the `id` of its event, from which its stream is resumed."""

    def __init__(self, message: ServerMessage) -> None:
        self.message = message
        # Failures and answers do not change the position of the client.
        aside = isinstance(message, Failed | Answer)
        self.position: str | None = None if aside else getattr(message, "position", None)
        self.is_step = isinstance(message, Deltas | Changes | TopicMessage | Poke | Message) or (
            isinstance(message, Presence) and not message.whole
        )
        """Whether a client needs all earlier messages to use this one."""

    @cached_property
    def json(self) -> bytes:
        """The message as JSON: a WebSocket text, the data of an SSE event, or a line of NDJSON."""
        return _encode(self.message)

    @cached_property
    def sse(self) -> bytes:
        """The message as a Server-Sent Event."""
        message = self.message
        if isinstance(message, Keepalive):
            return KEEPALIVE_SSE
        # A client that is cut off between the parts of a result cannot resume.
        id = self.position if self.has_id and not getattr(message, "more", False) else None
        return _event(type_of(message), self.json, id)

    @cached_property
    def event(self) -> bytes:
        """The same without an `id`, for a stream whose marks (`Mark`) have the position to resume
        from."""
        message = self.message
        if isinstance(message, Keepalive):
            return KEEPALIVE_SSE
        return _event(type_of(message), self.json, None)

    @cached_property
    def text(self) -> str:
        """The message as a WebSocket text."""
        return self.json.decode()

    @cached_property
    def line(self) -> bytes:
        """The message as a line of NDJSON."""
        return self.json + b"\n"

    @cached_property
    def chunk(self) -> bytes:
        """The Server-Sent Event as a chunk of an HTTP/1.1 body, as it is on the wire."""
        return as_chunk(self.sse)

    @cached_property
    def event_chunk(self) -> bytes:
        """The event without an `id` as a chunk of an HTTP/1.1 body."""
        return as_chunk(self.event)

    @cached_property
    def line_chunk(self) -> bytes:
        """The line of NDJSON as a chunk of an HTTP/1.1 body."""
        return as_chunk(self.line)

    @property
    def size(self) -> int:
        return len(self.json)

    @cached_property
    def shared(self) -> Shared:
        """The bytes that wait for slow clients, without the frame itself."""
        return Shared(self.size)


class Mark(Frame):
    """The position from which all subscriptions of a stream can be resumed together: an SSE `id`
    without an event. One subscription alone does not know the positions of the others."""

    def __init__(self, position: str) -> None:
        super().__init__(Keepalive())
        self.position = position

    @cached_property
    def event(self) -> bytes:
        return f"id: {self.position}\n\n".encode()


def type_of(message: ServerMessage) -> str:
    """The `type` of a message, which is also the name of its event.

    >>> type_of(Keepalive())
    'keepalive'
    """
    return str(message.__struct_config__.tag)


def _event(name: str, data: bytes, id: str | None) -> bytes:
    # JSON has no raw line breaks, so one data line is enough.
    head = f"event: {name}\n" if id is None else f"event: {name}\nid: {id}\n"
    return b"%sdata: %s\n\n" % (head.encode(), data)


def as_chunk(data: bytes) -> bytes:
    """Data as one chunk of an HTTP/1.1 body (RFC 9112 §7.1).

    >>> as_chunk(b"data: {}\\n\\n")
    b'a\\r\\ndata: {}\\n\\n\\r\\n'
    """
    return b"%x\r\n%s\r\n" % (len(data), data)


def read_server(data: bytes | str) -> ServerMessage:
    """Decode a message from a server; `msgspec.DecodeError` for anything else."""
    message: ServerMessage = _decode_server(data)
    return message


def read_client(data: bytes | str) -> ClientMessage:
    """Decode a message from a client; `msgspec.DecodeError` names the invalid part."""
    message: ClientMessage = _decode_client(data)
    return message
