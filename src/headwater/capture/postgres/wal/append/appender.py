"""Appends transactions of the write-ahead log (WAL) to `headwater.log`, with their own ids.

Messages are collected until `write`, which sends them in one transaction with the place that they
reach. A transaction that is larger than memory is sent in parts, before its end has arrived, and
committed with its end. Where the log cannot say exactly what changed (the table was altered
meanwhile, a row before its change is not in the WAL), it says that the table must be read again.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, TypeAlias

import msgspec
import psycopg

from headwater import limits
from headwater.capture.postgres.wal.append.images import (
    ImageColumn,
    ImageWriter,
    NotWritten,
    ServerValues,
)
from headwater.capture.postgres.wal.pgoutput import (
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Relation,
    Row,
    Truncate,
    Update,
    decode,
    print_lsn,
)
from headwater.capture.source import UNCHANGED
from headwater.database import Connection
from headwater.errors import DatabaseError

logger = logging.getLogger(__name__)

_NOT_WRITTEN = (
    psycopg.DataError,
    psycopg.ProgrammingError,
    psycopg.IntegrityError,
    psycopg.errors.ProgramLimitExceeded,
    psycopg.errors.StatementTooComplex,
)
"""A value is at fault, not the server: trying again would not help."""

ACTOR = "headwater.actor"
"""The prefix of the message that says who writes: a JSON array of user, function and trace."""


class Writer:
    """A transaction of the WAL: the begin and the end of its rows in the log, as COPY reads them.
    `done` are the tables of which it has said that they must be read again."""

    __slots__ = ("begin", "done", "end")

    def __init__(self, xid: int, microseconds: int) -> None:
        self.begin = f"{xid}\t{_EPOCH + timedelta(microseconds=microseconds)}\t"
        self.end = "\t\\N\t\\N\t\\N\n"
        self.done: set[int] = set()

    def act_as(self, actor: Iterable[str | None]) -> None:
        self.end = "\t" + "\t".join(map(_field, actor)) + "\n"


_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


class Oversized(NamedTuple):
    """Instead of a change whose images would be too large for the log."""

    relation: int


Change: TypeAlias = Relation | Insert | Update | Delete | Truncate | Oversized


class Described(msgspec.Struct, frozen=True):
    """What `headwater.wal_relation` says of a relation."""

    root: int
    shape: int
    stale: bool
    due: bool = False
    label: str = ""
    key: list[str] = []
    columns: list[ImageColumn] = []
    members: list[int] = []


class _Plan:
    """How the rows of a relation are written."""

    def __init__(self, described: Described, relation: Relation) -> None:
        names = [column.name for column in relation.columns]
        self.root = described.root
        self.shape = described.shape
        self.label = described.label
        self.stale = described.stale
        self.members = frozenset(described.members)
        self.writer = ImageWriter(described.columns, names)
        self.is_plain = not self.stale and not self.writer.server_columns
        self.key = [names.index(name) for name in described.key] if not self.stale else []


class LogRow(NamedTuple):
    """A row for `headwater.log`."""

    shape: int
    op: str
    before: str | None = None
    after: str | None = None


class LogAppender:
    """Appends over one connection, in the order in which messages are taken. `lsn` is the place in
    the WAL that the log has reached: where another process has appended since, a commit fails.
    `nearby` is the id of a transaction of about now, all 64 bits: messages have 32."""

    def __init__(self, connection: Connection, slot: str, lsn: int, nearby: int) -> None:
        self._connection = connection
        self._slot = slot
        self._saved = lsn
        self._nearby = nearby
        self._plans: dict[int, _Plan | None] = {}
        self._stale: set[int] = set()
        self._taken: list[tuple[Writer, Change]] = []
        self._size = 0
        self._writer: Writer | None = None
        self._reached = 0
        self._open = False
        self._sent = 0
        self._last: dict[int, tuple[str, LogRow]] = {}
        self._met: dict[int, list[tuple[_Plan | None, bool]]] = {}

    @property
    def is_between(self) -> bool:
        """Whether no transaction is half taken."""
        return self._writer is None

    @property
    def has_work(self) -> bool:
        """Whether anything was taken since the last commit."""
        return bool(self._taken) or self._open or self._reached > 0

    @property
    def is_full(self) -> bool:
        return len(self._taken) >= limits.WAL_APPEND_CHANGES or self._size > limits.WAL_APPEND_BYTES

    def take(self, data: bytes) -> None:
        """Collect a message of pgoutput. Most are of small transactions, so the begin and the end
        of one are read here."""
        kind = data[0]
        if kind == _BEGIN_KIND:
            _, microseconds, xid = _BEGIN(data, 1)
            # Ids that are in use at the same time are less than 2**31 apart.
            self._nearby = widened(xid, self._nearby)
            self._writer = Writer(self._nearby, microseconds)
        elif kind == _COMMIT_KIND:
            self._writer, self._reached = None, _COMMIT(data, 10)[0]
        else:
            if len(data) > limits.WAL_IMAGE_BYTES_MAX // _GROWTH and _is_oversized(data):
                assert self._writer is not None, "a change outside of a transaction"
                self._taken.append((self._writer, Oversized(_OID(data, 1)[0])))
            else:
                self._take(decode(data), len(data))

    def _take(self, message: Message, size: int) -> None:
        match message:
            case Relation() | Insert() | Update() | Delete() | Truncate():
                assert self._writer is not None, "a change outside of a transaction"
                self._taken.append((self._writer, message))
                self._size += size
            case LogicalMessage(transactional=True, prefix=prefix) if prefix == ACTOR:
                assert self._writer is not None, "an actor outside of a transaction"
                self._writer.act_as(_actor(message.content))
            case _:
                pass

    # -------------------------------------------------------------------- writing

    async def write(self) -> int | None:
        """Send what was taken. If no transaction is half taken, commit, and return the place in the
        WAL that was reached."""
        if self._taken:
            if not self._open:
                await self._connection.execute("begin")
                self._open = True
            await self._send()
            if not self.is_between:
                # Seen at once by those who wait for the end of a large transaction.
                await self._connection.execute(NEXT_BATCH)
        if not self.is_between or not self._reached:
            return None
        reached, self._reached = self._reached, 0
        if self._open:
            await self._commit(reached)
        return reached

    async def _send(self) -> None:
        taken, self._taken, self._size = self._taken, [], 0
        await self._describe([message for _, message in taken if isinstance(message, Relation)])
        values = await self._server_values(taken)
        lines = [
            _line(writer, row)
            for writer, message in taken
            for row in self._rows(writer, message, values)
        ]
        reason = await self._refusal(lines)
        if reason is not None:
            logger.warning("WAL capture: rows cannot be logged, tables are read again: %s", reason)
            await self._copy(list(self._resets(taken)))

    async def _refusal(self, lines: Sequence[str]) -> str | None:
        """Write rows. Returns why the server does not take them; what may be the server's fault is
        tried twice. Without the context of an error, which has values of the row."""
        for is_last in (False, True):
            try:
                await self._copy(lines)
                return None
            except psycopg.Error as error:
                if self._connection.closed:
                    raise
                if is_last or isinstance(error, _NOT_WRITTEN):
                    return error.diag.message_primary or type(error).__name__
        return None

    async def _copy(self, lines: Sequence[str]) -> None:
        if lines:
            async with (
                self._connection.transaction(),
                self._connection.cursor().copy(_COPY) as copy,
            ):
                await copy.write("".join(lines).encode())

    def _resets(self, taken: Iterable[tuple[Writer, Change]]) -> Iterator[str]:
        """Instead of changes that the log does not accept: each transaction says which tables must
        be read again."""
        done: set[tuple[int, Writer]] = set()
        for writer, message in taken:
            oids = message.relations if isinstance(message, Truncate) else (_relation(message),)
            for plan in filter(None, map(self._plans.get, oids)):
                if (plan.root, writer) not in done:
                    done.add((plan.root, writer))
                    row = LogRow(plan.shape, "R")
                    self._last[plan.root] = (plan.label, row)
                    yield _line(writer, row)

    async def _commit(self, reached: int) -> None:
        notices = [(label, row) for label, row in self._last.values()]
        sent, self._sent, self._last = self._sent, 0, {}
        cursor = await self._connection.execute(
            _REACHED,
            {"lsn": print_lsn(reached), "slot": self._slot, "saved": print_lsn(self._saved)},
        )
        if cursor.rowcount != 1:
            raise DatabaseError(
                f"slot {self._slot} no longer feeds the log, or another process reads it",
                hint="Capture from the WAL was ended or begun again; its runner starts again.",
            )
        for label, row in notices:
            await self._connection.execute(
                _NOTIFY_ONE if sent == 1 else _NOTIFY,
                {
                    "shape": row.shape,
                    "table": label,
                    "op": _OPERATIONS[row.op],
                    "changes": sent,
                    "before": row.before,
                    "after": row.after,
                },
            )
        await self._connection.execute("commit")
        self._open, self._saved = False, reached

    # -------------------------------------------------------------------- relations

    async def _describe(self, relations: Iterable[Relation]) -> None:
        """Make the plans for relations that are met for the first time, or again after DDL."""
        self._met = {}
        for relation in relations:
            columns = [[one.name, one.type_oid, one.modifier] for one in relation.columns]
            cursor = await self._connection.execute(
                "select headwater.wal_relation(%s::oid, %s::jsonb)",
                (relation.oid, msgspec.json.encode(columns).decode()),
            )
            row = await cursor.fetchone()
            found = row[0] if row else None
            if found is None:
                self._met.setdefault(relation.oid, []).append((None, False))
                continue
            described = msgspec.convert(found, Described)
            if described.stale:
                due = True
                self._stale.add(described.root)
            else:
                due = described.due or described.root in self._stale
                self._stale.discard(described.root)
            plan = _Plan(described, relation)
            self._met.setdefault(relation.oid, []).append((plan, due))

    async def _server_values(self, taken: Sequence[tuple[Writer, Change]]) -> ServerValues:
        """What the server writes for values that only it can write."""
        wanted: dict[str, set[str]] = {}
        plans: dict[int, list[_Plan]] = {}
        for oid, met in self._met.items():
            plans[oid] = [plan for plan, _ in met if plan is not None]
        for oid, known in self._plans.items():
            if known is not None:
                plans.setdefault(oid, []).append(known)
        for _, message in taken:
            for relation, row in _rows_of(message):
                for plan in plans.get(relation, ()):
                    for place, type_ in plan.writer.server_columns:
                        cell = row[place] if place < len(row) else None
                        if isinstance(cell, str):
                            wanted.setdefault(type_, set()).add(cell)
        values: dict[tuple[str, str], str] = {}
        for type_, texts in wanted.items():
            try:
                async with self._connection.transaction():
                    cursor = await self._connection.execute(
                        f"select t, to_json(t::{type_})::text from unnest(%s::text[]) t".encode(),
                        (list(texts),),
                    )
                    values.update({(type_, text): json for text, json in await cursor.fetchall()})
            except psycopg.Error:
                if self._connection.closed:
                    raise
                continue  # the type was altered, or a value is too large: its rows are a reset
        return values

    # -------------------------------------------------------------------- rows

    def _rows(self, writer: Writer, message: Change, values: ServerValues) -> Iterator[LogRow]:
        """The rows of the log for a message."""
        if type(message) is Insert:
            plan = self._plans[message.relation]
            if plan is not None and plan.is_plain:
                self._sent += 1
                row = LogRow(plan.shape, "I", None, plan.writer.image(message.new, values))
                self._last[plan.root] = (plan.label, row)
                yield row
                return
        for plan, row in self._planned_rows(writer, message, values):
            if row.op == "R":
                if plan.root in writer.done:
                    continue
                writer.done.add(plan.root)
            self._sent += 1
            self._last[plan.root] = (plan.label, row)
            yield row

    def _planned_rows(
        self, writer: Writer, message: Change, values: ServerValues
    ) -> Iterator[tuple[_Plan, LogRow]]:
        if isinstance(message, Relation):
            plan, due = self._met[message.oid].pop(0)
            self._plans[message.oid] = plan
            if plan is not None and due:
                yield plan, LogRow(plan.shape, "R")
            return
        if isinstance(message, Truncate):
            yield from self._truncated(message)
            return
        plan = self._plans[message.relation]
        if plan is None:
            return
        try:
            if plan.stale or isinstance(message, Oversized):
                yield plan, LogRow(plan.shape, "R")
            else:
                for row in _changed(plan, message, values):
                    yield plan, row
        except NotWritten:
            yield plan, LogRow(plan.shape, "R")

    def _truncated(self, message: Truncate) -> Iterator[tuple[_Plan, LogRow]]:
        """A table whose partitions were not all truncated must be read again."""
        relations = set(message.relations)
        roots: dict[int, _Plan] = {}
        for oid in message.relations:
            plan = self._plans.get(oid)
            if plan is not None:
                roots[plan.root] = plan
        for plan in roots.values():
            whole = plan.members <= relations and not plan.stale
            yield plan, LogRow(plan.shape, "T" if whole else "R")


def widened(xid: int, nearby: int) -> int:
    """The id of 64 bits with these lower 32 that is nearest to another.

    >>> widened(5, (1 << 32) - 3) == (1 << 32) + 5
    True
    >>> widened((1 << 32) - 3, (1 << 32) + 5) == (1 << 32) - 3
    True
    """
    distance = (xid - nearby) % (1 << 32)
    return nearby + distance - (1 << 32 if distance >= 1 << 31 else 0)


def _is_oversized(data: bytes) -> bool:
    """Whether the images of a change would be too large: a quote takes 2 bytes in JSON, a control
    character up to 6."""
    if data[0] not in _ROW_KINDS:
        return False
    controls = len(data) - len(data.translate(None, _CONTROLS))
    quotes = data.count(b'"') + data.count(b"\\")
    return len(data) + quotes + (_GROWTH - 1) * controls > limits.WAL_IMAGE_BYTES_MAX


def _rows_of(message: Change) -> Iterator[tuple[int, Row]]:
    if isinstance(message, Insert | Update):
        yield message.relation, message.new
    if isinstance(message, Update | Delete) and message.old is not None:
        yield message.relation, message.old


def _relation(message: Relation | Insert | Update | Delete | Oversized) -> int:
    return message.oid if isinstance(message, Relation) else message.relation


def _changed(plan: _Plan, message: Change, values: ServerValues) -> Iterator[LogRow]:
    """The rows for a change of one row. A change of the key is a delete and an insert."""
    image = plan.writer.image
    match message:
        case Insert(new=new):
            yield LogRow(plan.shape, "I", None, image(new, values))
        case Delete(old=old) if old is not None:
            yield LogRow(plan.shape, "D", image(old, values), None)
        case Update(old=old, new=new) if old is not None:
            if UNCHANGED in new:
                new = tuple(o if n is UNCHANGED else n for o, n in zip(old, new, strict=True))
            if new == old:
                return
            before, after = image(old, values), image(new, values)
            if before == after:
                return
            if all(old[place] == new[place] for place in plan.key):
                yield LogRow(plan.shape, "U", before, after)
            else:
                yield LogRow(plan.shape, "D", before, None)
                yield LogRow(plan.shape, "I", None, after)
        case _:
            # The row before the change is not in the WAL: the replica identity is not FULL.
            yield LogRow(plan.shape, "R")


def _actor(content: bytes) -> tuple[str | None, ...]:
    """Every writer can send such a message; what is not an actor is left out."""
    try:
        found = msgspec.json.decode(content, type=tuple[str | None, str | None, str | None])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return (None, None, None)
    return tuple(None if text is None else text.replace("\0", "") for text in found)


# ------------------------------------------------------------------------ statements

_COPY = (
    "copy headwater.log (xid, at, shape, op, before, after, user_id, function_name, trace_id)"
    " from stdin"
)

_REACHED = """
    update headwater.wal_capture set lsn = %(lsn)s, appended_at = clock_timestamp()
    where slot = %(slot)s and lsn = %(saved)s
