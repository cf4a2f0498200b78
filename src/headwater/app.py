"""`Headwater`: the one object a Python program needs.

It finds or starts the database, installs the schema and captures the declared tables, maintains the
log, opens change feeds, and has the application's queries and mutations.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, overload

import msgspec

from headwater.capture.declaration import TablesGiven, define_source
from headwater.capture.postgres import schema, triggers
from headwater.capture.postgres.wal.append.process import WalCaptureProcess
from headwater.capture.running.application import ApplicationSources
from headwater.capture.source import SourceDefinition
from headwater.channels.bus import NOTIFY, Bus
from headwater.channels.definitions import ChannelDefinition, Channels, message_json, published
from headwater.database import Connection, check_question_url, connect, translated
from headwater.embedded import EmbeddedPostgres
from headwater.errors import ConfigError, InvalidQuery, Unavailable
from headwater.identity import ANONYMOUS, Identity, Sharing
from headwater.limits import CURSOR_SAVE_SECONDS, WINDOW_ROWS_MAX
from headwater.live.feed import ChangeFilter
from headwater.live.filters.filter import Filter
from headwater.live.query import Rules
from headwater.log import cursors, maintenance
from headwater.log.reading.follow import follow
from headwater.log.reading.reader import LogReader
from headwater.model import Position, Table, Transaction
from headwater.pipeline.views.definitions import StreamingView, define
from headwater.queries.context import mutation_under_way
from headwater.queries.events import EventName, Handler
from headwater.queries.execution.mutations import MutationRunner
from headwater.queries.functions import Mutation, Query
from headwater.queries.registry import Functions
from headwater.settings import Settings, load_settings
from headwater.tasks import ended
from headwater.topics.definitions import TopicDefinition, Topics
from headwater.topics.text_streams import TextStream

if TYPE_CHECKING:
    # A program without a gateway does not import a web framework.
    from starlette.applications import Starlette

    from headwater.gateway.auth.authorize_hook import Authorize
    from headwater.gateway.gateway import Gateway

_CURSOR_IDLE_SAVE_SECONDS = 30.0
"""How often a cursor is saved while there are no changes."""


HandlerT = TypeVar("HandlerT", bound=Handler)
ViewFunctionT = TypeVar("ViewFunctionT", bound=Callable[..., Any])


class Headwater:
    """A database as live data.

    ```python
    hw = Headwater()                 # or Headwater("postgresql://…")
    hw.table("orders")

    async with hw:
        async for transaction in hw.changes():
            ...
    ```

    Without a URL (here, in `HEADWATER_URL` or in `headwater.toml`) it uses the embedded PostgreSQL.
    """

    def __init__(
        self, url: str | None = None, *, settings: Settings | None = None, **overrides: Any
    ) -> None:
        if settings is not None and (url is not None or overrides):
            raise ConfigError(
                "Headwater: settings are given twice, as `settings` and one by one",
                hint="Leave out `settings`, or put everything into it.",
            )
        self.settings = settings or load_settings(overrides={"url": url, **overrides})
        self.gateway: Gateway | None = None
        """The running gateway, if `asgi` was called."""
        self.topics = Topics()
        """The declared topics; `topics.find("chat:42")` says which one a name belongs to."""
        self.channels = Channels()
        """The declared channels; `channels.find("room:1")` says which one a name belongs to."""
        self._bus: Bus | None = None
        self._functions = Functions()
        self._views: dict[str, StreamingView] = {}
        self._tables: dict[str, Rules] = {}
        self._captures: dict[str, triggers.Capture | None] = {}
        self._rules: dict[str, Rules] = {}
        self._sources = ApplicationSources(self.settings.source)
        self._serves = False
        self._authorize: Authorize | None = None
        self._app: Starlette | None = None
        self._started = False
        self._stack = AsyncExitStack()
        self._url = self.settings.url

    @property
    def url(self) -> str:
        """The URL of the database; known after `async with` has begun."""
        if self._url is None:
            raise ConfigError(
                "the embedded PostgreSQL is not running yet",
                hint="Use Headwater with `async with hw:` before asking for its url.",
            )
        return self._url

    def table(
        self,
        name: str,
        *,
        filterable: Iterable[str] | None = None,
        sortable: Iterable[str] | None = None,
        limit_max: int = WINDOW_ROWS_MAX,
        capture: triggers.Capture | None = None,
    ) -> None:
        """Declare a table; its changes are captured when Headwater starts.

        Live queries may filter by the `filterable` columns and order by the `sortable` ones (None
        for all columns), and have at most `limit_max` rows. Changes are captured by triggers, or
        with `capture="wal"` from the write-ahead log, which costs writers less. Without it, a table
        that is captured already stays as it is.
        """
        if type(limit_max) is not int or limit_max < 1:
            raise ConfigError(
                f"table {name}: limit_max={limit_max!r} is not a number of rows (1 or more)",
                hint="Give the most rows that a live query may ask for.",
            )
        filterable, sortable = _names("filterable", filterable), _names("sortable", sortable)
        if self._started:
            raise ConfigError(
                f"table {name} is declared too late: Headwater is running",
                hint=f"Declare it before `async with`, or call: await hw.enable({name!r})",
            )
        self._tables[name] = Rules(filterable, sortable, limit_max)
        self._captures[name] = capture

    def source(
        self,
        url: str,
        /,
        *,
        into: str,
        tables: TablesGiven | None = None,
        name: str | None = None,
        feed_only: bool = False,
        **options: Any,
    ) -> None:
        """Declare a database elsewhere whose tables are mirrored into the schema `into`.

        `tables` are names, or a mapping from names to what is mirrored of each: `columns` or
        `exclude`, `where` (a filter such as `c.status == "open"`), `types` and `target`. Without
        `tables`, all of them are mirrored. The URL may contain `${NAME}`, which is read from the
        environment when the source is opened. With `feed_only`, changes go to the log and the lake,
        and there is no mirror. `name` is `into` unless it is given; `options` depend on the kind of
        source.
        """
        definition = define_source(
            url, into=into, name=name, tables=tables, feed_only=feed_only, options=options
        )
        self._check_in_time(f"source {definition.name}")
        self._sources.add(definition)

    @property
    def sources(self) -> Mapping[str, SourceDefinition]:
        """The sources that the application and `headwater.toml` declare, by name."""
        return self._sources.definitions

    def authorize(self, rule: Authorize) -> Authorize:
        """Register the authorize hook; used as a decorator.

        The hook is called with the `Identity` of a session and an `AccessRequest`, and returns
        True, False, a filter that the rows must match, or `Allow`.
        """
        from headwater.gateway.auth.authorize_hook import check_hook

        check_hook(rule)
        self._authorize = rule
        return rule

    @property
    def queries(self) -> Mapping[str, Query]:
        """The registered queries, by name."""
        return self._functions.queries

    @property
    def mutations(self) -> Mapping[str, Mutation]:
        """The registered mutations, by name."""
        return self._functions.mutations

    @overload
    def query(self, function: Callable[..., Any], /) -> Query: ...
    @overload
    def query(
        self, name: str, /, *, sql: str, args: Mapping[str, Any] | None = None, returns: Any = Any,
        key: str | Iterable[str] = (), timeout: float | None = None, consistent: bool = False,
        share: Sharing = "user", trusted: bool = False,
    ) -> Query: ...  # fmt: skip
    @overload
    def query(
        self, name: str | None = None, /, *, key: str | Iterable[str] = (),
        timeout: float | None = None, consistent: bool = False, share: Sharing = "user",
        trusted: bool = False,
    ) -> Callable[[Callable[..., Any]], Query]: ...  # fmt: skip

    def query(self, given: Any = None, /, **options: Any) -> Any:
        """Register a reactive query: a decorator for a function, or a name and SQL text.

        It is executed again when data that it reads has changed. `key` names the columns that
        identify a row, which deltas need; `timeout` is in seconds. With `consistent` it is never
        executed on a replica. `share` says which users may get the same result, and so which part
        of the identity the function may read. A `trusted` query reads as Headwater's own database
        role for every user.
        """
        return self._functions.query(given, **options)

    @overload
    def mutation(self, function: Callable[..., Any], /) -> Mutation: ...
    @overload
    def mutation(
        self, name: str | None = None, /, *, timeout: float | None = None, trusted: bool = False
    ) -> Callable[[Callable[..., Any]], Mutation]: ...

    def mutation(self, given: Any = None, /, **options: Any) -> Any:
        """Register a function that writes, as a decorator. It runs in one transaction, and the log
        records the user. A `trusted` mutation writes as Headwater's own database role for every
        user."""
        return self._functions.mutation(given, **options)

    @property
    def views(self) -> Mapping[str, StreamingView]:
        """The registered streaming views, by name."""
        return self._views

    def view(
        self,
        *,
        key: str | Iterable[str],
        tables: Mapping[str, str] | None = None,
        name: str | None = None,
    ) -> Callable[[ViewFunctionT], ViewFunctionT]:
        """Register a streaming view, as a decorator: a function from PySpark DataFrames of tables
        to an aggregate, which `headwater pipeline run --app` keeps up to date in a table.

        Each parameter is a table of that name, unless `tables` names another. `key` has the columns
        that the aggregate is grouped by. The view's table has the function's name, or `name`.
        """

        def register(function: ViewFunctionT) -> ViewFunctionT:
            view = define(function, key=key, tables=tables, name=name)
            if view.name in self._views:
                raise ConfigError(
                    f"view {view.name} is registered twice",
                    hint='Give one of them another name: @hw.view(name="…")',
                )
            self._views[view.name] = view
            return function

        return register

    def topic(
        self,
        pattern: str,
        /,
        *,
        entity: str | None = None,
        table: str | None = None,
        poke: bool = False,
        parents: Mapping[str, str] | None = None,
        access: Callable[..., Any] | None = None,
        trusted: bool = False,
        timeout: float | None = None,
    ) -> TopicDefinition:
        """Declare a topic such as `chat:{id}`. The decorated function, or `access`, decides which
        users may follow it; without one, every client of the gateway may.

        It sends rows of `entity` whose keys are signalled (`signal`); or rows of `table`, each
        change of which is a signal to the topic that its columns name; or with `poke` only the
        message that something has changed. `parents` names further tables, each with the column
        that has the key of the row to send with it. Tables under row-level security need `trusted`,
        because all followers of a topic get the same rows. `timeout` is for the access function, in
        seconds.
        """
        self._check_in_time(f"topic {pattern}")
        return self.topics.add(
            TopicDefinition(
                pattern,
                entity=entity,
                table=table,
                poke=poke,
                parents=parents,
                access=access,
                trusted=trusted,
                timeout=timeout,
            )
        )

    def _check_in_time(self, label: str) -> None:
        if self._started:
            raise ConfigError(
                f"{label} is declared too late: Headwater is running",
                hint="Declare it before `async with`, for example at the top of the module.",
            )

    async def signal(self, topic: str, ids: Iterable[Any] = ()) -> None:
        """Send the rows with these keys to the followers of the topic: inside a mutation when it
        commits, otherwise now."""
        context = mutation_under_way()
        if context is not None:
            await context.signal(topic, ids)
            return
        runner = self._functions.runner
        if runner is None:
            raise ConfigError(
                f"topic {topic} is signalled while Headwater is not running",
                hint="Call it inside `async with hw:`, or in SQL: select headwater.signal(…).",
            )
        await runner.signal(topic, ids)

    def text_stream(
        self,
        table: str,
        /,
        *,
        id: Any,
        column: str = "content",
        state: str | None = "state",
        values: Mapping[str, Any] | None = None,
        text: str = "",
        every: float = 0.1,
        topic: str | None = None,
        identity: Identity = ANONYMOUS,
    ) -> TextStream:
        """Write a growing text to a row, used with `async with`; `append` adds to the text.

        The whole text is written at regular intervals and at the end, and `streaming`, `done`,
        `error` or `cancelled` to the column `state` (None for no such column). The row must exist;
        with `values` for its other columns it is inserted if it does not. `text` is the text at the
        start. `topic` is signalled with each write; a topic that is derived from the table needs no
        signal. `identity` is the user in the log, and has the database role that writes.
        """
        return TextStream(
            self._runner,
            table,
            id=id,
            column=column,
            state=state,
            values=values,
            text=text,
            every=every,
            topic=topic,
            identity=identity,
        )

    def _runner(self) -> MutationRunner:
        if self._functions.runner is None:
            raise ConfigError(
                "hw.text_stream is used while Headwater is not running",
                hint="Use it inside `async with hw:`.",
            )
        return self._functions.runner

    def channel(
        self,
        pattern: str,
        /,
        *,
        history: int = 50,
        presence: bool = True,
        access: Callable[..., Any] | None = None,
        timeout: float | None = None,
    ) -> ChannelDefinition:
        """Declare a channel such as `room:{id}`: messages and presence between clients, without
        storage in the database. The decorated function, or `access`, decides which users may join
        and publish; without one, every client of the gateway may.

        The last `history` messages are remembered while the channel has followers. With `presence`,
        followers get the list of members. `timeout` is for the access function, in seconds.
        """
        self._check_in_time(f"channel {pattern}")
        return self.channels.add(
            ChannelDefinition(
                pattern, history=history, presence=presence, access=access, timeout=timeout
            )
        )

    async def publish(self, channel: str, data: Any) -> None:
        """Publish on a channel, for its subscribers at all gateways: inside a mutation when that
        commits, otherwise now. Returns when the database has delivered it."""
        self.channels.find(channel)
        message, context = published(channel, message_json(data)), mutation_under_way()
        if self._bus is not None and context is not None:
            await context.execute(NOTIFY, await self._bus.signed(message))
        elif self._bus is not None:
            await self._bus.send(message)
        else:
            raise ConfigError(
                f"channel {channel} is published on while Headwater is not running",
                hint="Call it inside `async with hw:`.",
            )

    @overload
    def on(
        self, event: EventName, handler: HandlerT, /, *, parameters: bool = False
    ) -> HandlerT: ...
    @overload
    def on(
        self, event: EventName, /, *, parameters: bool = False
    ) -> Callable[[HandlerT], HandlerT]: ...

    def on(self, event: EventName, handler: Any = None, /, *, parameters: bool = False) -> Any:
        """Register a handler for every statement that a function executes (`query`), every function
        that fails (`error`) or every row that changes (`change`). With `parameters`, statements
        have their values instead of the names of their types."""
        if handler is None:
            return lambda handler: self.on(event, handler, parameters=parameters)
        self._functions.events.on(event, handler, parameters=parameters)
        return handler

    def asgi(self) -> Starlette:
        """The gateway as an ASGI app, which can be served or mounted. It works while Headwater
        runs: serve it directly, or give the application that mounts it `lifespan=hw.lifespan`."""
        from headwater.admin import routes as admin
        from headwater.gateway.http.app import create_app
        from headwater.past import routes as past

        if self._app is None:
            if self._started:
                raise ConfigError(
                    "hw.asgi() is called too late: Headwater is running",
                    hint="Call hw.asgi() before `async with`.",
                )
            self._app = create_app(
                self._running_gateway,
                origins=self.settings.gateway.origins,
                lifespan=self.lifespan,
                more=[
                    *admin.routes(self._running_gateway),
                    *past.routes(self._running_gateway),
                ],
            )
        return self._app

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """Runs Headwater as long as an ASGI application runs: `FastAPI(lifespan=hw.lifespan)`. Does
        nothing if Headwater runs already."""
        self._serves = True
        async with nullcontext() if self._started else self:
            yield

    def _running_gateway(self) -> Gateway:
        if self.gateway is None:
            raise Unavailable(
                "Headwater is not running",
                hint="Give the application that mounts it lifespan=hw.lifespan.",
            )
        return self.gateway

    async def __aenter__(self) -> Headwater:
        if self._started:
            raise ConfigError(
                "Headwater is running already", hint="Enter `async with hw:` once at a time."
            )
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            await self._stack.aclose()
        finally:
            self._started, self.gateway, self._bus = False, None, None

    async def _start(self) -> None:
        self._url = await self._stack.enter_async_context(database(self.settings, installed=False))
        async with self._connection("setup") as connection:
            await schema.install(connection)
            if keep := self.settings.log.retention_period:
                await maintenance.set_retention(connection, keep)
            for name, rules in self._tables.items():
                label = await triggers.enable(connection, name, self._captures[name])
                rules.check(await triggers.find_enabled(connection, label))
                self._rules[label] = rules
            await self._sources.declare(connection, runs=self._runs_sources)
            if self._runs_sources:
                await self._sources.report_others(connection)
        self._started = True
        self._functions.start(self.url, self.settings)
        self._stack.push_async_callback(self._functions.close)
        self.topics.start(self._functions.direct)
        self._stack.callback(self.topics.start, None)
        self.channels.start(self._functions.direct)
        self._stack.callback(self.channels.start, None)
        if self.channels:
            self._bus = await self._stack.enter_async_context(Bus(self.url))
        every = self.settings.log.maintenance_period.total_seconds()
        task = asyncio.create_task(maintenance.run(self.url, every=every))
        self._stack.push_async_callback(ended, task)
        watch = asyncio.create_task(WalCaptureProcess(self.url).run())
        self._stack.push_async_callback(ended, watch)
        if self._app is not None:
            await self._start_gateway()
        if self._runs_sources:
            sources = asyncio.create_task(self._sources.run(self.url, self._ask), name="sources")
            self._stack.push_async_callback(ended, sources)

    @property
    def _runs_sources(self) -> bool:
        """A gateway and a served application run the sources of the database. A script runs them
        if it declares one itself."""
        served = self._serves or self._app is not None
        return self.settings.sources.run and (served or self._sources.in_code)

    async def _ask(self, statement: str, values: None) -> list[tuple[bool]]:
        """A query about the database, over a connection that is there already if possible."""
        if self.gateway is not None:
            return await self.gateway.hub.tables.ask(statement, values)
        async with self._connection("sources") as connection:
            return await (await connection.execute(statement.encode(), values)).fetchall()

    async def _start_gateway(self) -> None:
        from headwater.admin.measurements import DatabaseMetrics
        from headwater.channels.registry import ChannelRegistry
        from headwater.gateway.gateway import Gateway
        from headwater.hub.hub import Hub
        from headwater.metrics import Metrics

        if self.settings.question_url is not None:
            async with self._connection("setup") as connection:
                await check_question_url(connection, self.settings.question_url)
        metrics = Metrics()
        hub = Hub(
            self.url,
            rules=self._rules,
            coalesce=self.settings.live.coalesce,
            recheck=self.settings.gateway.recheck_period.total_seconds(),
            metrics=metrics,
            settings=self.settings,
            events=self._functions.events,
        )
        await self._stack.enter_async_context(hub)
        registry: ChannelRegistry | None = None
        if self._bus is not None:
            registry = ChannelRegistry(
                self._bus,
                period=self.settings.gateway.presence_period_seconds,
                timeout=self.settings.gateway.presence_timeout_seconds,
                metrics=metrics,
                next_view=hub.next_view_id,
                memory=hub.memory,
            )
            await self._stack.enter_async_context(registry)
        gateway = Gateway(
            hub,
            self.settings,
            url=self.url,
            authorize=self._authorize,
            metrics=metrics,
            queries=self._functions.queries,
            mutations=self._functions.mutations,
            runner=self._functions.runner,
            topics=self.topics,
            channels=self.channels,
            registry=registry,
            declared=self._rules,
            declared_sources=self._sources.definitions,
            measure_database=DatabaseMetrics(self.url, metrics).measure,
        )
        self.gateway = await self._stack.enter_async_context(gateway)

    @asynccontextmanager
    async def connection(self, purpose: str = "application") -> AsyncIterator[Connection]:
        """A new connection, in autocommit mode, with the search path of the role."""
        connection = await connect(self.url, purpose=purpose, application_path=True)
        try:
            yield connection
        finally:
            await connection.close()

    @asynccontextmanager
    async def _connection(self, purpose: str) -> AsyncIterator[Connection]:
        """A connection for Headwater's own statements."""
        connection = await connect(self.url, purpose=purpose)
        try:
            yield connection
        finally:
            await connection.close()

    async def enable(self, name: str, *, capture: triggers.Capture | None = None) -> str:
        """Capture a table's changes from now on: by triggers, or with `capture="wal"` from the
        write-ahead log. Without it, a table that is captured already stays as it is."""
        async with self._connection("setup") as connection:
            return await triggers.enable(connection, name, capture)

    async def disable(self, name: str) -> str:
        """Stop capturing a table's changes."""
        async with self._connection("setup") as connection:
            return await triggers.disable(connection, name)

    async def changes(
        self,
        *tables: str,
        where: Filter | None = None,
        since: Position | None = None,
        cursor: str | None = None,
    ) -> AsyncGenerator[Transaction, None]:
        """Committed transactions, whole and in order, from now on or from a position.

        `tables` are the tables to follow; none means all. With `where`, which needs one table, only
        changes of rows that match before or after the change are included. `since` is a position to
        resume from. With `cursor`, the position is stored in the database under that name: a
        transaction counts as processed when the next one is requested, so after a crash it is
        delivered again and none is skipped.
        """
        found = await self._find(tables)
        oids = frozenset(table.oid for table in found)
        wants = (lambda table: table.oid in oids) if oids else None
        keeps = _feed_filter(where, found)
        if cursor is None:
            feed = follow(self.url, since=since, wants=wants)
        else:
            async with self._connection("cursor") as connection:
                with translated():
                    since = since or await cursors.load(connection, cursor)
            saver = _CursorSaver(cursor)
            feed = follow(self.url, since=since, wants=wants, caught_up=saver.caught_up)
        async with aclosing(feed):
            async for transaction in feed:
                if matching := _filtered(transaction, keeps):
                    yield matching

    async def position(self) -> Position:
        """The current position of the log: `changes(since=…)` with it yields what is committed
        later."""
        async with self._connection("setup") as connection:
            with translated():
                reader = await LogReader.open(connection)
                return await reader.now(connection)

    async def _find(self, tables: tuple[str, ...]) -> list[Table]:
        """The oids of the tables, which stay when a table is renamed. An error for a table that is
        not enabled."""
        if not tables:
            return []
        async with self._connection("setup") as connection:
            return [await triggers.find_enabled(connection, name) for name in tables]


