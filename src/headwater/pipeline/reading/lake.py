"""The lake of one database: the paths of its Delta tables, and requests about the past.

<root>/events/          every change, by day
<root>/snapshots/rows/  the rows of tables at intervals, by relation and snapshot
<root>/snapshots/list/  the snapshots, each with its position
<root>/shapes/          the columns and keys that tables had, by shape id
<root>/gaps/            the changes that the lake lacks
<root>/drift/           the outcomes of comparing tables with the lake
<root>/audit/           changes counted by day, user, table, operation, function and source
<root>/tables/          typed tables: current state and history of each table
<root>/_tables/         requests about them
<root>/_checkpoints/<name>/  the checkpoint of each stream
<root>/_lock            locked by the pipeline that writes to the lake
<root>/_retention       the first day with every event, where older ones were removed
<root>/_service         where the pipeline answers requests; see `shared_session`
<root>/_spark.log       the output of Spark while the pipeline runs
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

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
from headwater.live.filters.filter import Filter
from headwater.model import Position, Table, Transaction
from headwater.pipeline.lake import audit, delta, gaps, shapes, snapshots
from headwater.pipeline.lake.events import STORED_EVENTS as STORED_EVENTS
from headwater.pipeline.lake.keys import key_text
from headwater.pipeline.lake.moments import Moment, aware, in_utc
from headwater.pipeline.lake.schemas import ImageReader, arrow_schema
from headwater.pipeline.lake.shapes import Shape
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.reading import changes as changes_
from headwater.pipeline.reading import history, state, tail
from headwater.pipeline.reading.changes import ChangeRange
from headwater.pipeline.reading.conditions import condition
from headwater.pipeline.reading.event_query import AnswerRow, EventQuery
from headwater.pipeline.reading.resolver import END, LakePaths, Resolver, days, label, with_text
from headwater.pipeline.reading.state import StatePlan
from headwater.pipeline.reading.tail import Tail
from headwater.pipeline.snapshots import continuity, dependent_views
from headwater.pipeline.snapshots.continuity import Unaltered
from headwater.pipeline.snapshots.table_reads import FailedTable, Outcome, TableReads
from headwater.pipeline.stream.offsets import Offset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Observation, SparkSession


class TableState(msgspec.Struct, frozen=True):
    """The rows of a table at a moment as images, and the shapes to read them with."""

    rows: Any
    plan: StatePlan | None
    """None for a row that was found by its own changes, without a snapshot."""
    passed: tuple[Table, ...]
    when: Moment

    @property
    def table(self) -> Table:
        return self.passed[-1]


class Contradiction(ResyncRequired):
    """A change began with another row than the snapshot before it has."""


class Lake:
    """The lake under a root: a folder, or a URL that delta-rs and Spark both know.

    With the `url` of the database, changes that are in its log and not yet in the lake are read
    from there: every answer then includes the newest changes.
    """

    def __init__(
        self, root: str, spark: SparkSession | None = None, *, url: str | None = None
    ) -> None:
        self.root = root.rstrip("/") if "://" in root else str(Path(root).expanduser().absolute())
        self._spark = spark
        self._url = url
        self._tail: Tail | None = None
        self._version: int | None = None

    @classmethod
    def connect(cls, root: str) -> Lake:
        """The lake with a Spark: this program's own if it has one, else that of the pipeline that
        runs on this machine for the lake (through Spark Connect), else a new one."""
        from headwater.pipeline.spark.session import any_session

        return cls(root, any_session(root))

    def with_log(self, url: str | None) -> Lake:
        """The lake with the changes of the log that it does not have yet. Without them where the
        database cannot be reached, or has trimmed these changes from its log."""
        if url is None:
            return self
        with suppress(DatabaseError, NotInstalled, ResyncRequired):
            return Lake(self.root, self._spark, url=url)._pinned()
        return self

    @property
    def _resolver(self) -> Resolver:
        return Resolver(self.root, self._ask, version=self._version, tail=self._tail)

    @property
    def paths(self) -> LakePaths:
        return LakePaths(self.root)

    @property
    def events_path(self) -> str:
        return self.paths.events

    @property
    def shapes_path(self) -> str:
        return self.paths.shapes

    def checkpoint(self, name: str) -> str:
        """The path of the checkpoint of the stream with that name."""
        return f"{self.root}/_checkpoints/{name}"

    @property
    def audit_path(self) -> str:
        return f"{self.root}/audit"

    @property
    def gaps_path(self) -> str:
        return self.paths.gaps

    @property
    def drift_path(self) -> str:
        return f"{self.root}/drift"

    @property
    def places(self) -> snapshots.Places:
        return self.paths.snapshots

    @property
    def spark(self) -> SparkSession:
        if self._spark is None:
            raise ConfigError(
                f"the lake {self.root} was opened without Spark", hint="Use Lake(root, spark)."
            )
        return self._spark

    # -------------------------------------------------------------------- events

    def events(
        self, first: date | None = None, last: date | None = None, *, among: str = ""
    ) -> DataFrame:
        """Every change, or the changes of some days. `among` is a filter that the caller will apply
        (SQL over their columns): files without matching changes are skipped."""
        return self._pinned()._events(first, last, among=among)

    def counted_after(self, positions: Mapping[int, Position]) -> pa.Table:
        """The changes of tables that their positions lack, counted by table, shape and operation,
        with their first and last transaction."""
        events = self.events(among=state.missing_from_all(positions))
        return state.counted_after(events, positions).toArrow()

    def _pinned(self) -> Lake:
        """The lake at its present version, with the present end of the log: several reads then see
        the same changes."""
        if self._tail is not None or self._version is not None:
            return self
        pinned = Lake(self.root, self._spark, url=self._url)
        if self._url is not None:
            pinned._tail = tail.look(self.events_path, self._url)
        if pinned._tail is not None:
            pinned._version = pinned._tail.version
        elif (table := delta.open_table(self.events_path)) is not None:
            pinned._version = table.version()
        return pinned

    def _events(
        self, first: date | None = None, last: date | None = None, *, among: str = ""
    ) -> DataFrame:
        from pyspark.sql.pandas.types import from_arrow_schema

        table = delta.open_table(self.events_path, self._version)
        if table is None:
            raise ConfigError(
                f"there is no lake at {self.root}", hint="headwater pipeline run creates one."
            )
        bounds = ((">=", first), ("<=", last))
        days = [f"day {sign} '{day.isoformat()}'" for sign, day in bounds if day is not None]
        where = " and ".join([*days, f"({among})"] if among else days)
        schema = from_arrow_schema(STORED_EVENTS)
        stored = delta.read(self.spark, self.events_path, schema, where, table=table)
        if self._tail is None or not self._tail.has_rows:
            return stored
        return stored.unionByName(tail.changes(self.spark, self._tail).select(*STORED_EVENTS.names))

    def reached(self) -> Position | None:
        """The position up to which the lake has every event, as the stream saved it with its
        batches; None if no recent commit has one. With a log, the end of the log."""
        return self._resolver.reached()

    # -------------------------------------------------------------------- snapshots

    def snapshot(self, url: str, table: str | int) -> TableSnapshot:
        """Read a table from the database and save its rows: the first snapshot, and one after a
        reset or a schema change. The table is given by its name or relation."""
        for outcome in self.snapshots_of(url, [table]):
            match outcome:
                case TableSnapshot():
                    return outcome
                case FailedTable():
                    raise outcome.error
        raise AssertionError("a table is either read or not")

    def snapshots_of(
        self,
        url: str,
        tables: Sequence[str | int],
        *,
        unaltered: Mapping[int, Unaltered] = MappingProxyType({}),
        contradicted: Collection[int] = (),
    ) -> Generator[Outcome]:
        """The same for many tables. Yields each when it is in the lake, and the progress. See
        `snapshots.continuity` for what each is compared with."""

        def catch_up(rows: DataFrame, since: Position, until: TableSnapshot) -> DataFrame | None:
            return self.with_log(url)._pinned()._caught_up(rows, since, until)

        def examine(snapshot: TableSnapshot) -> TableSnapshot:
            return continuity.examined(
                snapshots.load(self.places, snapshot.relation),
                lambda: _PinnedReads(self.with_log(url)._pinned()),
                snapshot,
                unaltered,
                contradicted,
                partial(dependent_views.rebuild, url),
            )

        reads = TableReads(self.places, self.spark, url, catch_up, examine)
        yield from reads.read(tables)

    def _caught_up(
        self, rows: DataFrame, since: Position, until: TableSnapshot
    ) -> DataFrame | None:
        """Rows that were read at `since` or later, with the changes up to a snapshot. None where
        these are not all known."""
        reached = self.reached()
        if reached is None or not reached.covers(until.position):
            return None
        try:
            self._resolver.check_retention(since)
        except ResyncRequired:
            return None
        begun = msgspec.structs.replace(until, position=since)
        found = self._resolver.plan_from(begun, until.position)
        if found.obstacle or found.truncated or len(found.passed) > 1:
            return None
        taken = self._resolver.snapshots(until.relation)
        return state.fold(rows, self._between(begun, taken, until.position), found)

    def fold_snapshot(self, table: str, position: Position) -> TableSnapshot:
        """Compute a snapshot of a table from its events. The lake must have every event up to the
        position."""
        known = shapes.load(self.shapes_path, table)
        relation = self._pinned()._resolver.relation(known, table, position)
        return self.fold_relation(relation, position)

    def fold_relation(self, relation: int, position: Position) -> TableSnapshot:
        """The same for a table given by its relation. ResyncRequired after a schema change: then
        the rows must be read from the database."""
        from pyspark.sql import Observation
        from pyspark.sql import functions as f

        pinned = self._pinned()
        found = pinned._state_of(shapes.load(self.shapes_path, relation), relation, position)
        plan = found.plan
        assert plan is not None, "only a row is known without a snapshot"
        before = plan.snapshot
        if len(found.passed) > 1:
            raise ResyncRequired(
                f"{found.table.label} was altered since its last snapshot",
                hint=f"Read it again: headwater pipeline snapshot {found.table.label}",
            )
        if before.position == position or not state.is_below(before, position):
            return before
        taken = self._resolver.snapshots(relation)
        changes = pinned._between(before, taken, position)
        (last,) = changes.agg(f.unix_micros(f.max("committed_at")).alias("at")).collect()
        if last["at"] is None:
            return before
        taken_at = max(_EPOCH + timedelta(microseconds=last["at"]), before.taken_at)
        # A number of this attempt only.
        present = snapshots.number_of(datetime.now(UTC))
        number = max([present, *(each.snapshot + 1 for each in taken)])
        folded = TableSnapshot(
            relation,
            number,
            position,
            taken_at,
            plan.shape,
            0,
            "events",
            before.mark,
            before.altered_in,
        )
        check = None if plan.truncated else Observation()
        rows = state.fold(pinned._rows(before), changes, plan, check)
        return snapshots.write_frame(
            self.places, folded, rows, partial(self._accepted, found.table, plan, check)
        )

    def _accepted(
        self, table: Table, plan: StatePlan, check: Observation | None, folded: TableSnapshot
    ) -> TableSnapshot:
        """A snapshot that was computed. ResyncRequired if its rows turned out to be wrong: by a
        change that contradicts them, or because the table was repaired meanwhile."""
        hint = f"Read it again: headwater pipeline snapshot {table.label}"
        if check is not None and check.get["differing"]:
            raise Contradiction(
                f"rows of {table.label} changed without changes in the log since its last snapshot",
                hint=hint,
            )
        missed = gaps.load(self.gaps_path, folded.relation)
        if obstacle := state.outside_gaps(plan, missed, folded.position).obstacle:
            raise ResyncRequired(f"the state of {table.label} is not known: {obstacle}", hint=hint)
        return folded

    def label_of(self, relation: int) -> str:
        """The last name of a table."""
        return label(shapes.load(self.shapes_path, relation), relation)

    # -------------------------------------------------------------------- as of

    def as_of(
        self,
        table: str,
        when: Moment,
        *,
        key: object = None,
        where: Filter | None = None,
        as_text: Collection[str] = (),
        limit: int | None = None,
    ) -> DataFrame:
        """The rows of a table at a moment, with the columns it had then: all rows, one row (`key`),
        or matching rows (`where`), and at most `limit`. Columns in `as_text` are read as
        PostgreSQL's text.

        ResyncRequired where the lake does not know the state: no snapshot of the table can be used
        for that moment, and for a single row, its own changes are not enough either.
        """
        found = self._pinned()._state(table, when, key=key)
        if limit is not None and where is None:
            # Before the rows are typed: Spark ends Python's workers once a limit is reached.
            return _typed(msgspec.structs.replace(found, rows=found.rows.limit(limit)), as_text)
        read = _typed(found, as_text)
        if where is not None:
            read = read.filter(condition(where, with_text(found.table, as_text)))
        return read if limit is None else read.limit(limit)

    def _state(self, name: str, when: Moment, *, key: object = None) -> TableState:
        when = aware(when)
        known = self._resolver.shapes(name)
        self._resolver.check_retention(when)
        return self._state_of(known, self._resolver.relation(known, name, when), when, key=key)

    def _state_of(
        self, known: Sequence[Shape], relation: int, when: Moment, *, key: object = None
    ) -> TableState:
        from pyspark.sql import functions as f

        found = self._resolver.known_state(known, relation, when, key)
        if found.plan is None:
            rows = self.spark.createDataFrame(found.rows, "key string, image string, shape long")
            return TableState(rows, None, found.passed, when)
        taken = self._resolver.snapshots(relation)
        changes, rows = (
            self._between(found.plan.snapshot, taken, when),
            self._rows(found.plan.snapshot),
        )
        if key is not None:
            own = f.col("key") == key_text(found.passed[-1], key)
            changes, rows = changes.filter(own), rows.filter(own)
        # Again, after the files were chosen: events may have been removed meanwhile.
        self._resolver.check_retention(when)
        return TableState(state.fold(rows, changes, found.plan), found.plan, found.passed, when)

    def _ask(self, query: EventQuery) -> list[AnswerRow]:
        """The answer to a question about the events."""
        events = self._events(*query.days, among=query.file_condition())
        found: list[AnswerRow] = query.frame(events).toArrow().to_pylist()
        return found

    def _between(
        self, snapshot: TableSnapshot, taken: Sequence[TableSnapshot], when: Moment
    ) -> DataFrame:
        """The changes between a snapshot and a moment; `taken` are all snapshots of its table."""
        first, last = days(snapshot, taken, when)
        events = self._events(first, last, among=state.bounds(snapshot, when))
        return state.between_frame(events, snapshot, when)

    def _rows(self, snapshot: TableSnapshot) -> DataFrame:
        from pyspark.sql.pandas.types import from_arrow_schema

        wanted = [
            ("relation", "=", str(snapshot.relation)),
            ("snapshot", "=", str(snapshot.snapshot)),
        ]
        if snapshot.origin == "truncate":
            return self.spark.createDataFrame([], from_arrow_schema(snapshots.ROWS))
        table = DeltaTable(self.places.rows)
        if snapshot.rows and not delta.chosen_files(table, wanted):
            raise Unavailable(
                f"a snapshot in {self.places.rows} was removed while it was read", hint="Try again."
            )
        schema = from_arrow_schema(snapshots.ROWS)
        return delta.read(self.spark, self.places.rows, schema, wanted, table=table)

    def rows_of(self, snapshot: TableSnapshot) -> DataFrame:
        """The rows of a snapshot: `key`, `image` and `shape`."""
        return self._rows(snapshot)

    def rows_from(self, snapshot: TableSnapshot, position: Position) -> DataFrame:
        """The same at a later position that the lake has reached, under the same shape: the rows of
        this snapshot, with the changes since. ResyncRequired where these do not say it."""
        pinned = self._pinned()
        found = pinned._resolver.plan_from(snapshot, position)
        obstacle = found.obstacle or ("it was altered" if len(found.passed) > 1 else "")
        if obstacle:
            name = self.label_of(snapshot.relation)
            raise ResyncRequired(
                f"the rows of {name} at {position} do not follow from its snapshot: {obstacle}",
                hint=f"Make another one: headwater pipeline snapshot {name}",
            )
        rows = _PinnedReads(pinned).folded(found, position)
        # Again, after the files were chosen: events may have been removed meanwhile.
        pinned._resolver.check_retention(snapshot.position)
        return rows

    # -------------------------------------------------------------------- changes

    def changes(
        self, table: str, since: Moment | None = None, until: Moment | None = None
    ) -> DataFrame:
        """The events of a table in the order of `seq`: of the transactions that `until` contains
        and `since` does not. They lead from the state at `since` to the state at `until`."""
        pinned = self._pinned()
        since, until = (each and aware(each) for each in (since, until))
        ends = [each for each in (since, until) if isinstance(each, Position)]
        pinned._resolver.check_covered(ends)
        relation = pinned._resolver.relation(pinned._resolver.shapes(table), table, until or END)
        pinned._resolver.check_complete(relation, since, until)
        return changes_.between(pinned._own(relation, since, until), since, until).orderBy("seq")

    def change_range(
        self,
        table: str,
        since: Moment | None = None,
        until: Moment | None = None,
        *,
        after: int = 0,
    ) -> ChangeRange:
        """The same as transactions in order, to be processed one after the other. `after` is the
        `last` of the last group that was processed."""
        pinned = self._pinned()
        begin = None if since is None else pinned.settle(since)
        end = pinned.settle(until)
        known = pinned._resolver.shapes(table)
        relation = pinned._resolver.relation(known, table, end)
        pinned._resolver.check_complete(relation, begin, end)
        tables = {shape.table.id: shape.table for shape in known if shape.table.oid == relation}
        events = pinned._own(relation, since, until)
        rows = events.selectExpr(
            "*", "unix_micros(at) as micros", "unix_micros(source_committed_at) as source_micros"
        )
        return changes_.change_range(rows, tables, begin, end, after)

    def transactions(
        self, table: str, since: Moment | None = None, until: Moment | None = None
    ) -> Iterator[Transaction]:
        """The changes of a table between two moments, as `Headwater.changes` gives them. Only a
        part of them is in memory at a time."""
        return self.change_range(table, since, until).transactions()

    def settle(self, when: Moment | None) -> Moment:
        """The moment as a position, which always means the same transactions. None is for the end
        of the lake. A time before a restore of the database stays a time."""
        pinned = self._pinned()
        reached = pinned.reached()
        if reached is None:
            raise Unavailable(
                f"no recent commit of {self.events_path} has the position that the lake reached",
                hint="Run the pipeline, which writes it: headwater pipeline run.",
            )
        if when is None:
            return reached
        if isinstance(when, Position):
            pinned._resolver.check_covered([when])
            return when
        at = aware(when)
        assert isinstance(at, datetime)
        return changes_.position_at(pinned._events(), reached, at)

    def first_moment(self, table: str) -> Moment:
        """The earliest moment that the events cover: right after the reset with which capture
        began, or before the first change."""
        from pyspark.sql import functions as f

        pinned = self._pinned()
        relation = pinned._resolver.relation(pinned._resolver.shapes(table), table, END)
        first = pinned._own(relation).agg(
            f.unix_micros(f.min("committed_at")).alias("at"), f.min_by("op", "seq").alias("op")
        )
        (row,) = first.collect()
        if row["at"] is None:
            return pinned.settle(None)
        at = _EPOCH + timedelta(microseconds=row["at"])
        return pinned.settle(at if row["op"] == "reset" else at - timedelta(microseconds=1))

    def first_snapshot(self, table: str) -> Position | None:
        """The position of the first snapshot of a table."""
        relation = self._resolver.relation(self._resolver.shapes(table), table, END)
        return next((each.position for each in self._resolver.snapshots(relation)), None)

    def state_of(self, relation: int, position: Position) -> TableState:
        """The same for a table given by its relation. Unavailable if the lake has not reached the
        position, or if that is unknown."""
        pinned = self._pinned()
        if pinned.reached() is None:
            raise Unavailable(
                f"no recent commit of {self.events_path} has the position that the lake reached",
                hint="Run the pipeline, which writes it: headwater pipeline run.",
            )
        pinned._resolver.check_covered([position])
        return pinned._state_of(shapes.load(self.shapes_path, relation), relation, position)

    def state(self, table: str, when: Moment) -> TableState:
        """The rows of a table at a moment as images, exactly as PostgreSQL wrote them."""
        return self._pinned()._state(table, when)

    def _own(
        self, relation: int, since: Moment | None = None, until: Moment | None = None
    ) -> DataFrame:
        """The events of a table, on the days that matter."""
        from pyspark.sql import functions as f

        first, last = (
            in_utc(each).date() if isinstance(each, datetime) else None for each in (since, until)
        )
        return self._events(first, last).filter(f.col("relation") == relation)

    # -------------------------------------------------------------------- history, audit

    def history(self, table: str, key: object) -> DataFrame:
        """The versions of a row: from when to when each was valid, who made it, which columns
        changed, and the row itself as `row`."""
        return self._pinned()._history(table, key)

    def _history(self, table: str, key: object) -> DataFrame:
        tables, steps = self._resolver.steps(table, key)
        first = next(iter(self._ask(history.first_of(steps))), None)
        begun = self._resolver.beginning(steps, first, self._images)
        events = self._events(among=steps.file_condition())
        return history.typed_frame(steps.frame(events), begun, history.combined(tables))

    def _images(self, among: Sequence[TableSnapshot], key: str) -> list[AnswerRow]:
        """The images of a row in snapshots of its table."""
        from pyspark.sql import functions as f
        from pyspark.sql.pandas.types import from_arrow_schema

        wanted = [("relation", "=", str(among[0].relation))]
        rows = delta.read(self.spark, self.places.rows, from_arrow_schema(snapshots.ROWS), wanted)
        numbers = [each.snapshot for each in among]
        own = rows.filter((f.col("key") == key) & f.col("snapshot").isin(numbers))
        found: list[AnswerRow] = own.select("snapshot", "image", "shape").toArrow().to_pylist()
        return found

    def audit(
        self,
        by: Sequence[str] = ("user", "table", "operation"),
        *,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> DataFrame:
        """Changes counted by these columns. Whole days are read from the audit table."""
        from pyspark.sql import functions as f

        since, until = (None if each is None else in_utc(each) for each in (since, until))
        whole = all(each is None or each.time() == datetime.min.time() for each in (since, until))
        if whole and delta.open_table(self.audit_path) is not None:
            return audit.summary(self._rolled(since, until), by)
        # Counts of parts of days need the events.
        self._resolver.check_retention(since or _BEGINNING)
        events = self.events(since and since.date(), until and until.date())
        if since is not None:
            events = events.filter(f.col("committed_at") >= f.lit(since))
        if until is not None:
            events = events.filter(f.col("committed_at") < f.lit(until))
        return audit.summary(audit.roll_up(events), by)

    def _rolled(self, since: datetime | None, until: datetime | None) -> DataFrame:
        """The counts of whole days: those of the audit table, and of the changes after it."""
        from pyspark.sql.pandas.types import from_arrow_schema

        # Opened before the events: a batch is counted after it is in the events. So the counts are
        # never ahead of the events, and the changes between the two are known by the offset.
        table = DeltaTable(self.audit_path)
        pinned = Lake(self.root, self._spark).with_log(self._url)._pinned()
        bounds = ((">=", since), ("<", until))
        filters = [("day", sign, at.date().isoformat()) for sign, at in bounds if at is not None]
        schema = from_arrow_schema(audit.AUDIT)
        stored = delta.read(self.spark, self.audit_path, schema, filters, table=table)
        events = pinned._uncounted(delta.offset_of(table))
        if events is None:
            return stored
        late = audit.roll_up(events)
        for sign, at in bounds:
            if at is not None:
                late = late.filter(f"day {sign} date'{at.date()}'")
        return stored.unionByName(late)

    def _uncounted(self, counted: str | None) -> DataFrame | None:
        """The changes after an offset of the audit table; None if there are none. For a table of an
        earlier release, which has no offset, those that are not in the lake yet."""
        stored = delta.open_table(self.events_path, self._version)
        if stored is None or not counted or counted == delta.offset_of(stored):
            if self._tail is None or not self._tail.has_rows:
                return None
            return tail.changes(self.spark, self._tail)
        offset = Offset.from_dict(msgspec.json.decode(counted))
        reached = self.reached()
        if reached is not None and reached.log != offset.position.log:
            # The database was restored since: transactions of the present log have other numbers.
            return self._events().filter(changes_.of_log(reached))
        return changes_.after(self._events(among=f"xid >= {offset.position.xmin}"), offset)


class _PinnedReads:
    """What a comparison needs of a lake (`continuity.LakeReads`)."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self.gaps_path = lake.gaps_path
        self.shapes_path = lake.shapes_path
        self.reached = lake.reached
        self.plan_from = lake._resolver.plan_from
        self.changes_after = lake._resolver.changes_after
        self.rows = lake._rows

    def between(self, snapshot: TableSnapshot, when: Position) -> DataFrame:
        taken = self._lake._resolver.snapshots(snapshot.relation)
        return self._lake._between(snapshot, taken, when)

    def folded(self, plan: StatePlan, when: Position) -> DataFrame:
        changes = self.between(plan.snapshot, when)
        return state.fold(self._lake._rows(plan.snapshot), changes, plan)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_BEGINNING = datetime.min.replace(tzinfo=UTC)


# ------------------------------------------------------------------------ typed rows


def _typed(found: TableState, columns: Collection[str]) -> DataFrame:
    """The rows with the types of the table."""
    from pyspark.sql.pandas.types import from_arrow_schema

    table, names = with_text(found.table, columns), state.names_of(found.passed)
    schema = arrow_schema(table)

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        reader = ImageReader(table, names)
        for batch in batches:
            rows = reader.rows(batch.column("image").to_pylist(), batch.column("shape").to_pylist())
            yield pa.RecordBatch.from_arrays(rows.flatten(), schema=schema)

    images = found.rows.select("image", "shape")
    typed: DataFrame = images.mapInArrow(read, from_arrow_schema(schema))
    return typed
