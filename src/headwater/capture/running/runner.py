"""Runs one source for as long as it is declared: sessions, one after the other, with a pause after
an error. Only the process that has the source's lease runs it; others wait.

The lease is an advisory lock, which every role can take. Where a role that is not Headwater's holds
it, the source is run without: the position that each transaction saves already stops a second
runner."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import psycopg

from headwater.capture.kinds import open_source
from headwater.capture.mirror import positions, tables
from headwater.capture.mirror.locking import MirrorLocked, explained
from headwater.capture.mirror.registry import DeclaredSource, State
from headwater.capture.running.session import Session
from headwater.capture.running.status import Status, StatusWriter, runner_name
from headwater.capture.source import Source, SourceDefinition
from headwater.database import Connection, connect, translate
from headwater.errors import (
    CaptureError,
    ConfigError,
    HeadwaterError,
    PositionLost,
    SourceRefused,
    SourceUnavailable,
)
from headwater.limits import SOURCE_CHUNK_ROWS, SOURCE_RETRY_SECONDS_MAX

logger = logging.getLogger(__name__)

LEASE_CLASS = 1752654964
"""Of the advisory lock that is the lease, see headwater.lock_class(). The second number is a hash
of the source's name."""

_LEASE_LOOK_SECONDS = 2.0
"""How often a process looks whether it can have the lease."""

_DIVERGED = frozenset({"21", "22", "23", "27", "54"})
"""Of SQLSTATE: the mirror does not take a change that its source made."""

_UNTIL_REQUESTED = 86_400.0
"""Seconds until the next attempt where only a request helps: a resnapshot."""

OpenSource = Callable[[SourceDefinition], Source]