"""

NEXT_BATCH = "select nextval('headwater.wal_batches')"
"""Says that capture works. It is not undone with its transaction."""

_NOTIFY_ONE = """
    select headwater.notify(
      %(shape)s, %(op)s, 1, %(before)s::json, %(after)s::json)
    where headwater.may_notify()
"""

_NOTIFY = """
    select pg_notify('headwater', concat(
      'v1:', headwater.notice_field(%(table)s), ':', %(op)s::text, ':*#',
      currval('headwater.log_seq') - %(changes)s + 1, '-', currval('headwater.log_seq')))
    where headwater.may_notify()
"""

_OPERATIONS = {"I": "INSERT", "U": "UPDATE", "D": "DELETE", "T": "TRUNCATE", "R": "RESET"}

_BEGIN_KIND, _COMMIT_KIND = b"BC"
_BEGIN = struct.Struct(">QqI").unpack_from
_COMMIT = struct.Struct(">Q").unpack_from
_OID = struct.Struct(">I").unpack_from
_ROW_KINDS = b"IUD"
_CONTROLS = bytes(range(32))
_GROWTH = 6  # of a control character, which is \u0001 in JSON

_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"})


def _line(writer: Writer, row: LogRow) -> str:
    shape, op, before, after = row
    return f"{writer.begin}{shape}\t{op}\t{_field(before)}\t{_field(after)}{writer.end}"


def _field(text: str | None) -> str:
    if text is None:
        return "\\N"
    if "\\" in text or "\n" in text or "\r" in text or "\t" in text:
        return text.translate(_ESCAPES)
    return text
