"""A way of capture in a test: begin it for some tables of the driver's database, and read what came
of it in Headwater's: the rows, and the changes in the log.

`MirrorCapture` is a source with a runner in this process. `LocalCapture` is for tables in
Headwater's own database, by triggers or from the WAL: there the table is its own mirror.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple

from headwater.capture.mirror import registry
from headwater.capture.postgres import triggers
from headwater.capture.postgres.wal.append import WalCapture
from headwater.capture.running.supervisor import Supervisor
from headwater.database import Connection
from headwater.limits import SOURCE_CHUNK_ROWS
from headwater.log import complete
from tests.contract.sources.driver import SourceDriver

DEADLINE_SECONDS = 60.0


class LogChange(NamedTuple):
    """A change in the log. `key` is the id; images are by column, numbers as decimals."""

    table: str
    op: str
    key: int
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    xid: int


class Capture:
    """What all ways share: reading Headwater's database."""

    schema = "shop"

    def __init__(self, driver: SourceDriver, connection: Connection, url: str) -> None:
        self.driver = driver
        self.connection = connection
        self.url = url

    async def begin(self, *tables: str, **options: Any) -> None:
        """Capture the tables, and wait until they are live."""
        raise NotImplementedError

    async def end(self) -> None:
        raise NotImplementedError

    async def same(self, *tables: str) -> None:
        """Wait until the tables' mirrors equal the source."""
        for table in tables:
            await self.eventually(partial(self._differences, table), [])

    async def _differences(self, table: str) -> list[str]:
        there, here = await self.driver.rows(table), await self.rows(table)
        only = [f"- {row!r:.200}" for row in there if row not in here]
        return only + [f"+ {row!r:.200}" for row in here if row not in there]

    async def eventually(self, ask: Callable[[], Awaitable[object]], wanted: object) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (found := await ask()) != wanted:
            if time.monotonic() > deadline:
                raise AssertionError(f"{found!r:.3000}\n{await self.report()}")
            await asyncio.sleep(0.01)

    async def report(self) -> str:
        return ""

    async def rows(self, table: str) -> list[tuple[Any, ...]]:
        """Without the columns that the mirror of a collection has beside the declared ones."""
        cursor = await self.connection.execute(
            f"select * from {self._name(table)} order by id".encode(),
            prepare=False,  # its columns may change
        )
        names = [column.name for column in cursor.description or ()]
        places = [i for i, name in enumerate(names) if name not in ("_id", "doc")]
        return [tuple(row[i] for i in places) for row in await cursor.fetchall()]

    async def count(self, table: str) -> int:
        cursor = await self.connection.execute(f"select count(*) from {self._name(table)}".encode())
        return int((await cursor.fetchall())[0][0])

    async def images(self, table: str) -> list[tuple[int, dict[str, Any]]]:
        cursor = await self.connection.execute(
            f"select id, row_to_json(t)::text from {self._name(table)} t order by id".encode()
        )
        return [(int(key), _image(text)) for key, text in await cursor.fetchall()]

    async def texts(self, table: str, id: int) -> list[str | None]:
        """The values of a row of a typed table, as PostgreSQL prints them."""
        cursor = await self.connection.execute(
            f"select * from {self._name(table)} where id = {id}".encode()
        )
        described = cursor.description or ()
        names = [c.name for c in described if c.name not in ("id", "_id", "doc")]
        # As their output functions print them: a cast to text writes a boolean differently.
        listed = ", ".join(
            f"""case when "{name}" is distinct from null then format('%s', "{name}") end"""
            for name in names
        )
        cursor = await self.connection.execute(
            f"select {listed} from {self._name(table)} where id = {id}".encode()
        )
        return list((await cursor.fetchall())[0])

    async def type_of(self, table: str, column: str) -> str:
        cursor = await self.connection.execute(
            "select format_type(atttypid, atttypmod) from pg_attribute"
            " where attrelid = %s::regclass and attname = %s",
            (self._name(table), column),
        )
        return str((await cursor.fetchall())[0][0])

    async def changes(self, *tables: str) -> list[LogChange]:
        """In the order of the log, without resets."""
        cursor = await self.connection.execute(
            "select table_name, op, key::text, before::text, after::text, xid::text::bigint"
            " from headwater.changes where schema_name = %s and op <> 'reset' order by seq",
            (self.schema,),
        )
        return [
            LogChange(
                table,
                op,
                _id(key, after, before),
                None if before is None else _image(before),
                None if after is None else _image(after),
                xid,
            )
            for table, op, key, before, after, xid in await cursor.fetchall()
            if not tables or table in tables
        ]

    def _name(self, table: str) -> str:
        return f'{self.schema}."{table.replace(chr(34), chr(34) * 2)}"'


