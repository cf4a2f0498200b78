"""A growing text, for example the output of a language model, written into one column.

Tokens are collected, and the whole text is written at intervals, by one statement at a time. So a
repeated write does no harm, an older text never replaces a newer one, and subscribers of the row
see the text only grow. At the end, also after an error, the whole text is written, with a state:
`done`, `error` or `cancelled`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from psycopg import sql

from headwater import limits
from headwater.errors import ConfigError, HeadwaterError, InvalidQuery, LimitExceeded, NotFound
from headwater.identity import Identity
from headwater.queries.context import MutationContext
from headwater.queries.execution.mutations import MutationRunner
from headwater.queries.functions import Arguments, Mutation

logger = logging.getLogger(__name__)


class TextStream:
    """The result of `Headwater.text_stream`. Use it with `async with`."""

    def __init__(
        self,
        runner_of: Callable[[], MutationRunner],
        table: str,
        *,
        id: Any,
        column: str,
        state: str | None,
        values: Mapping[str, Any] | None,
        text: str,
        every: float,
        topic: str | None,
        identity: Identity,
    ) -> None:
        if not every > 0:
            raise ConfigError(
                f"every: {every} is not more than 0", hint="It is in seconds, as in 0.1."
            )
        self._runner_of = runner_of
        self._row = _Row(table, id, column, state, values)
        self._every = every
        self._topic = topic
        self._identity = identity
        self._parts: list[str] = []
        self._chars = 0
        self._writing = asyncio.Lock()
        self._new_text = asyncio.Event()
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._error: HeadwaterError | None = None
        self._add(text)

    @property
    def text(self) -> str:
        """The whole text so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0]

    def append(self, token: str) -> None:
        """Append to the text. Never waits. Raises the error of an earlier write, if it cannot be
        repeated."""
        if self._error is not None:
            raise self._error
        if self._task is None or self._ending.is_set():
            raise ConfigError(
                "a text stream can be appended to only inside its block",
                hint="async with hw.text_stream(…) as out: out.append(token)",
            )
        self._add(token)
        self._new_text.set()

    async def flush(self) -> None:
        """Write the text now."""
        if self._task is None or self._ending.is_set():
            raise ConfigError("a text stream can be flushed only inside its block")
        await self._write("streaming")

    async def __aenter__(self) -> TextStream:
        if self._task is not None:
            raise ConfigError(
                "a text stream can be entered only once", hint="Call hw.text_stream again."
            )
        await self._row.inspect(self._run)
        try:
            await self._write("streaming")
        except asyncio.CancelledError:
            # The text may have been written, and `__aexit__` is not called.
            with suppress(HeadwaterError):
                await _uncancelled(self._write("cancelled"))
            raise
        self._task = asyncio.create_task(self._write_often())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        state = "done"
        if error is not None:
            state = "error" if isinstance(error, Exception) else "cancelled"
        try:
            await _uncancelled(self._end(state))
        except HeadwaterError as failure:
            if error is None:
                raise
            logger.error("%s was not written completely: %s", self._row.label, failure)

    # -------------------------------------------------------------------- the text

    def _add(self, token: str) -> None:
        """Refuse a token that the database would refuse, while it can be left out."""
        if "\0" in token:
            raise InvalidQuery("a text has a NUL, which PostgreSQL cannot store")
        try:
            token.encode()
        except UnicodeEncodeError as error:
            raise InvalidQuery(
                f"a text has an incomplete character: {error.reason}",
                hint="Decode the bytes of a model incrementally.",
            ) from None
        if self._chars + len(token) > limits.TEXT_STREAM_CHARS_MAX:
            raise LimitExceeded(
                f"a text stream has at most {limits.TEXT_STREAM_CHARS_MAX:,} characters",
                code="too_large",
                hint="Start another row.",
            )
        self._parts.append(token)
        self._chars += len(token)

    # -------------------------------------------------------------------- writing

    async def _write_often(self) -> None:
        """Write new text at once, but not more often than `every`."""
        while True:
            await self._new_text.wait()
            if self._ending.is_set():
                return
            self._new_text.clear()
            try:
                await self._write("streaming")
            except HeadwaterError as error:
                if not _passes(error):
                    self._error = error
                    return
                logger.warning("%s could not be written, trying again: %s", self._row.label, error)
                self._new_text.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._every):
                    await self._ending.wait()

    async def _end(self, state: str) -> None:
        self._ending.set()
        self._new_text.set()
        if self._task is not None:
            await self._task
        loop = asyncio.get_running_loop()
        until = loop.time() + limits.TEXT_STREAM_END_SECONDS
        while True:
            try:
                await self._write(state)
                return
            except HeadwaterError as error:
                if not _passes(error) or loop.time() > until:
                    raise
            await asyncio.sleep(self._every)

    async def _write(self, state: str) -> None:
        async with self._writing:
            written = await self._run(
                _WRITE,
                statement=self._row.statement,
                values=self._row.values(self.text, state),
                topic=self._topic,
                id=self._row.id,
            )
        if not written:
            raise NotFound(
                f"there is no row {self._row.label}",
                hint="Insert it before, or give the other columns: values={…}.",
            )

    async def _run(self, mutation: Mutation, **arguments: Any) -> Any:
        runner = self._runner_of()
        value, _ = await runner.run(mutation, Arguments(arguments, ()), self._identity)
        return value


