"""Single rows of the past, read without Spark: the lake by delta-rs' own engine (DataFusion), the
end of the log by PostgreSQL.

The rules are those of `Lake` (`resolver`, `state`, `history`); only the engine that answers the
questions is another one. Whole tables can be read too, if they are small: every row passes through
Python. `choice` decides which requests come here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import msgspec
import pyarrow as pa
from deltalake import DeltaTable

from headwater.errors import (
    ConfigError,
    DatabaseError,
    NotInstalled,
    ResyncRequired,
    Unavailable,
)
from headwater.model import Table
from headwater.pipeline.lake import delta
from headwater.pipeline.lake.events import STORED_EVENTS
from headwater.pipeline.lake.keys import key_text
from headwater.pipeline.lake.moments import Moment, aware
from headwater.pipeline.lake.schemas import ImageReader, arrow_schema
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.reading import history, state, tail
from headwater.pipeline.reading.event_query import AnswerRow, EventQuery
from headwater.pipeline.reading.resolver import KnownState, LakePaths, Resolver, days, with_text
from headwater.pipeline.reading.tail import TailReader


class PointAnswer(msgspec.Struct, frozen=True):
    """Rows as values of Python, and their types in Arrow."""

    schema: Any
    rows: list[AnswerRow]

    @property
    def column_names(self) -> list[str]:
        names: list[str] = self.schema.names
        return names

    def to_pylist(self) -> list[AnswerRow]:
        return self.rows

    def to_arrow(self) -> pa.Table:
        return pa.Table.from_pylist(self.rows, self.schema)


class VersionPage(msgspec.Struct, frozen=True):
    """Versions of a row, the newest first, and the shapes of its table. `before` is for the next
    page; None after the last one."""

    tables: dict[int, Table]
    versions: list[AnswerRow]
    before: int | None


class PointReader:
    """A lake at one version of its events, and the log up to one position: every answer is about
    the same changes. Use `opened`. `check` is called before each part of the work, and may raise:
    that is how a request ends early."""

    def __init__(
        self, root: str, events: DeltaTable, log: TailReader | None, check: Callable[[], None]
    ) -> None:
        self.paths = LakePaths(root)
        self.events = events
        self.log = log
        self._check = check
        self._source = _with_columns(events)
        found = None if log is None else log.tail
        self.resolver = Resolver(root, self._ask, version=events.version(), tail=found)

    @property
    def has_log(self) -> bool:
        """Whether the log has changes that the lake lacks."""
        return self.log is not None and self.log.tail.has_rows

    # -------------------------------------------------------------------- requests

    def as_of(
        self,
        table: str,
        when: Moment,
        keys: Sequence[object] | None = None,
        *,
        as_text: Collection[str] = (),
        limit: int | None = None,
    ) -> PointAnswer:
        """The rows with these keys at a moment (None for all rows), as `Lake.as_of` reads them,
        with the same errors."""
        parts = self.images(table, when, keys)
        typed = with_text(parts[-1][0].table, as_text)
        values: list[AnswerRow] = []
        for found, rows in parts:
            # A row that is known by its own changes has passed shapes that others have not.
            reader = ImageReader(typed, state.names_of(found.passed))
            rows = rows[: None if limit is None else limit - len(values)]
            values += reader.values([row["image"] for row in rows], [row["shape"] for row in rows])
        return PointAnswer(arrow_schema(typed), values)

    def images(
        self,
        table: str,
        when: Moment,
        keys: Sequence[object] | None,
        *,
        relation: int | None = None,
    ) -> list[tuple[KnownState, list[AnswerRow]]]:
        """The same as images, and how they are known: for each key, or for all rows. With a
        `relation`, of that table, whatever its name was then."""
        when = aware(when)
        known = self.resolver.shapes(table)
        self.resolver.check_retention(when)
        if relation is None:
            relation = self.resolver.relation(known, table, when)
        parts: list[tuple[KnownState, list[AnswerRow]]] = []
        found: KnownState | None = None
        for key in [None] if keys is None else keys:
            if found is None or found.plan is None:
                found = self.resolver.known_state(known, relation, when, key)
            parts.append((found, self._images_at(found, relation, when, key)))
        assert parts, "a request for rows names a key"
        # Again: events may have been removed meanwhile.
        self.resolver.check_retention(when)
        return parts

    def history(self, table: str, key: object, *, plain: bool = False) -> PointAnswer:
        """The versions of a row, as `Lake.history` reads them; with `plain`, without the typed
        row."""
        tables, steps = self.resolver.steps(table, key)
        found = self._ask(steps)
        begun = self.resolver.beginning(steps, found[0] if found else None, self._stored)
        versions = list(history.versions(begun, found))
        if plain:
            return PointAnswer(history.VERSIONS, history.plain_values(versions))
        combined = history.combined(tables)
        return PointAnswer(history.schema_of(combined), history.typed_values(versions, combined))

    def newest_versions(
        self,
        table: str,
        key: object,
        *,
        limit: int,
        before: int | None = None,
        relation: int | None = None,
    ) -> VersionPage:
        """The newest versions of a row, at most `limit`: those before the one with the number
        `before`. With a `relation`, of a row of that table."""
        tables, steps = self.resolver.steps(table, key, relation=relation)
        where = () if before is None else (f"seq <= {before}",)
        # One more to know when the last one ended, and one more to know what came before it.
        newest = msgspec.structs.replace(steps, where=where, order=("-seq",), limit=limit + 2)
        found = self._ask(newest)[::-1]
        is_all = len(found) < limit + 2
        if before is not None and (not found or found[-1]["seq"] != before):
            # A client chose this number. The last version ended with the step after it.
            after = msgspec.structs.replace(steps, where=(f"seq > {before}",))
            found += self._ask(history.first_of(after))
        begun: AnswerRow | None = None
        if is_all:
            begun = self.resolver.beginning(steps, found[0] if found else None, self._stored)
        versions = [
            version
            for version in history.versions(begun, found)
            if (is_all or version["seq"] > found[0]["seq"])
            and (before is None or version["seq"] < before)
        ]
        page = versions[-limit:][::-1]
        following: int | None = None
        if len(page) < len(versions):
            following = page[-1]["seq"]
        elif not is_all:
            following = found[1]["seq"]
        shapes = {each.id: each for each in tables}
        return VersionPage(shapes, history.plain_values(page), following)

    # -------------------------------------------------------------------- what they read

    def _images_at(
        self, found: KnownState, relation: int, when: Moment, key: object
    ) -> list[AnswerRow]:
        """The images of a row at a moment, or of all rows; none for a row that did not exist."""
        if found.plan is None:
            return [{"image": image, "shape": shape} for _, image, shape in found.rows]
        snapshot = found.plan.snapshot
        text = None if key is None else key_text(found.table, key)
        span = days(snapshot, self.resolver.snapshots(relation), when)
        changes = self._ask(state.changed_rows(found.plan, when, span, text))
        is_enough = found.plan.truncated or (changes and text is not None)
        rows = [] if is_enough else self._stored([snapshot], text)
        return state.fold_rows(rows, changes, found.plan)

    def _stored(self, among: Sequence[TableSnapshot], key: str | None) -> list[AnswerRow]:
        """The images of a row in snapshots of its table, or of all rows."""
        self._check()
        table = delta.open_table(self.paths.snapshots.rows)
        relation, numbers = among[0].relation, [each.snapshot for each in among]
        own = [("relation", "=", str(relation))]
        parts = () if table is None else table.partitions(file_pruning_predicate=own)
        stored = {int(each["snapshot"]) for each in parts}
        if table is None or any(each.rows and each.snapshot not in stored for each in among):
            raise Unavailable(
                f"a snapshot in {self.paths.snapshots.rows} was removed while it was read",
                hint="Try again.",
            )
        where = f"relation = {relation} and snapshot in ({', '.join(map(str, numbers))})"
        if key is not None:
            where += f" and key = {delta.quoted(key)}"
        columns = "snapshot, key, image, shape"
        return delta.select(f"select {columns} from stored where {where}", stored=table)

    def _ask(self, query: EventQuery) -> list[AnswerRow]:
        """The answer to a question about the events of the lake and of the log."""
        bounds = zip((">=", "<="), query.days, strict=True)
        on_days = [f"day {sign} '{day.isoformat()}'" for sign, day in bounds if day is not None]
        answers = []
        for each in query.any_of:
            self._check()
            among = " and ".join([*on_days, f"({each})"])
            answers.append(delta.select(query.sql(self._source, among), stored=self.events))
        if self.log is not None and self.has_log:
            self._check()
            answers.append(self.log.ask(query))
            self.log.check()
        return query.merged(answers)


def _with_columns(events: DeltaTable) -> str:
    """What to select from. Columns that events of an earlier release lack are NULL."""
    present = {field.name for field in events.schema().fields}
    missing = [f'null as "{name}"' for name in STORED_EVENTS.names if name not in present]
    return f"(select *, {', '.join(missing)} from stored) stored" if missing else "stored"


@contextmanager
def opened(
    root: str,
    url: str | None = None,
    *,
    seconds: float | None = None,
    check: Callable[[], None] = lambda: None,
) -> Iterator[PointReader]:
    """The lake as it is now, with the changes of the log that it lacks; without them where the
    database cannot be reached, or has trimmed these changes. `seconds` bounds a statement in the
    database."""
    events = delta.open_table(LakePaths(root).events)
    if events is None:
        raise ConfigError(f"there is no lake at {root}", hint="headwater pipeline run creates one.")
    with ExitStack() as stack:
        log: TailReader | None = None
        if url is not None:
            with suppress(DatabaseError, NotInstalled, ResyncRequired):
                log = stack.enter_context(tail.opened(events, url, seconds=seconds))
        yield PointReader(root, events, log, check)