class Runner:
    """Runs one source. `update` brings what was requested of it, `stop` ends it in order."""

    def __init__(
        self,
        url: str,
        declared: DeclaredSource,
        statuses: StatusWriter,
        *,
        open_source: OpenSource = open_source,
        chunk_rows: int = SOURCE_CHUNK_ROWS,
        retry_seconds: float = 0.5,
    ) -> None:
        definition = declared.definition
        self.name = definition.name
        self.is_removed = False
        self.status = Status(
            definition.name, "unknown", definition.into, definition.feed_only, runner=runner_name()
        )
        self._url = url
        self._declared = declared
        self._statuses = statuses
        self._open_source = open_source
        self._chunk_rows = chunk_rows
        self._retry_seconds = retry_seconds
        self._failures = 0
        self._session: Session | None = None
        self._stopped = False
        self._changed = asyncio.Event()
        self._has_counts = False

    def update(self, declared: DeclaredSource) -> None:
        """What is declared and requested now."""
        if declared != self._declared:
            restarts = _needs_restart(self._declared, declared)
            self._declared = declared
            self._changed.set()
            if restarts and self._session is not None:
                self._session.stop.set()
            elif restarts:
                self._forget_failure()

    async def stop(self) -> None:
        """Finish the transaction at hand."""
        self._stopped = True
        self._changed.set()
        if self._session is not None:
            self._session.stop.set()

    async def run(self) -> None:
        while not self._stopped and not self.is_removed:
            self._changed.clear()
            pause = await self._attempt()
            if pause and not self._stopped:
                await self._write_status()
                await self._pause(pause)
        if not self.is_removed:
            self.status.enter("stopped")
            self.status.runner = None
            await self._write_status()

    async def _pause(self, seconds: float) -> None:
        """Wait, at most until something is declared or requested, or it is stopped."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _attempt(self) -> float:
        """One session. Returns how long to wait before the next one, at most."""
        try:
            return await self._run_with_lease()
        except PositionLost as error:
            return self._fail("lost", error, _UNTIL_REQUESTED)
        except (SourceRefused, ConfigError) as error:
            return self._fail("refused", error, SOURCE_RETRY_SECONDS_MAX)
        except SourceUnavailable as error:
            return self._fail("failed", error, self._backoff())
        except psycopg.Error as error:
            if (error.sqlstate or "")[:2] in _DIVERGED:
                return self._fail("diverged", self._divergence(error), _UNTIL_REQUESTED)
            return self._fail("failed", translate(error, self._url), self._backoff())
        except MirrorLocked as error:
            return self._fail("failed", await self._explained(error), self._backoff())
        except HeadwaterError as error:
            return self._fail("failed", error, self._backoff())
        except (OSError, EOFError) as error:
            return self._fail("failed", error, self._backoff())
        except Exception as error:
            logger.exception("source %s failed", self.name)
            return self._fail("failed", error, self._backoff())

    def _forget_failure(self) -> None:
        """An error from before a request is not the answer to it. One that comes again is."""
        self.status.enter("waiting")
        self._statuses.forget(self.name)

    def _fail(self, state: State, error: BaseException, pause: float) -> float:
        if self._changed.is_set() and not self._stopped:
            logger.info("source %s: %s, before a new request", self.name, error)
            self._forget_failure()
            return 0.0
        self.status.enter(state, error)
        if state == "lost":
            self.status.hint = f"Copy its tables again: headwater source resnapshot {self.name}"
        logger.warning("source %s: %s (%s)", self.name, error, state)
        return pause

    def _divergence(self, error: psycopg.Error) -> CaptureError:
        message = (error.diag.message_primary or str(error)).removeprefix("headwater: ")
        return CaptureError(
            message, hint=f"Copy its tables again: headwater source resnapshot {self.name}"
        )

    async def _explained(self, locked: MirrorLocked) -> CaptureError:
        try:
            async with await connect(self._url, purpose=f"source {self.name}") as connection:
                return await explained(connection, locked)
        except (psycopg.Error, HeadwaterError):
            return locked

    def _backoff(self) -> float:
        self._failures += 1
        doubled: float = self._retry_seconds * 2.0 ** min(self._failures, 10)
        longest = min(SOURCE_RETRY_SECONDS_MAX, doubled)
        return random.uniform(0.3, 1.0) * longest

    async def _run_with_lease(self) -> float:
        if self._declared.paused and not self._declared.removing:
            self.status.enter("paused")
            self._statuses.add(self.status)
            return SOURCE_RETRY_SECONDS_MAX
        connection = await connect(self._url, purpose=f"source {self.name}")
        try:
            while (holder := await _take_lease(connection, self.name)) and holder.is_ours:
                self._wait_for(holder)
                await self._pause(_LEASE_LOOK_SECONDS)
                if self._changed.is_set():
                    return 0.0
            await self._load_counts(connection)
            self.status.runner = runner_name()
            self._statuses.add(self.status)
            source = self._open_source(self._declared.definition)
            try:
                self.status.kind = source.kind
                if self._declared.removing:
                    await self._remove(connection, source)
                    return 0.0
                return await self._run_session(connection, source, holder)
            finally:
                with suppress(Exception):
                    await source.close()
        finally:
            await connection.close()

    async def _load_counts(self, connection: Connection) -> None:
        """Continue to count where the last process ended."""
        if self._has_counts:
            return
        cursor = await connection.execute(
            "select changes, transactions, committed_at from headwater.sources where name = %s",
            (self.name,),
        )
        row = await cursor.fetchone()
        if row is not None:
            self.status.changes, self.status.transactions, self.status.committed_at = row
        self._has_counts = True

    async def _run_session(
        self, connection: Connection, source: Source, stranger: _Holder | None
    ) -> float:
        session = Session(
            source,
            self._declared.definition,
            connection,
            self.status,
            chunk_rows=self._chunk_rows,
            warning=None if stranger is None else stranger.warning,
        )
        if self._stopped or self._changed.is_set():
            return 0.0
        self._session = session
        applied = self.status.transactions
        failures, self._failures = self._failures, 0
        try:
            await session.run()
        except MirrorLocked:
            self._failures = failures  # readers wait meanwhile: less and less often
            raise
        finally:
            self._session = None
            if self.status.transactions == applied and self.status.state != "running":
                self._failures = failures
        return 0.0

    def _wait_for(self, holder: _Holder) -> None:
        reason = CaptureError(f"another runner has this source: {holder.text}")
        if self.status.error != str(reason):
            logger.info("source %s: %s", self.name, reason)
        self.status.enter("waiting", reason)
        # The one that runs it writes the row.
        self._statuses.remove(self.name)

    async def _remove(self, connection: Connection, source: Source) -> None:
        """First at the source, then here: what is left at a source costs its disk."""
        self.status.enter("removing")
        await self._write_status()
        await source.remove()
        name, into = self.name, self._declared.definition.into
        async with connection.transaction():
            await connection.execute("select set_config('headwater.applies', %s, true)", (name,))
            for mirror in (await tables.load_all(connection, name, into)).values():
                await tables.release(connection, mirror, drop=self._declared.drop_mirrors)
            if self._declared.drop_mirrors:
                await tables.drop_schema(connection, into)
            saved = await positions.saved(connection, name)
            if saved is not None:
                await positions.save(connection, name, saved, None)
            for table, column in _ROWS:
                await connection.execute(
                    f"delete from headwater.{table} where {column} = %s".encode(), (name,)
                )
        self._statuses.remove(name)
        self.is_removed = True

    async def _write_status(self) -> None:
        with suppress(psycopg.Error, HeadwaterError):
            await self._statuses.write()


_ROWS = (("source_tables", "source"), ("sources", "name"), ("source_definitions", "name"))


def _needs_restart(old: DeclaredSource, new: DeclaredSource) -> bool:
    """A request that is done is no reason to begin again."""
    return (
        new.definition != old.definition
        or new.paused
        or new.removing
        or (bool(new.resnapshot) and new.version != old.version)
    )


class _Holder(NamedTuple):
    """A session that has the lease. `is_ours`: its role may run sources."""

    pid: int
    text: str
    is_ours: bool

    @property
    def warning(self) -> str:
        return (
            f"{self.text}, which is not Headwater's, holds the advisory lock of this source, which"
            f" is run without. End it: select pg_terminate_backend({self.pid})"
        )


async def _take_lease(connection: Connection, name: str) -> _Holder | None:
    """Take the lease, which ends with the connection. Returns who has it if that is another."""
    cursor = await connection.execute(
        "select pg_try_advisory_lock(%s, hashtext(%s))", (LEASE_CLASS, name)
    )
    row = await cursor.fetchone()
    if row == (True,):
        return None
    cursor = await connection.execute(_HOLDER, (LEASE_CLASS, name))
    found = await cursor.fetchone()
    return _Holder(*found) if found else _Holder(0, "unknown", is_ours=True)


_HOLDER = """
    select l.pid,
           concat('process ', l.pid, ' of role ', a.usename, ' from ',
                  coalesce(a.client_addr::text, 'this host')),
           coalesce(pg_has_role(a.usesysid, n.nspowner, 'member'), true)
    from pg_locks l
    join pg_namespace n on n.nspname = 'headwater'
    left join pg_stat_activity a on a.pid = l.pid
    where l.locktype = 'advisory' and l.classid = %s::bigint::oid and l.objsubid = 2 and l.granted
      and l.objid = (hashtext(%s)::bigint & 4294967295)::oid
      and l.database = (select oid from pg_database where datname = current_database())
"""