def _names(what: str, names: Iterable[str] | None) -> frozenset[str] | None:
    """The columns of a declaration; None for all."""
    if isinstance(names, str):
        raise ConfigError(
            f"{what}={names!r} is a text, not a list", hint=f"Give a list: {what}=[{names!r}]"
        )
    return None if names is None else frozenset(names)


def _feed_filter(where: Filter | None, tables: list[Table]) -> ChangeFilter | None:
    if where is None:
        return None
    if len(tables) != 1:
        raise InvalidQuery(
            "a filter needs exactly one table", path="where", hint='hw.changes("orders", where=…)'
        )
    return ChangeFilter(where, tables[0])


def _filtered(transaction: Transaction, keeps: ChangeFilter | None) -> Transaction | None:
    """The transaction with the changes that pass the filter; None if there are none."""
    if keeps is None:
        return transaction
    changes = tuple(change for change in transaction.changes if keeps.carries(change))
    return msgspec.structs.replace(transaction, changes=changes) if changes else None


@asynccontextmanager
async def database(
    settings: Settings, *, keep_running: bool = False, installed: bool = True
) -> AsyncIterator[str]:
    """The URL of the database in the settings. The embedded server runs inside the block, and
    longer if it is to keep running. Headwater's schema is installed in it, unless `installed` is
    False."""
    if settings.url is not None:
        yield settings.url
        return
    server = EmbeddedPostgres(settings.data_dir)
    await asyncio.to_thread(server.start)
    stays = False
    try:
        if installed:
            await install(server.url)
        stays = keep_running
        yield server.url
    finally:
        await asyncio.to_thread(server.close, keep_running=stays)


async def install(url: str) -> None:
    """Install Headwater's schema in a database, or upgrade it."""
    connection = await connect(url, purpose="setup")
    try:
        await schema.install(connection)
    finally:
        await connection.close()


class _CursorSaver:
    """Saves the cursor of a consumer: only processed transactions, and not after each one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_changes = True
        self._saved_at = -math.inf

    async def caught_up(
        self, connection: Connection, position: Position, has_changes: bool
    ) -> None:
        """Everything up to the position was processed. Without changes it is saved less often,
        because saving is a transaction too; but it is saved, so that the log is not trimmed past
        it."""
        waited = time.monotonic() - self._saved_at
        self._has_changes = self._has_changes or has_changes
        if waited >= (CURSOR_SAVE_SECONDS if self._has_changes else _CURSOR_IDLE_SAVE_SECONDS):
            await cursors.save(connection, self._name, position)
            self._has_changes, self._saved_at = False, time.monotonic()
