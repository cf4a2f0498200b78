"""Changes of one apsw connection, delivered to a function after each commit.

SQLite's preupdate hook gives the row before and after every change, but nothing when changes are
undone. So this class follows what undoes them:

- the whole transaction: the rollback hook.
- a savepoint: the trace of statements names `ROLLBACK TO`.
- a statement that fails: SQLite then says that it changed nothing. If that can mean something else,
  one of its rows is compared with the table.

The commit hook runs before the commit; the end of the statement, which the trace gives, after it.
Nothing is sent in between, so a commit that fails sends nothing.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import msgspec

from headwater.capture.sqlite.statements import quoted, unquoted, words
from headwater.errors import ConfigError

if TYPE_CHECKING:
    import apsw

logger = logging.getLogger(__name__)

_numbers = itertools.count()

_SAVEPOINT = re.compile(
    r"(?:\s|;|--[^\n]*(?:\n|$)|/\*.*?\*/)*(?:savepoint|release|rollback)\b", re.I | re.S
)


class SqliteChange(msgspec.Struct, frozen=True):
    """One row's change. `before` and `after` have the values by column, without VIRTUAL generated
    columns; both are None for a table that has such columns, which apsw cannot read. `key` has the
    names of the primary key's columns."""

    database: str
    table: str
    op: Literal["insert", "update", "delete"]
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    key: tuple[str, ...] = ()


OnCommit: TypeAlias = Callable[[Sequence[SqliteChange]], None]

_OPS: dict[str, Literal["insert", "update", "delete"]] = {
    "INSERT": "insert",
    "UPDATE": "update",
    "DELETE": "delete",
}


class _Event(NamedTuple):
    statement: int | None
    database: str
    table: str
    op: Literal["insert", "update", "delete"]
    rowid: int
    old: tuple[Any, ...] | None
    new: tuple[Any, ...] | None
    columns: _Columns | None = None


class _Columns(NamedTuple):
    """`identity` are expressions that find a row, and their places in an image; None is the
    rowid."""

    names: tuple[str, ...]
    key: tuple[str, ...]
    identity: tuple[tuple[str, int | None], ...]