class _Row:
    """The row whose column is written, and the statement that does it."""

    def __init__(
        self,
        table: str,
        id: Any,
        column: str,
        state: str | None,
        others: Mapping[str, Any] | None,
    ) -> None:
        self.id = id
        self.statement = ""
        self._table = table
        self._key = tuple(id) if isinstance(id, list | tuple) else (id,)
        self._written = (column,) if state is None else (column, state)
        self._others = None if others is None else dict(others)

    @property
    def label(self) -> str:
        return f"{self._table} {self.id}"

    def values(self, text: str, state: str) -> list[Any]:
        """The values of the statement."""
        written = [text, state][: len(self._written)]
        return [*written, *self._key, *(self._others or {}).values()]

    async def inspect(self, run: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        """Look up the table. ConfigError if it does not fit."""
        found = await run(_INSPECT, table=self._table)
        if found is None:
            raise ConfigError(f"there is no table {self._table}")
        missing = {*self._written, *(self._others or {})} - set(found["columns"])
        if missing:
            raise ConfigError(
                f"table {self._table} has no column {min(missing)}",
                hint="column=… names the column of the text, state=… the column of its state"
                " (None for no state).",
            )
        key: list[str] = found["key"]
        if len(key) != len(self._key):
            columns = ", ".join(key) or "no column"
            raise ConfigError(
                f"the primary key of {self._table} is {columns}, and the id {self.id!r:.100}",
                hint="The id of a key of several columns is a tuple.",
            )
        table = _name(found["schema"], found["name"])
        self.statement = (
            _update(table, self._written, key, found["equals"])
            if self._others is None
            else _upsert(table, self._written, key, list(self._others))
        ).as_string()


def _update(
    table: sql.Composable, written: Sequence[str], key: Sequence[str], equals: Sequence[str]
) -> sql.Composed:
    conditions = [
        sql.SQL("{} {} %s").format(_name(name), sql.SQL(operator))
        for name, operator in zip(key, equals, strict=True)
    ]
    return sql.SQL("update {} set {} where {}").format(
        table,
        sql.SQL(", ").join(_each("{} = %s", written)),
        sql.SQL(" and ").join(conditions),
    )


def _upsert(
    table: sql.Composable, written: Sequence[str], key: Sequence[str], others: Sequence[str]
) -> sql.Composed:
    columns = [*written, *key, *others]
    return sql.SQL("insert into {} ({}) values ({}) on conflict ({}) do update set {}").format(
        table,
        sql.SQL(", ").join(map(_name, columns)),
        sql.SQL(", ").join([sql.SQL("%s")] * len(columns)),
        sql.SQL(", ").join(map(_name, key)),
        sql.SQL(", ").join(_each("{0} = excluded.{0}", written)),
    )


def _name(*names: str) -> sql.Composable:
    # A percent sign in a name is not a placeholder.
    return sql.SQL(sql.Identifier(*names).as_string().replace("%", "%%"))


def _each(pattern: Any, names: Sequence[str]) -> list[sql.Composed]:
    return [sql.SQL(pattern).format(_name(name)) for name in names]


async def _inspect(ctx: MutationContext, table: str) -> Any:
    return await ctx.fetch_one(_TABLE, table)


async def _write(
    ctx: MutationContext, statement: str, values: list[Any], topic: str | None, id: Any
) -> int:
    written = await ctx.execute(statement, *values)
    if written and topic is not None:
        await ctx.signal(topic, [id])
    return written


_INSPECT = Mutation("text_stream", _inspect)
_WRITE = Mutation("text_stream", _write)

_TABLE = """
    select n.nspname::pg_catalog.text as schema, c.relname::pg_catalog.text as name,
           array(select a.attname::pg_catalog.text from pg_catalog.pg_attribute a
                 where a.attrelid operator(pg_catalog.=) c.oid
                   and a.attnum operator(pg_catalog.>) 0 and not a.attisdropped) as columns,
           array(select a.attname::pg_catalog.text
                 from pg_catalog.pg_index i
                 cross join pg_catalog.unnest(i.indkey) with ordinality k(number, place)
                 join pg_catalog.pg_attribute a on a.attrelid operator(pg_catalog.=) c.oid
                   and a.attnum operator(pg_catalog.=) k.number
                 where i.indrelid operator(pg_catalog.=) c.oid and i.indisprimary
                 order by k.place) as key,
           array(select pg_catalog.format('operator(%%I.%%s)', s.nspname, o.oprname)
                 from pg_catalog.pg_index i
                 cross join pg_catalog.unnest(i.indclass) with ordinality k(class, place)
                 join pg_catalog.pg_opclass f on f.oid operator(pg_catalog.=) k.class
                 join pg_catalog.pg_amop m on m.amopfamily operator(pg_catalog.=) f.opcfamily
                   and m.amoplefttype operator(pg_catalog.=) f.opcintype
                   and m.amoprighttype operator(pg_catalog.=) f.opcintype
                   and m.amopstrategy operator(pg_catalog.=) 3
                 join pg_catalog.pg_operator o on o.oid operator(pg_catalog.=) m.amopopr
                 join pg_catalog.pg_namespace s on s.oid operator(pg_catalog.=) o.oprnamespace
                 where i.indrelid operator(pg_catalog.=) c.oid and i.indisprimary
                 order by k.place) as equals
    from pg_catalog.pg_class c
    join pg_catalog.pg_namespace n on n.oid operator(pg_catalog.=) c.relnamespace
    where c.oid operator(pg_catalog.=) pg_catalog.to_regclass(%s)
"""


def _passes(error: HeadwaterError) -> bool:
    """Whether to write again. If it is not known whether a commit succeeded, the same text may be
    written twice."""
    return error.retryable or error.code == "outcome_unknown"


async def _uncancelled(work: Coroutine[Any, Any, None]) -> None:
    """Run to the end, even if the caller is cancelled, also several times."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except HeadwaterError:
            break
    if cancelled is not None:
        task.exception()
        raise cancelled
    task.result()
