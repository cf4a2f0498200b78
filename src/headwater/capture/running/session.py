"""One attempt to run a source: from its check to an error or an orderly stop.

Everything that a session knows comes from the database at its start, so after any error the next
session continues exactly where the last transaction was committed. A session applies transactions
in their order, copies one table at a time beside them, and acknowledges positions once they are
durable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import msgspec

from headwater.capture.mirror import registry, tables
from headwater.capture.mirror.applier import Applier
from headwater.capture.mirror.chunks import PendingChunk
from headwater.capture.mirror.feeds import FeedWriter
from headwater.capture.mirror.registry import TableState
from headwater.capture.mirror.runs import Insert, tables_of
from headwater.capture.mirror.sizes import bounded, is_large
from headwater.capture.mirror.tables import Mirror
from headwater.capture.mirror.writers import (
    CopyWriter,
    ExactWriter,
    FilterRuns,
    TableWriter,
    TolerantWriter,
)
from headwater.capture.running.beginning import begin, bring_up
from headwater.capture.running.check import tolerate_missing
from headwater.capture.running.durability import Acknowledger
from headwater.capture.running.filters import row_filter
from headwater.capture.running.queue import ItemQueue
from headwater.capture.running.status import Status
from headwater.capture.source import (
    Chunk,
    Item,
    Progress,
    RowChanges,
    SchemaChange,
    Source,
    SourceDefinition,
    SourceKey,
    SourceRow,
    SourceTable,
    TableDropped,
    TableVersions,
    TransactionPart,
)
from headwater.database import Connection
from headwater.errors import SourceError, SourceRefused
from headwater.limits import (
    SOURCE_BATCH_CHANGES,
    SOURCE_BATCH_TRANSACTIONS,
    SOURCE_CHUNK_ROWS,
    SOURCE_HEALTH_SECONDS,
    SOURCE_PROGRESS_SECONDS,
)

_IDLE_SECONDS = 0.2
"""How long to wait for an item before looking at the clock."""

_CANCEL_SECONDS = 0.5
"""How long a task may take to end before it is cancelled once more."""


class Session:
    """Runs one source until `stop` is set. `stop` may be set at any time: the transaction at hand
    is finished first."""

    def __init__(
        self,
        source: Source,
        definition: SourceDefinition,
        connection: Connection,
        status: Status,
        *,
        chunk_rows: int = SOURCE_CHUNK_ROWS,
        warning: str | None = None,
    ) -> None:
        """`warning` is shown with those of the source."""
        self.stop = asyncio.Event()
        self._source = source
        self._definition = definition
        self._connection = connection
        self._status = status
        self._chunk_rows = chunk_rows
        self._warnings: list[str] = [] if warning is None else [warning]
        self._mirrors: dict[str, Mirror] = {}
        self._filters: dict[str, FilterRuns | None] = {}
        self._writers: dict[str, TableWriter | None] = {}
        self._applier = Applier(connection, self._definition.name, None)
        self._position = ""  # up to which changes are applied; later than the saved one when idle
        self._schema_changes: list[SchemaChange | TableDropped | TableVersions] = []
        self._chunk: asyncio.Task[Chunk] | None = None
        self._copying: str | None = None
        self._saved_at = self._looked_at = time.monotonic()
        self._health_warning: str | None = None
        self._acknowledger = Acknowledger(source, self._applier)

    async def run(self) -> None:
        self._status.enter("checking")
        await self._check()
        await self._applier.prepare()
        await self._begin()
        self._report()
        queue = ItemQueue()
        items = self._source.changes(self._position)
        async with _running(queue.fill(items)), _running(self._watch_health()):
            try:
                await self._follow(queue)
                await self._finish()
            finally:
                await self._applier.close()
                if self._chunk is not None:
                    await _end(self._chunk)

    # ------------------------------------------------------------ start

    async def _check(self) -> None:
        known = await registry.tables_of(self._connection, self._definition.name)
        for problem in tolerate_missing(await self._source.check(), known):
            if not problem.warning:
                raise SourceRefused(problem.what, hint=problem.fix)
            if problem.missing is None:  # a warning about a dropped mirror says it
                self._warnings.append(f"{problem.what}. {problem.fix}")

    async def _begin(self) -> None:
        begun = await begin(self._connection, self._source, self._definition)
        self._mirrors = begun.mirrors
        self._applier.position = self._position = begun.position
        for mirror in self._mirrors.values():
            self._set_writer(mirror)

    # ------------------------------------------------------------ tables

    def _set_writer(self, mirror: Mirror) -> None:
        """Choose what changes of a table become, by its state."""
        if mirror.state in ("dropped", "removed"):
            self._writers[mirror.name] = None
            return
        wanted = row_filter(self._source, self._definition, mirror)
        self._filters[mirror.name] = wanted
        live: TableWriter = (
            ExactWriter(mirror) if wanted is None else TolerantWriter(mirror, wanted)
        )
        if self._definition.feed_only:
            self._writers[mirror.name] = FeedWriter(mirror, wanted)
        elif mirror.state in ("copying", "recopying"):
            follows = mirror.state == "recopying" and mirror.follows
            self._writers[mirror.name] = CopyWriter(mirror, wanted, live if follows else None)
        else:
            self._writers[mirror.name] = live

    async def _apply_schema_changes(self) -> None:
        """In the transaction of the next change, or in one of their own if there is none."""
        await self._applier.begin()
        await self._applier.flush()
        changes, self._schema_changes = self._schema_changes, []
        for change in changes:
            match change:
                case TableDropped(name):
                    await self._drop(name)
                case TableVersions(versions):
                    await self._compare_versions(versions)
                case SchemaChange():
                    await self._alter(change)
        self._report()

    async def _drop(self, name: str) -> None:
        mirror = self._mirrors.get(name)
        if mirror is None:
            return
        mirror.state = "dropped"
        await tables.drop_staging(self._connection, mirror)
        await tables.save(self._connection, mirror)
        self._abandon_chunk(name)
        self._set_writer(mirror)

    async def _alter(self, change: SchemaChange) -> None:
        table = change.table
        mirror = self._mirrors.get(table.name)
        if mirror is None or mirror.state in ("dropped", "removed"):
            mirror = await bring_up(self._connection, self._definition, self._mirrors, table)
        else:
            known = mirror.description
            table = msgspec.structs.replace(table, version=table.version or known.version)
            same = msgspec.structs.replace(table, target=known.target, version=known.version)
            if same == known and not change.copies:
                await self._set_version(mirror, table.version)
                return
            follows = (mirror.state == "live" or mirror.follows) and table.key == known.key
            has_lost = await tables.alter(self._connection, mirror, table)
            await tables.save(self._connection, mirror)
            copied_now = mirror.state in ("copying", "recopying")
            if (has_lost or change.copies or copied_now) and not self._definition.feed_only:
                await tables.begin_copy(self._connection, mirror, follows=follows)
        self._abandon_chunk(table.name)
        self._set_writer(mirror)

    async def _compare_versions(self, versions: dict[str, str]) -> None:
        """Copy the tables again whose rows may have changed while no runner read their changes. A
        mirror of an earlier release has no version, and none to compare."""
        for name, version in versions.items():
            mirror = self._mirrors.get(name)
            if mirror is None or mirror.state in ("dropped", "removed"):
                continue
            known = mirror.description.version
            await self._set_version(mirror, version)
            if known and known != version and not self._definition.feed_only:
                await self._copy_again(name, follows=mirror.state == "live" or mirror.follows)

    async def _set_version(self, mirror: Mirror, version: str) -> None:
        if mirror.description.version != version:
            mirror.description = msgspec.structs.replace(mirror.description, version=version)
            await tables.save(self._connection, mirror)

    def _has_versions(self, versions: dict[str, str]) -> bool:
        mirrors = (self._mirrors.get(name) for name in versions)
        return all(m is None or m.description.version == versions[m.name] for m in mirrors)

    def _abandon_chunk(self, name: str) -> None:
        if self._copying == name:
            self._copying = None
            if self._chunk is not None:
                self._chunk.cancel()
                self._chunk = None

    # ------------------------------------------------------------ the tail

    async def _follow(self, queue: ItemQueue) -> None:
        while not (self.stop.is_set() and not self._applier.is_open):
            if not self._applier.is_open:
                await self._advance_copy()
            if not await self._apply_available(queue):
                await self._tick(idle=True)
                await queue.wait(_IDLE_SECONDS)
            else:
                await self._tick(idle=False)

    async def _apply_available(self, queue: ItemQueue) -> bool:
        """Apply items that are there, up to a bound, and wait for the answers. Returns whether
        there was any."""
        taken = changes = transactions = 0
        lag: datetime | None = None
        while changes < SOURCE_BATCH_CHANGES and transactions < SOURCE_BATCH_TRANSACTIONS:
            item = queue.get_nowait()
            if item is None:
                break
            taken += 1
            changes += await self._take(item)
            if isinstance(item, TransactionPart) and item.position is not None:
                transactions += 1
                lag = item.committed_at or lag
            if self._is_chunk_due() or (self.stop.is_set() and not self._applier.is_open):
                break
        await self._applier.flush()
        if taken:
            self._count(changes, transactions, lag)
        return taken > 0

    async def _take(self, item: Item) -> int:
        match item:
            case TransactionPart():
                return await self._take_part(item)
            case Progress(position):
                if self._schema_changes:
                    await self._apply_schema_changes()
                    await self._commit(position, None)
                self._position = position
            case TableVersions(versions) if not self._schema_changes and self._has_versions(
                versions
            ):
                pass
            case SchemaChange() | TableDropped() | TableVersions():
                self._schema_changes.append(item)
        return 0

    async def _take_part(self, part: TransactionPart) -> int:
        count = 0
        if part.changes:
            await self._applier.begin()
        if self._schema_changes:
            await self._apply_schema_changes()
        for name, group in tables_of(part.changes):
            writer = self._writers.get(name)
            if writer is not None:
                await self._write(name, writer, group)
                count += sum(len(c.after) or len(c.before) or 1 for c in group)
                if writer.needs_copy:
                    await self._copy_again(name)
        if part.position is not None:
            await self._commit(part.position, part.committed_at)
        return count

    async def _write(self, name: str, writer: TableWriter, group: Sequence[RowChanges]) -> None:
        if not is_large(group):
            await writer.write(self._applier, group)
            return
        await self._applier.flush()
        with bounded(name, (*group[0].after, *group[0].before)):
            await writer.write(self._applier, group)
            await self._applier.flush()

    async def _copy_again(self, name: str, *, follows: bool = False) -> None:
        mirror = self._mirrors[name]
        await self._applier.flush()
        self._abandon_chunk(name)
        await tables.begin_copy(self._connection, mirror, follows=follows)
        self._set_writer(mirror)

    async def _commit(self, position: str, committed_at: datetime | None) -> None:
        await self._applier.commit(position, committed_at)
        self._position = position
        self._saved_at = time.monotonic()

    # ------------------------------------------------------------ the copy

    async def _advance_copy(self) -> None:
        """Read and write chunks until one must wait for the tail. No change is applied meanwhile:
        how old a chunk is, is only known when it has been read."""
        while True:
            if self._is_chunk_due():
                await self._write_chunk()
            if self._copying is None:
                self._copying = self._next_to_copy()
            if self._copying is None or self._pending() is not None or self.stop.is_set():
                return
            await self._read_chunk(self._copying)

    async def _read_chunk(self, name: str) -> None:
        mirror, writer = self._mirrors[name], self._writers[name]
        assert isinstance(writer, CopyWriter)
        if mirror.estimate is None:
            mirror.estimate = await _estimate(self._source, mirror.description)
        if self._chunk is None:
            self._chunk = self._reading(mirror, mirror.cursor)
        stopped = asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({self._chunk, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        if self._chunk.done():
            chunk, self._chunk = self._chunk.result(), None
            writer.pending = PendingChunk(_matching(chunk, self._filters[name]), writer.key)

    def _reading(self, mirror: Mirror, after: SourceKey | None) -> asyncio.Task[Chunk]:
        return asyncio.create_task(
            self._source.snapshot(mirror.description, after, self._chunk_rows)
        )

    def _next_to_copy(self) -> str | None:
        names = [m.name for m in self._mirrors.values() if m.state in ("copying", "recopying")]
        return min(names, default=None)

    def _pending(self) -> PendingChunk | None:
        writer = self._writers.get(self._copying or "")
        return writer.pending if isinstance(writer, CopyWriter) else None

    def _is_chunk_due(self) -> bool:
        pending = self._pending()
        return (
            pending is not None
            and not self._applier.is_open
            and self._source.contains(self._position, pending.high)
        )

    async def _write_chunk(self) -> None:
        assert self._copying is not None
        mirror, writer = self._mirrors[self._copying], self._writers[self._copying]
        assert isinstance(writer, CopyWriter)
        assert writer.pending is not None
        last = writer.pending.last
        if last is not None:
            self._chunk = self._reading(mirror, last)  # while this one is written
        await self._applier.begin()
        with bounded(mirror.name, list(writer.pending.rows.values())):
            mirror.copied += await writer.write_chunk(self._applier)
            mirror.cursor = last
            await self._applier.flush()
            if last is None:
                if mirror.state == "recopying":
                    await tables.replace_rows(self._connection, mirror)
                await tables.make_live(self._connection, mirror)
                mirror.state = "live"
        await tables.save(self._connection, mirror)
        if last is None:
            # What a copy changed in the mirror is traced to this position.
            await self._commit(self._position, None)
        else:
            await self._applier.commit_only()
        await self._applier.flush()
        if last is None:
            self._copying = None
            self._set_writer(mirror)
            await self._connection.execute(f"analyze {mirror.table}".encode())
        self._report()

    # ------------------------------------------------------------ the clock

    async def _tick(self, *, idle: bool) -> None:
        now = time.monotonic()
        if self._applier.is_open:
            return
        if self._applier.position != self._position and (
            now - self._saved_at > SOURCE_PROGRESS_SECONDS
        ):
            await self._applier.commit_progress(self._position)
            await self._applier.flush()
            self._saved_at = now
        if now - self._looked_at > SOURCE_HEALTH_SECONDS:
            self._looked_at = now
            await tables.refuse_triggers(self._connection, self._mirrors.values())
        await self._acknowledger.look(idle=idle)

    async def _finish(self) -> None:
        """Save how far an idle source was read. What is not acknowledged is read again, and its
        position is known to be applied."""
        if self._applier.position != self._position:
            await self._applier.commit_progress(self._position)
        await self._applier.flush()

    async def _watch_health(self) -> None:
        while True:
            with suppress(SourceError):  # the changes will say it
                health = await self._source.health()
                self._status.lag_bytes = health.lag_bytes
                self._health_warning = health.warning
                self._report_warnings()
            await asyncio.sleep(SOURCE_HEALTH_SECONDS)

    # ------------------------------------------------------------ status

    def _count(self, changes: int, transactions: int, committed_at: datetime | None) -> None:
        status = self._status
        status.changes += changes
        status.transactions += transactions
        if committed_at is not None:
            status.committed_at = committed_at
            status.lag = max(0.0, (datetime.now(UTC) - committed_at).total_seconds())
        status.position = self._position
        if transactions == 0 and changes == 0:
            status.lag = 0.0

    def _report(self) -> None:
        mirrors = sorted(self._mirrors.values(), key=lambda mirror: mirror.name)
        self._status.tables = tuple(
            TableState(m.name, m.description.target, m.state, m.copied, m.estimate) for m in mirrors
        )
        copying = any(m.state in ("copying", "recopying") for m in mirrors)
        self._status.position = self._position
        self._status.enter("copying" if copying else "running")
        self._report_warnings()

    def _report_warnings(self) -> None:
        dropped = [
            f"the table {mirror.name} is no longer at the source: {mirror.schema}."
            f"{mirror.description.target} stays as it was. Create it there again, or leave it out"
            " of the source."
            for mirror in self._mirrors.values()
            if mirror.state == "dropped"
        ]
        texts = [*self._warnings, *dropped, self._health_warning]
        self._status.warning = "\n".join(text for text in texts if text) or None


def _matching(chunk: Chunk, wanted: FilterRuns | None) -> Chunk:
    if wanted is None or not chunk.rows:
        return chunk
    rows: list[SourceRow] = []
    for run in wanted(Insert(chunk.rows)):
        if isinstance(run, Insert):
            rows.extend(run.rows)
    return msgspec.structs.replace(chunk, rows=rows)


async def _estimate(source: Source, table: SourceTable) -> int | None:
    """About how many rows a table has, for a progress bar; of sources that can say it."""
    method = getattr(source, "estimate", None)
    if method is None:
        return None
    found: int | None = await method(table)
    return found


@asynccontextmanager
async def _running(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """A task for as long as the block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        await _end(task)


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel a task until it ends. Before Python 3.12, `asyncio.wait_for` may swallow one
    cancellation; a source that uses it would be read for ever."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_SECONDS)
    if not task.cancelled():
        task.exception()  # it was seen before, or comes too late