def _id(key: str | None, *images: str | None) -> int:
    """0 for a truncate. The key of a collection is another column, with the same number."""
    for text in (key, *images):
        if text is not None and "id" in (values := json.loads(text)):
            return int(values["id"])
    return 0 if key is None else int(json.loads(key)["_id"])


def _image(text: str) -> dict[str, Any]:
    image: dict[str, Any] = json.loads(text, parse_float=Decimal, parse_int=Decimal)
    return image


class MirrorCapture(Capture):
    """A source, with its runner."""

    _task: asyncio.Task[None] | None = None
    _supervisor: Supervisor | None = None

    async def begin(self, *tables: str, chunk_rows: int | None = None, **options: Any) -> None:
        await self.declare(*tables, **options)
        await self.start(chunk_rows)
        await self.eventually(partial(self.states, *tables), ["live"] * len(tables))

    async def declare(self, *tables: str, **options: Any) -> None:
        definition = self.driver.definition(*tables, **options)
        await registry.declare(self.connection, definition, "command")

    async def start(self, chunk_rows: int | None = None) -> None:
        self._supervisor = Supervisor(self.url, chunk_rows=chunk_rows or SOURCE_CHUNK_ROWS)
        self._task = asyncio.create_task(self._supervisor.run())

    async def states(self, *tables: str) -> list[str | None]:
        """As the runner stores them; what people see is written once a second."""
        cursor = await self.connection.execute("select name, state from headwater.source_tables")
        found = dict(await cursor.fetchall())
        return [found.get(table) for table in tables]

    async def state(self) -> str:
        (source,) = await registry.sources(self.connection)
        return source.state

    async def report(self) -> str:
        return repr(await registry.sources(self.connection))

    async def stop(self) -> None:
        """In an orderly way."""
        assert self._supervisor is not None
        assert self._task is not None
        await self._supervisor.stop()
        await self._task

    async def crash(self) -> None:
        """Its task ends wherever it is, and so do its connections."""
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def end(self) -> None:
        if self._task is not None and not self._task.done():
            await self.crash()


class LocalCapture(Capture):
    """Tables of Headwater's own database, captured in one of two ways."""

    schema = "public"
    _capture: WalCapture | None = None

    def __init__(
        self, driver: SourceDriver, connection: Connection, url: str, way: triggers.Capture
    ) -> None:
        super().__init__(driver, connection, url)
        self.way = way

    async def begin(self, *tables: str, **options: Any) -> None:
        for table in tables:
            await triggers.enable(self.connection, self._name(table), self.way)
        if self.way == "wal":
            self._capture = WalCapture(self.url)
            self._task = asyncio.create_task(self._capture.run())

    async def changes(self, *tables: str) -> list[LogChange]:
        """After the log is complete: it is behind the tables."""
        if self.way == "wal":
            cursor = await self.connection.execute(
                f"select {complete.SLOT}, {complete.WRITTEN}".encode()
            )
            await complete.wait(self.connection, *(await cursor.fetchall())[0])
        return await super().changes(*tables)

    async def end(self) -> None:
        if self._capture is not None:
            for table in await triggers.list_tables(self.connection):
                await triggers.disable(self.connection, table.name)
            self._capture.stop()
            await self._task