class SqliteHooks:
    """Calls functions with the changes of each transaction that the connection commits."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._apsw = _import_apsw()
        if not isinstance(connection, self._apsw.Connection):
            raise ConfigError(
                f"SqliteHooks needs an apsw.Connection, not {type(connection).__name__}",
                hint="sqlite3 of the standard library has no preupdate hook; a source with"
                " sqlite:///… captures what any program writes.",
            )
        if not hasattr(connection, "preupdate_hook"):
            raise ConfigError(
                "this apsw was built without SQLite's preupdate hook",
                hint="Install the wheel: pip install --force-reinstall apsw",
            )
        self._connection = connection
        self._id = f"headwater-{next(_numbers)}"
        self._callbacks: list[OnCommit] = []
        self._events: list[_Event] = []
        self._savepoints: list[tuple[str, int]] = []
        self._statements: list[int] = []
        self._is_committing = False
        self._is_reading = False
        self._is_delivering = False
        self._outbox: deque[Sequence[SqliteChange]] = deque()
        self._columns: dict[tuple[str, str], _Columns] = {}
        self._versions: dict[str, int] = {}
        self._install()

    def on_commit(self, callback: OnCommit) -> OnCommit:
        """Call the function with each transaction's changes, in the thread that committed. Also as
        a decorator."""
        self._callbacks.append(callback)
        return callback

    def flush(self) -> None:
        """Deliver a transaction whose commit no statement has reported: one that was committed
        when a cursor with unread rows was closed."""
        self._finish()

    def close(self) -> None:
        """Remove the hooks."""
        connection = self._connection
        with suppress(self._apsw.ConnectionClosedError):
            connection.trace_v2(0, None, id=self._id)
            connection.preupdate_hook(None, id=self._id)
            connection.set_commit_hook(None, id=self._id)
            connection.set_rollback_hook(None, id=self._id)

    def __enter__(self) -> SqliteHooks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------ hooks

    def _install(self) -> None:
        apsw, connection = self._apsw, self._connection
        if connection.in_transaction:
            raise ConfigError(
                "the connection has an open transaction, of which changes would be missing",
                hint="Create SqliteHooks before it begins.",
            )
        mask = apsw.SQLITE_TRACE_STMT | apsw.SQLITE_TRACE_PROFILE
        connection.trace_v2(mask, self._trace, id=self._id)
        connection.preupdate_hook(self._preupdate, id=self._id)
        connection.set_commit_hook(self._commit, id=self._id)
        connection.set_rollback_hook(self._rollback, id=self._id)
        # Statements that are already prepared may delete all rows at once, without hooks. Setting
        # an authorizer makes SQLite prepare them again.
        authorizer = connection.authorizer
        connection.authorizer = lambda *_: apsw.SQLITE_OK
        connection.authorizer = authorizer

    def _preupdate(self, update: apsw.PreUpdate) -> None:
        if self._is_reading:
            return
        op = _OPS[update.op]
        try:
            old, new = update.old, update.new
        except self._apsw.Error:
            old = new = None
        if update.blob_write >= 0:
            op, new = "update", None
        statement = self._statements[-1] if self._statements else None
        self._events.append(
            _Event(statement, update.database_name, update.table_name, op, update.rowid, old, new)
        )

    def _commit(self) -> bool:
        self._is_committing = True
        return False

    def _rollback(self) -> None:
        self._events.clear()
        self._savepoints.clear()
        self._is_committing = False

    def _trace(self, event: dict[str, Any]) -> None:
        if self._is_reading or event.get("trigger"):
            return
        if event["code"] == self._apsw.SQLITE_TRACE_STMT:
            self._finish()
            self._statements.append(event["id"])
        else:
            self._end(event["id"], event["sql"])

    # ------------------------------------------------------------ statements

    def _end(self, statement: int, sql: str) -> None:
        if statement in self._statements:
            self._statements.remove(statement)
        start = self._start_of(statement)
        if start < len(self._events):
            # A commit was reported: the statement was not undone.
            is_certain = self._is_committing or self._connection.changes() > 0
            self._resolve(start)
            if not is_certain and self._is_undone(statement, start):
                self._events[start:] = [e for e in self._events[start:] if e.statement != statement]
            self._settle(statement, start)
        elif _SAVEPOINT.match(sql):
            self._follow_savepoint(sql)
        self._finish()

    def _settle(self, statement: int, start: int) -> None:
        """Its events are not undone alone any more."""
        for i in range(start, len(self._events)):
            if self._events[i].statement == statement:
                self._events[i] = self._events[i]._replace(statement=None)

    def _start_of(self, statement: int) -> int:
        """Where its events begin; they are among the last ones."""
        start = len(self._events)
        while start and self._events[start - 1].statement is not None:
            start -= 1
        return next(
            (i for i in range(start, len(self._events)) if self._events[i].statement == statement),
            len(self._events),
        )

    def _follow_savepoint(self, sql: str) -> None:
        match [unquoted(word) if i else word.upper() for i, word in enumerate(words(sql)[:6])]:
            case ["SAVEPOINT", name, *_]:
                self._savepoints.append((name.lower(), len(self._events)))
            case ["RELEASE", *rest]:
                del self._savepoints[self._find(_savepoint_name(rest)) :]
            case ["ROLLBACK", *rest] if "to" in [word.lower() for word in rest[:2]]:
                rest = rest[[word.lower() for word in rest].index("to") + 1 :]
                found = self._find(_savepoint_name(rest))
                if found < len(self._savepoints):
                    del self._events[self._savepoints[found][1] :]
                    del self._savepoints[found + 1 :]

    def _find(self, name: str) -> int:
        """The newest savepoint with this name."""
        places = [i for i, (other, _) in enumerate(self._savepoints) if other == name]
        return places[-1] if places else len(self._savepoints)

    def _finish(self) -> None:
        """Deliver, if the transaction was committed."""
        if self._connection.in_transaction:
            self._is_committing = False  # the commit failed, and the transaction is still open
            return
        self._savepoints.clear()
        if not self._is_committing:
            return
        self._is_committing = False
        if self._events:
            self._resolve(0)
            events, self._events = self._events, []
            self._outbox.append(tuple(_change(event) for event in events))
        self._deliver()

    def _deliver(self) -> None:
        if self._is_delivering:
            return  # a callback wrote; the call above delivers it
        self._is_delivering = True
        try:
            while self._outbox:
                changes = self._outbox.popleft()
                for callback in self._callbacks:
                    try:
                        callback(changes)
                    except Exception:
                        logger.exception("a function that was called after a commit failed")
        finally:
            self._is_delivering = False

    # ------------------------------------------------------------ reading

    def _read(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """A statement of our own, which the hooks ignore."""
        self._is_reading = True
        try:
            return list(self._connection.execute(sql, tuple(values)))
        finally:
            self._is_reading = False

    def _resolve(self, start: int) -> None:
        """Find the columns of the events' tables, while they are as they were."""
        databases = {e.database for e in self._events[start:] if e.columns is None}
        for database in databases:
            ((version,),) = self._read(f"pragma {quoted(database)}.schema_version")
            if self._versions.get(database) != version:
                self._versions[database] = version
                self._columns = {k: v for k, v in self._columns.items() if k[0] != database}
        for i in range(start, len(self._events)):
            event = self._events[i]
            if event.columns is None:
                self._events[i] = event._replace(columns=self._columns_of(event))

    def _columns_of(self, event: _Event) -> _Columns:
        place = event.database, event.table
        if place not in self._columns:
            sql = f"pragma {quoted(event.database)}.table_xinfo({quoted(event.table)})"
            info = [row for row in self._read(sql) if row[6] in (0, 3)]
            names = tuple(row[1] for row in info)
            keyed = [(row[5], row[1], i) for i, row in enumerate(info) if row[5]]
            key = tuple(name for _, name, _ in sorted(keyed))
            identity = tuple((quoted(name), i) for _, name, i in sorted(keyed))
            taken = {name.lower() for name in names}
            alias = next((a for a in ("rowid", "_rowid_", "oid") if a not in taken), None)
            self._columns[place] = _Columns(names, key, identity or ((alias or "rowid", None),))
        return self._columns[place]

    def _is_undone(self, statement: int, start: int) -> bool:
        """Whether a statement was undone: compare a row that it changed with the table."""
        first: dict[tuple[Any, ...], _Event] = {}
        last: dict[tuple[Any, ...], tuple[_Event, tuple[Any, ...] | None]] = {}
        for event in self._events[start:]:
            if event.statement == statement and (event.old or event.new):
                for image, after in ((event.old, None), (event.new, event.new)):
                    if image is not None:
                        place = _place(event, image)
                        first.setdefault(place, event)
                        last[place] = event, after
        for place, (event, after) in last.items():
            before = first[place].old
            if before is not None and _place(first[place], before) != place:
                before = None
            if before != after:
                return self._row(event, place) != after
        return False

    def _row(self, event: _Event, place: tuple[Any, ...]) -> tuple[Any, ...] | None:
        assert event.columns is not None
        where = " and ".join(f"{name} is ?" for name, _ in event.columns.identity)
        names = ", ".join(quoted(name) for name in event.columns.names)
        table = f"{quoted(event.database)}.{quoted(event.table)}"
        rows = self._read(f"select {names} from {table} where {where}", place[2:])
        return rows[0] if rows else None


def _place(event: _Event, image: tuple[Any, ...]) -> tuple[Any, ...]:
    assert event.columns is not None
    values = [event.rowid if i is None else image[i] for _, i in event.columns.identity]
    return (event.database, event.table, *values)


def _savepoint_name(rest: list[str]) -> str:
    if len(rest) > 1 and rest[0].lower() == "savepoint" and rest[1] != ";":
        rest = rest[1:]
    return rest[0].lower() if rest else ""


def _change(event: _Event) -> SqliteChange:
    columns = event.columns
    assert columns is not None
    before, after = (
        None if image is None else dict(zip(columns.names, image, strict=False))
        for image in (event.old, event.new)
    )
    return SqliteChange(event.database, event.table, event.op, before, after, columns.key)


def _import_apsw() -> Any:
    try:
        import apsw
    except ImportError:
        raise ConfigError(
            "SqliteHooks needs apsw, which is not installed",
            hint='pip install "headwater[sqlite]"',
        ) from None
    return apsw
