"""Sends one statement and reads its rows in chunks, so that no result fills the memory.

The driver's cursors either load a whole result or never prepare a statement; this does neither. A
statement that is repeated on a connection is prepared there. Values are converted once, before
anything is sent: so the types of the parameters are known when the statement is observed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import psycopg
from psycopg import adapt, capabilities, generators, pq
from psycopg.abc import Buffer, PQGen
from psycopg.pq.abc import PGresult

from headwater import limits
from headwater.database import Connection
from headwater.errors import ConfigError, ResultError
from headwater.queries.analysis.statements import Statement

_FETCH_CHUNK_ROWS = 200
"""Rows in one chunk."""

_PREPARE_AFTER = 3
"""A statement is prepared when it is sent this many times on a connection."""

_PREPARED_STATEMENTS_MAX = 200
"""Prepared statements on a connection. The one used longest ago is removed first."""


_Status = pq.ExecStatus


class StalePlan(psycopg.errors.FeatureNotSupported):
    """A prepared statement no longer fits its table. It must be prepared again."""


class Fetched(msgspec.Struct, frozen=True):
    """The result of a statement: its rows, the command, and the number of rows read or written."""

    rows: list[dict[str, Any]]
    command: str
    count: int


class ChunkedFetch:
    """One statement with its values, ready to be sent."""

    def __init__(self, connection: Connection, sql: str, values: Sequence[Any]) -> None:
        self._connection = connection
        self._transformer = adapt.Transformer.from_context(connection)
        formats = [adapt.PyFormat.AUTO] * len(values)
        self._values: Sequence[Buffer | None] = self._transformer.dump_sequence(values, formats)
        self._formats = self._transformer.formats
        self.statement = Statement(sql, self._transformer.types or ())

    async def fetch(self, most: int) -> Fetched:
        """Send it and read its rows. ResultError if there are more than `most`."""
        connection = self._connection
        async with connection.lock:
            try:
                return await connection.wait(self._exchange(most))
            except ConfigError:
                await (
                    connection.close()
                )  # In the middle of a COPY, the connection cannot be used again.
                raise
            except Exception:
                if connection.pgconn.transaction_status == pq.TransactionStatus.ACTIVE:
                    await connection.cancel_safe(timeout=limits.CONNECT_TIMEOUT_SECONDS)
                    await connection.wait(_discard(connection.pgconn))
                raise

    def _exchange(self, most: int) -> PQGen[Fetched]:
        pgconn = self._connection.pgconn
        prepared = _prepared_on(self._connection)
        name = prepared.name_of(self.statement)
        if name is None:
            pgconn.send_query_params(
                self.statement.sql.encode(),
                self._values,
                param_types=self.statement.types,
                param_formats=self._formats,
            )
        else:
            if prepared.is_new(name):
                yield from prepared.prepare(pgconn, name, self.statement)
            pgconn.send_query_prepared(name, self._values, param_formats=self._formats)
        if capabilities.has_stream_chunked():
            pgconn.set_chunked_rows_mode(_FETCH_CHUNK_ROWS)
        else:
            pgconn.set_single_row_mode()
        yield from generators.send(pgconn)
        try:
            return (yield from self._take(most))
        except psycopg.errors.FeatureNotSupported as error:
            if name is None:
                raise
            prepared.remove(
                self.statement
            )  # It may no longer fit its table, and would fail each time.
            raise StalePlan(*error.args, info=error.pgresult) from error
        except psycopg.errors.InvalidSqlStatementName:
            prepared.forget_all()  # Other code has removed them.
            raise

    def _take(self, most: int) -> PQGen[Fetched]:
        rows: list[dict[str, Any]] = []
        make: Any = None
        command, count, size = "", 0, 0
        error: psycopg.Error | None = None
        while (result := (yield from generators.fetch(self._connection.pgconn))) is not None:
            if result.status in _COPY:
                raise ConfigError(
                    "COPY is not for ctx.fetch and ctx.execute",
                    hint="In a mutation: async with ctx.connection.cursor().copy(…)",
                )
            if result.status not in _FINE:
                error = psycopg.errors.error_from_result(result, encoding="utf-8")
                continue
            if make is None:
                self._transformer.set_pgresult(result)
                make = _row_maker(result)
            else:
                self._transformer.set_pgresult(result, set_loaders=False)
            if result.ntuples:
                size += _size(result)
                _check(len(rows) + result.ntuples, most, size)
                rows += self._transformer.load_rows(0, result.ntuples, make)
            if result.command_status:  # The last result has it; with chunks, the last chunk.
                command, count = _command(result), result.command_tuples or 0
        if error is not None:
            raise error
        return Fetched(rows, command, count)


_COPY = (_Status.COPY_IN, _Status.COPY_OUT, _Status.COPY_BOTH)
_FINE = (
    _Status.TUPLES_OK, _Status.COMMAND_OK, _Status.EMPTY_QUERY, _Status.SINGLE_TUPLE,
    _Status.TUPLES_CHUNK,
)  # fmt: skip


def _check(rows: int, most: int, size: int) -> None:
    """Raise ResultError for a result that is too large for memory."""
    if rows > most:
        raise ResultError(
            f"a statement returned more than {most:,} rows",
            code="too_many_rows",
            hint="Give it a limit, or count and sum in the database.",
        )
    if size > limits.FETCH_BYTES_MAX:
        raise ResultError(
            f"a statement returned more than {limits.FETCH_BYTES_MAX:,} bytes",
            code="result_too_large",
            hint="Select fewer columns, or give it a limit.",
        )


def _size(result: PGresult) -> int:
    """An estimate of the bytes in a chunk, by its first, middle and last row; 0 for the last
    chunk."""
    rows, columns = result.ntuples, range(result.nfields)
    if rows < _FETCH_CHUNK_ROWS:
        return 0
    sample = (0, rows // 2, rows - 1)
    values = (result.get_value(row, i) or b"" for row in sample for i in columns)
    return sum(map(len, values)) * rows // len(sample)


def _row_maker(result: PGresult) -> Any:
    names = [(result.fname(i) or b"").decode() for i in range(result.nfields)]

    def make(values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(names, values, strict=True))

    return make


def _command(result: PGresult) -> str:
    status = (result.command_status or b"").decode()
    return status.split(" ")[0].lower()


def _discard(pgconn: pq.abc.PGconn) -> PQGen[None]:
    while (yield from generators.fetch(pgconn)) is not None:
        pass


# ------------------------------------------------------------------------ prepared statements


class _Prepared:
    """The statements that were sent on one connection, the latest last."""

    def __init__(self) -> None:
        self._seen: OrderedDict[Statement, int] = OrderedDict()
        self._names: OrderedDict[Statement, bytes] = OrderedDict()
        self._on_server: set[bytes] = set()
        self._to_deallocate: list[bytes] = []
        self._number = 0

    def name_of(self, statement: Statement) -> bytes | None:
        """The name that it is prepared under; None for a statement that is too rare."""
        name = self._names.get(statement)
        if name is not None:
            self._names.move_to_end(statement)
            return name
        times = self._seen.pop(statement, 0) + 1
        if times < _PREPARE_AFTER:
            self._seen[statement] = times
            while len(self._seen) > _PREPARED_STATEMENTS_MAX:
                self._seen.popitem(last=False)
            return None
        self._number += 1
        self._names[statement] = name = b"headwater_%d" % self._number
        return name

    def is_new(self, name: bytes) -> bool:
        return name not in self._on_server

    def remove(self, statement: Statement) -> None:
        """Prepare it again, under another name, when it is used again."""
        if (name := self._names.pop(statement, None)) is not None:
            self._on_server.discard(name)
            self._to_deallocate.append(name)

    def forget_all(self) -> None:
        self._names.clear()
        self._on_server.clear()
        self._to_deallocate.clear()

    def prepare(self, pgconn: pq.abc.PGconn, name: bytes, statement: Statement) -> PQGen[None]:
        while len(self._names) > _PREPARED_STATEMENTS_MAX:
            self.remove(next(iter(self._names)))
        while self._to_deallocate:
            pgconn.send_query_params(b"deallocate " + self._to_deallocate.pop(), None)
            yield from _done(pgconn)
        try:
            pgconn.send_prepare(name, statement.sql.encode(), param_types=statement.types)
            yield from _done(pgconn)
        except BaseException:
            self._names.pop(statement, None)
            raise
        self._on_server.add(name)


def _done(pgconn: pq.abc.PGconn) -> PQGen[None]:
    yield from generators.send(pgconn)
    for result in (yield from generators.fetch_many(pgconn)):
        if result.status not in _FINE:
            raise psycopg.errors.error_from_result(result, encoding="utf-8")


_prepared: WeakKeyDictionary[Connection, _Prepared] = WeakKeyDictionary()


def _prepared_on(connection: Connection) -> _Prepared:
    found = _prepared.get(connection)
    if found is None:
        found = _prepared[connection] = _Prepared()
        # The driver removes all prepared statements, also ours, when it removes its own.
        connection.prepare_threshold = None
    return found
