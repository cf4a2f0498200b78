"""The lake of one database: the paths of its Delta tables, and requests about the past.

<root>/events/          every change, by day
<root>/snapshots/rows/  the rows of tables at intervals, by relation and snapshot
<root>/snapshots/list/  the snapshots, each with its position
<root>/shapes/          the columns and keys that tables had, by shape id
<root>/gaps/            the changes that the lake lacks
<root>/audit/           changes counted by day, user, table, operation, function and source
<root>/_checkpoints/<name>/  the checkpoint of each stream
<root>/_lock            locked by the pipeline that writes pinned
<root>/_retention       the first day with every event, where older ones were removed
<root>/_service         where the pipeline answers requests; see `shared_session`
<root>/_spark.log       the output of Spark while the pipeline runs
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
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
from headwater.pipeline.lake import audit, delta, gaps, retention, shapes, snapshots
from headwater.pipeline.lake.events import STORED_EVENTS as STORED_EVENTS
from headwater.pipeline.lake.keys import key_text
from headwater.pipeline.lake.moments import Moment, aware, within
from headwater.pipeline.lake.schemas import ImageReader, arrow_schema, as_text
from headwater.pipeline.lake.shapes import Shape
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.reading import changes as changes_
from headwater.pipeline.reading import history, state, tail
from headwater.pipeline.reading.changes import ChangeRange
from headwater.pipeline.reading.conditions import condition
from headwater.pipeline.reading.state import StatePlan
from headwater.pipeline.reading.tail import Tail
from headwater.pipeline.stream.offsets import Offset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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
    def events_path(self) -> str:
        return f"{self.root}/events"

    @property
    def shapes_path(self) -> str:
        return f"{self.root}/shapes"

    def checkpoint(self, name: str) -> str:
        """The path of the checkpoint of the stream with that name."""
        return f"{self.root}/_checkpoints/{name}"

    @property
    def audit_path(self) -> str:
        return f"{self.root}/audit"

    @property
    def gaps_path(self) -> str:
        return f"{self.root}/gaps"

    @property
    def places(self) -> snapshots.Places:
        folder = f"{self.root}/snapshots"
        return snapshots.Places(f"{folder}/rows", f"{folder}/list", self.shapes_path)

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

    def _shapes(self) -> list[Shape]:
        stored = shapes.load(self.shapes_path)
        return stored if self._tail is None else shapes.with_new(stored, self._tail.url)

    def known_shapes(self) -> DataFrame:
        """The shapes that tables had when changes were written."""
        from pyspark.sql.pandas.types import from_arrow_schema

        return delta.read(self.spark, self.shapes_path, from_arrow_schema(shapes.SHAPES))

    def reached(self) -> Position | None:
        """The position up to which the lake has every event, as the stream saved it with its
        batches; None if no recent commit has one. With a log, the end of the log."""
        if self._tail is not None:
            return self._tail.until
        table = delta.open_table(self.events_path, self._version)
        found = None if table is None else delta.offset_of(table)
        return None if found is None else Offset.from_dict(msgspec.json.decode(found)).position

    # -------------------------------------------------------------------- snapshots

    def snapshot(self, url: str, table: str | int) -> TableSnapshot:
        """Read a table from the database and save its rows: the first snapshot, and one after a
        reset or a schema change. The table is given by its name or relation."""
        return snapshots.take(self.places, url, table)

    def fold_snapshot(self, table: str, position: Position) -> TableSnapshot:
        """Compute a snapshot of a table from its events. The lake must have every event up to the
        position."""
        known = shapes.load(self.shapes_path)
        return self.fold_relation(self._pinned()._relation(known, table, position), position)

    def fold_relation(self, relation: int, position: Position) -> TableSnapshot:
        """The same for a table given by its relation. ResyncRequired after a schema change: then
        the rows must be read from the database."""
        from pyspark.sql import functions as f

        pinned = self._pinned()
        found = pinned._state_of(shapes.load(self.shapes_path), relation, position)
        assert found.plan is not None, "only a row is known without a snapshot"
        before = found.plan.snapshot
        if len(found.passed) > 1:
            raise ResyncRequired(
                f"{found.table.label} was altered since its last snapshot",
                hint=f"Read it again: headwater pipeline snapshot {found.table.label}",
            )
        if before.position == position or not state.is_below(before, position):
            return before
        taken = self._snapshots(relation)
        changes = pinned._between(before, taken, position)
        (last,) = changes.agg(f.unix_micros(f.max("committed_at")).alias("at")).collect()
        if last["at"] is None:
            return before
        taken_at = max(_EPOCH + timedelta(microseconds=last["at"]), before.taken_at)
        # A number of this attempt only, recent enough that the rows are not cleaned away.
        present = snapshots.number_of(datetime.now(UTC))
        number = max([present, *(each.snapshot + 1 for each in taken)])
        folded = TableSnapshot(relation, number, position, taken_at, found.plan.shape, 0, "events")
        return snapshots.write_frame(self.places, folded, found.rows)

    def label_of(self, relation: int) -> str:
        """The last name of a table."""
        return _label(shapes.load(self.shapes_path), relation)

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
            read = read.filter(condition(where, _text(found.table, as_text)))
        return read if limit is None else read.limit(limit)

    def _state(self, name: str, when: Moment, *, key: object = None) -> TableState:
        when = aware(when)
        known = self._shapes()
        self._check_retention(when)
        return self._state_of(known, self._relation(known, name, when), when, key=key)

    def _state_of(
        self, known: Sequence[Shape], relation: int, when: Moment, *, key: object = None
    ) -> TableState:
        from pyspark.sql import functions as f

        tables = {shape.table.id: shape.table for shape in known if shape.table.oid == relation}
        taken = self._snapshots(relation)
        try:
            plan = state.choose(self._plans(taken, when), _label(known, relation), when)
        except ResyncRequired:
            found = None if key is None else self._row_of(tables, relation, key, when)
            if found is None:
                raise
            return found
        self._check_reached(plan.snapshot, when)
        passed = tuple(changes_.known(tables, shape) for shape in plan.passed)
        changes, rows = self._between(plan.snapshot, taken, when), self._rows(plan.snapshot)
        if key is not None:
            text = key_text(passed[-1], key)
            changes, rows = changes.filter(f.col("key") == text), rows.filter(f.col("key") == text)
        # Again, after the files were chosen: events may have been removed meanwhile.
        self._check_retention(when)
        return TableState(state.fold(rows, changes, plan), plan, passed, when)

    def _row_of(
        self, tables: Mapping[int, Table], relation: int, key: object, when: Moment
    ) -> TableState | None:
        """A row at a moment from its own changes, where no snapshot can be used. None where these
        are not enough."""
        among = f"relation = {relation}"
        events = self._events(among=among).filter(among)
        if isinstance(when, Position):
            self._check_covered([when])
            events = events.filter(f"startswith(position, '{when.log}-')")
        text = key_text(list(tables.values())[-1], key)
        found = history.row_at(events, text, when, gaps.load(self.gaps_path))
        if found is None:
            return None
        passed = tuple(changes_.known(tables, shape) for shape in found.passed)
        rows = [] if found.image is None else [(text, found.image, found.passed[0])]
        frame = self.spark.createDataFrame(rows, "key string, image string, shape long")
        self._check_retention(when)
        return TableState(frame, None, passed, when)

    def _check_retention(self, when: Moment) -> None:
        floor = retention.load(self.root)
        if floor is not None:
            floor.check(when)

    def _plans(self, taken: Sequence[TableSnapshot], when: Moment) -> list[StatePlan]:
        """The plans for a moment; no more are made than needed."""
        plans: list[StatePlan] = []
        missed = gaps.load(self.gaps_path)
        for snapshot in state.nearest(taken, when):
            found = state.plan(snapshot, state.summarize(self._between(snapshot, taken, when)))
            if not state.is_below(snapshot, when):
                shape = plans[0].shape if plans else self._shape_at(snapshot, when)
                found = state.check_shape(found, shape)
            found = state.outside_gaps(found, missed, when)
            plans.append(found)
            if not found.obstacle and len(found.passed) == 1:
                break
        return plans

    def _shape_at(self, snapshot: TableSnapshot, when: Moment) -> int | None:
        """The shape of the last change up to the moment; None if there is no change."""
        from pyspark.sql import functions as f

        earlier = self._by(snapshot.relation, snapshot.position.log, when)
        (last,) = earlier.agg(f.max_by("shape", "seq").alias("shape")).collect()
        shape: int | None = last["shape"]
        return shape

    def _by(self, relation: int, log: str, when: Moment) -> DataFrame:
        """The changes of a table up to a moment."""
        from pyspark.sql import functions as f

        among = f"relation = {relation}"
        if isinstance(when, Position):
            among += f" and xid < {when.xmax}"
        own = f.col("position").startswith(f"{log}-")
        return self._events(among=among).filter(among).filter(own & within(when))

    def _check_reached(self, snapshot: TableSnapshot, when: Moment) -> None:
        """Raise Unavailable where events are missing: for a position, all its events are needed,
        and to undo changes, all events of the snapshot. A time after the last event means the end
        of the lake."""
        if snapshot.position == when:
            return
        needed = [when] if isinstance(when, Position) else []
        if not state.is_below(snapshot, when):
            needed.append(snapshot.position)
        self._check_covered(needed)

    def _check_covered(self, needed: Sequence[Position]) -> None:
        reached = self.reached() if needed else None
        for position in needed:
            if reached and position.log == reached.log and not reached.covers(position):
                raise Unavailable(
                    f"the lake has changes up to position {reached}, and {position} is needed",
                    hint="Try again when the pipeline has written more, or start it: headwater "
                    "pipeline run.",
                )

    def _between(
        self, snapshot: TableSnapshot, taken: Sequence[TableSnapshot], when: Moment
    ) -> DataFrame:
        """The changes between a snapshot and a moment; `taken` are all snapshots of its table."""
        same = [each for each in taken if each.position.log == snapshot.position.log]
        first, last = state.days(snapshot, same, when)
        events = self._events(first, last, among=state.bounds(snapshot, when))
        return state.between(events, snapshot, when)

    def _rows(self, snapshot: TableSnapshot) -> DataFrame:
        from pyspark.sql.pandas.types import from_arrow_schema

        wanted = [
            ("relation", "=", str(snapshot.relation)),
            ("snapshot", "=", str(snapshot.snapshot)),
        ]
        table = DeltaTable(self.places.rows)
        if snapshot.rows and not delta.chosen_files(table, wanted):
            raise Unavailable(
                f"a snapshot in {self.places.rows} was removed while it was read", hint="Try again."
            )
        schema = from_arrow_schema(snapshots.ROWS)
        return delta.read(self.spark, self.places.rows, schema, wanted, table=table)

    def _snapshots(self, relation: int) -> list[TableSnapshot]:
        return [each for each in snapshots.load(self.places) if each.relation == relation]

    # -------------------------------------------------------------------- changes

    def changes(
        self, table: str, since: Moment | None = None, until: Moment | None = None
    ) -> DataFrame:
        """The events of a table in the order of `seq`: of the transactions that `until` contains
        and `since` does not. They lead from the state at `since` to the state at `until`."""
        pinned = self._pinned()
        since, until = (each and aware(each) for each in (since, until))
        pinned._check_covered([each for each in (since, until) if isinstance(each, Position)])
        pinned._check_complete(since, until)
        relation = pinned._relation(pinned._shapes(), table, until or _END)
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
        pinned._check_complete(begin, end)
        known = pinned._shapes()
        relation = pinned._relation(known, table, end)
        tables = {shape.table.id: shape.table for shape in known if shape.table.oid == relation}
        events = pinned._own(relation, since, until)
        rows = events.selectExpr(
            "*", "unix_micros(at) as micros", "unix_micros(source_committed_at) as source_micros"
        )
        return changes_.change_range(rows, tables, begin, end, after)

    def _check_complete(self, since: Moment | None, until: Moment | None) -> None:
        """ResyncRequired where the lake does not have everything between two moments."""
        if since is not None:
            self._check_retention(since)
        for gap in gaps.load(self.gaps_path):
            is_beside = (since is not None and gap.is_after(since)) or (
                until is not None and gap.is_before(until)
            )
            if not is_beside:
                raise ResyncRequired(
                    f"the lake lacks the changes between {gap.since_at:%Y-%m-%d %H:%M:%S} and"
                    f" {gap.until_at:%Y-%m-%d %H:%M:%S} UTC",
                    hint="Make two requests, one up to the gap (until) and one after it (since).",
                )

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
            pinned._check_covered([when])
            return when
        at = aware(when)
        assert isinstance(at, datetime)
        return changes_.position_at(pinned._events(), reached, at)

    def first_moment(self, table: str) -> Moment:
        """The earliest moment that the events cover: right after the reset with which capture
        began, or before the first change."""
        from pyspark.sql import functions as f

        pinned = self._pinned()
        relation = pinned._relation(pinned._shapes(), table, _END)
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
        relation = self._relation(self._shapes(), table, _END)
        return next((each.position for each in self._snapshots(relation)), None)

    def state(self, table: str, when: Moment) -> TableState:
        """The rows of a table at a moment as images, exactly as PostgreSQL wrote them."""
        return self._pinned()._state(table, when)

    def _own(
        self, relation: int, since: Moment | None = None, until: Moment | None = None
    ) -> DataFrame:
        """The events of a table, on the days that matter."""
        from pyspark.sql import functions as f

        first, last = (
            _utc(each).date() if isinstance(each, datetime) else None for each in (since, until)
        )
        return self._events(first, last).filter(f.col("relation") == relation)

    # -------------------------------------------------------------------- which table

    def _relation(self, known: Iterable[Shape], name: str, when: Moment) -> int:
        """The table that had the name at the moment. Of several tables, the one with the last
        change under that name."""
        named = {each.table.id: each.table.oid for each in shapes.named(known, name)}
        if not named:
            raise ConfigError(
                f"the lake {self.root} has no table {name}",
                hint=f"Enable the table, and make a snapshot: headwater pipeline snapshot {name}",
            )
        if len(set(named.values())) == 1:
            return next(iter(named.values()))
        return self._last_written(named, when)

    def _last_written(self, named: dict[int, int], when: Moment) -> int:
        from pyspark.sql import functions as f

        among = f"shape in ({', '.join(map(str, named))})"
        events = self._events(among=among).filter(among)
        if when != _END:
            events = events.filter(changes_.inside(when))
        latest = f.max_by("relation", f.struct("committed_at", "seq")).alias("relation")
        (last,) = events.agg(latest).collect()
        if last["relation"] is not None:
            return int(last["relation"])
        taken = snapshots.load(self.places)
        usable = [each for each in taken if each.shape in named and state.is_below(each, when)]
        return usable[-1].relation if usable else next(iter(named.values()))

    # -------------------------------------------------------------------- history, audit

    def history(self, table: str, key: object) -> DataFrame:
        """The versions of a row: from when to when each was valid, who made it, which columns
        changed, and the row itself as `row`."""
        return self._pinned()._history(table, key)

    def _history(self, table: str, key: object) -> DataFrame:
        known = self._shapes()
        relation = self._relation(known, table, _END)
        tables = [shape.table for shape in known if shape.table.oid == relation]
        text = key_text(tables[-1], key)
        among = f"relation = {relation}"
        events = self._events(among=among).filter(among)
        steps = history.beginning(
            history.own(events, text), self._images_in_snapshots(relation, text)
        )
        return history.with_rows(history.versions(steps), history.combined(tables))

    def _images_in_snapshots(self, relation: int, key: str) -> list[tuple[TableSnapshot, str, int]]:
        """The images of a row in snapshots, the oldest first."""
        from pyspark.sql import functions as f
        from pyspark.sql.pandas.types import from_arrow_schema

        taken = {each.snapshot: each for each in self._snapshots(relation)}
        if not taken:
            return []
        wanted = [("relation", "=", str(relation))]
        rows = delta.read(self.spark, self.places.rows, from_arrow_schema(snapshots.ROWS), wanted)
        found = rows.filter(f.col("key") == key).orderBy("snapshot").collect()
        return [
            (taken[r["snapshot"]], r["image"], r["shape"]) for r in found if r["snapshot"] in taken
        ]

    def audit(
        self,
        by: Sequence[str] = ("user", "table", "operation"),
        *,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> DataFrame:
        """Changes counted by these columns. Whole days are read from the audit table."""
        from pyspark.sql import functions as f

        since, until = (None if each is None else _utc(each) for each in (since, until))
        whole = all(each is None or each.time() == datetime.min.time() for each in (since, until))
        if whole and delta.open_table(self.audit_path) is not None:
            return audit.summary(self._rolled(since, until), by)
        # Counts of parts of days need the events.
        self._check_retention(since or _BEGINNING)
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


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_BEGINNING = datetime.min.replace(tzinfo=UTC)
_END = datetime.max.replace(tzinfo=UTC)


def _label(known: Iterable[Shape], relation: int) -> str:
    labels = [each.table.label for each in known if each.table.oid == relation]
    return labels[-1] if labels else f"relation {relation}"


def _utc(at: datetime) -> datetime:
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)


# ------------------------------------------------------------------------ typed rows


def _typed(found: TableState, columns: Collection[str]) -> DataFrame:
    """The rows with the types of the table."""
    from pyspark.sql.pandas.types import from_arrow_schema

    table, names = _text(found.table, columns), state.names_of(found.passed)
    schema = arrow_schema(table)

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        reader = ImageReader(table, names)
        for batch in batches:
            rows = reader.rows(batch.column("image").to_pylist(), batch.column("shape").to_pylist())
            yield pa.RecordBatch.from_arrays(rows.flatten(), schema=schema)

    images = found.rows.select("image", "shape")
    typed: DataFrame = images.mapInArrow(read, from_arrow_schema(schema))
    return typed


def _text(table: Table, columns: Collection[str]) -> Table:
    unknown = [name for name in columns if name not in {c.name for c in table.columns}]
    if unknown:
        raise ConfigError(
            f"{table.label} has no column {unknown[0]}",
            hint=f"It has: {', '.join(c.name for c in table.columns)}.",
        )
    return as_text(table, columns)
