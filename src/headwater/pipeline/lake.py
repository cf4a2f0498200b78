"""The lake: where the Delta tables of one database are, and what can be asked of them.

<root>/events/          every change, by day
<root>/snapshots/rows/  the rows of tables at intervals, by relation and snapshot
<root>/snapshots/list/  which snapshots there are, each with its position
<root>/shapes/          what tables looked like: columns and keys by shape id
<root>/audit/           roll-ups by day, user, table, operation and function
<root>/_checkpoints/<name>/  how far each stream has come
<root>/_lock            held by the pipeline that writes here
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from headwater import limits
from headwater.errors import ConfigError, ResyncRequired, Unavailable
from headwater.live.filter import Filter
from headwater.model import Position, Table
from headwater.pipeline import audit, delta, history, shapes, snapshots, state
from headwater.pipeline.conditions import condition
from headwater.pipeline.keys import key_text
from headwater.pipeline.offsets import Offset
from headwater.pipeline.reading import EVENTS
from headwater.pipeline.schemas import ImageReader, arrow_schema, as_text
from headwater.pipeline.shapes import Shape
from headwater.pipeline.snapshots import Snapshot
from headwater.pipeline.state import Moment, Way

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STORED = EVENTS.append(pa.field("day", pa.date32(), nullable=False))
"""An event as the lake holds it: `day` is that of `committed_at`, and the partition."""


class _State(msgspec.Struct, frozen=True):
    """Rows of a table as images, and how to read them."""

    rows: Any
    way: Way
    passed: tuple[Table, ...]
    when: Moment

    @property
    def table(self) -> Table:
        return self.passed[-1]


class Lake:
    """The lake under a root: a folder, or a URL that delta-rs and Spark both know."""

    def __init__(self, root: str, spark: SparkSession | None = None) -> None:
        self.root = root.rstrip("/")
        self._spark = spark

    @property
    def events_path(self) -> str:
        return f"{self.root}/events"

    @property
    def shapes_path(self) -> str:
        return f"{self.root}/shapes"

    def checkpoint(self, name: str) -> str:
        """Where the stream of that name keeps how far it has come."""
        return f"{self.root}/_checkpoints/{name}"

    @property
    def audit_path(self) -> str:
        return f"{self.root}/audit"

    @property
    def places(self) -> snapshots.Places:
        folder = f"{self.root}/snapshots"
        return snapshots.Places(f"{folder}/rows", f"{folder}/list", self.shapes_path)

    @property
    def spark(self) -> SparkSession:
        if self._spark is None:
            raise ConfigError("this lake was opened without Spark", hint="Lake(root, spark)")
        return self._spark

    # -------------------------------------------------------------------- events

    def events(self, first: date | None = None, last: date | None = None) -> DataFrame:
        """Every change; of some days where those are given."""
        from pyspark.sql.pandas.types import from_arrow_schema

        if delta.open_table(self.events_path) is None:
            raise ConfigError(
                f"there is no lake at {self.root}", hint="headwater pipeline run fills one."
            )
        bounds = ((">=", first), ("<=", last))
        filters = [("day", sign, day.isoformat()) for sign, day in bounds if day is not None]
        return delta.read(self.spark, self.events_path, from_arrow_schema(STORED), filters)

    def known_shapes(self) -> DataFrame:
        """What tables looked like when changes were written."""
        from pyspark.sql.pandas.types import from_arrow_schema

        return delta.read(self.spark, self.shapes_path, from_arrow_schema(shapes.SHAPES))

    def reached(self) -> Position | None:
        """The position up to which the lake has every event, as the stream wrote with its batches;
        None where none of the last commits says."""
        table = delta.open_table(self.events_path)
        entries = table.history(limits.LAKE_HISTORY_COMMITS) if table is not None else ()
        told = (entry["offset"] for entry in entries if "offset" in entry)
        found = next(told, None)
        return found and Offset.from_dict(msgspec.json.decode(found)).position

    # -------------------------------------------------------------------- snapshots

    def snapshot(self, url: str, table: str) -> Snapshot:
        """Read a table itself and keep its rows: the beginning of what can be known of it, and
        after a reset or a schema change."""
        return snapshots.take(self.places, url, table)

    def fold_snapshot(self, table: str, position: Position) -> Snapshot:
        """Keep the state of a table at a position up to which the lake has every event, so that
        later moments need not begin further back."""
        from pyspark.sql import functions as f

        found = self._state(table, position)
        before = found.way.snapshot
        changes = self._between(before, position)
        micros = f.unix_micros(f.max("committed_at")).alias("at")
        (last,) = changes.agg(micros).collect()
        if last["at"] is None or not state.is_below(before, position):
            return before
        latest = _EPOCH + timedelta(microseconds=last["at"])
        rows = found.rows.select("key", "image", "shape").toArrow().to_batches()
        return snapshots.write(
            self.places,
            iter(rows),
            relation=before.relation,
            position=position,
            taken_at=max(latest, before.taken_at),
            shape=found.way.shape,
            origin="events",
        )

    # -------------------------------------------------------------------- as of

    def as_of(
        self,
        table: str,
        when: Moment,
        *,
        key: object = None,
        where: Filter | None = None,
        as_text: Collection[str] = (),
    ) -> DataFrame:
        """The rows of a table at a moment, with the columns it had then: all of them, one of them
        (`key`), those that match (`where`). Columns in `as_text` are read as PostgreSQL's text.

        ResyncRequired where the lake does not know: no snapshot of the table serves that moment.
        """
        found = self._state(table, when, key=key)
        read = _typed(found, as_text)
        return read if where is None else read.filter(condition(where, _text(found.table, as_text)))

    def _state(self, name: str, when: Moment, *, key: object = None) -> _State:
        from pyspark.sql import functions as f

        when = state.aware(when)
        known = shapes.load(self.shapes_path)
        relation = self._relation(known, name, when)
        tables = {shape.table.id: shape.table for shape in known if shape.table.oid == relation}
        ways = self._ways(self._snapshots(relation), when)
        way = state.choose(ways, name, when)
        self._check_reached(way.snapshot, when)
        passed = tuple(_known(tables, shape) for shape in way.passed)
        changes, rows = self._between(way.snapshot, when), self._rows(way.snapshot)
        if key is not None:
            text = key_text(passed[-1], key)
            changes, rows = changes.filter(f.col("key") == text), rows.filter(f.col("key") == text)
        return _State(state.fold(rows, changes, way), way, passed, when)

    def _ways(self, taken: Sequence[Snapshot], when: Moment) -> list[Way]:
        """How to come to the moment; no more is looked at than needed."""
        ways: list[Way] = []
        for snapshot in state.nearest(taken, when):
            found = state.way(snapshot, state.survey(self._between(snapshot, when)))
            if not state.is_below(snapshot, when):
                shape = ways[0].shape if ways else self._shape_at(snapshot, when)
                found = state.within_shape(found, shape)
            ways.append(found)
            if not found.obstacle and len(found.passed) == 1:
                break
        return ways

    def _shape_at(self, snapshot: Snapshot, when: Moment) -> int | None:
        """The shape of the last change by the moment; None if there is none."""
        from pyspark.sql import functions as f

        earlier = self.events().filter(
            (f.col("relation") == snapshot.relation)
            & f.col("position").startswith(f"{snapshot.position.log}-")
            & state.within(when)
        )
        (last,) = earlier.agg(f.max_by("shape", "seq").alias("shape")).collect()
        shape: int | None = last["shape"]
        return shape

    def _check_reached(self, snapshot: Snapshot, when: Moment) -> None:
        """Whoever asks for a position means all of it, and to undo takes every event there is. A
        time beyond the last event means as far as the lake has come."""
        if snapshot.position == when:
            return
        needed = [when] if isinstance(when, Position) else []
        if not state.is_below(snapshot, when):
            needed.append(snapshot.position)
        reached = self.reached() if needed else None
        for position in needed:
            if reached and position.log == reached.log and not reached.covers(position):
                raise Unavailable(
                    f"the lake has come to position {reached}, and {position} is needed",
                    hint="The pipeline brings it further with the next change: try again, or "
                    "headwater pipeline run.",
                )

    def _between(self, snapshot: Snapshot, when: Moment) -> DataFrame:
        log = snapshot.position.log
        taken = [s for s in self._snapshots(snapshot.relation) if s.position.log == log]
        first, last = state.days(snapshot, taken, when)
        return state.between(self.events(first, last), snapshot, when)

    def _rows(self, snapshot: Snapshot) -> DataFrame:
        from pyspark.sql.pandas.types import from_arrow_schema

        wanted = [
            ("relation", "=", str(snapshot.relation)),
            ("snapshot", "=", str(snapshot.snapshot)),
        ]
        return delta.read(self.spark, self.places.rows, from_arrow_schema(snapshots.ROWS), wanted)

    def _snapshots(self, relation: int) -> list[Snapshot]:
        return [each for each in snapshots.load(self.places) if each.relation == relation]

    # -------------------------------------------------------------------- which table

    def _relation(self, known: Iterable[Shape], name: str, when: Moment) -> int:
        """The table that had the name at the moment; of several, one after the other, the last that
        had begun by then."""
        since: dict[int, datetime] = {}
        for shape in shapes.named(known, name):
            since.setdefault(shape.table.oid, shape.first_seen)
        if not since:
            raise ConfigError(
                f"the lake knows no table {name}",
                hint=f"Capture it, and take a snapshot: headwater snapshot {name}",
            )
        if len(since) == 1:
            return next(iter(since))
        if isinstance(when, Position):
            return self._last_begun(list(since), when)
        return [oid for oid, at in since.items() if at <= when or oid == next(iter(since))][-1]

    def _last_begun(self, relations: list[int], when: Position) -> int:
        from pyspark.sql import functions as f

        events = self.events().filter(
            f.col("relation").isin(relations)
            & f.col("position").startswith(f"{when.log}-")
            & state.within(when)
        )
        last = events.groupBy("relation").agg(f.max("seq").alias("seq")).orderBy("seq").collect()
        return int(last[-1]["relation"]) if last else relations[0]

    # -------------------------------------------------------------------- history, audit

    def history(self, table: str, key: object) -> DataFrame:
        """What became of a row: one line for each version, valid from and to, who made it, which
        columns changed, and the row itself as `row`."""
        from pyspark.sql import functions as f

        known = shapes.load(self.shapes_path)
        relation = self._relation(known, table, _END)
        tables = [shape.table for shape in known if shape.table.oid == relation]
        text = key_text(tables[-1], key)
        events = self.events().filter(f.col("relation") == relation)
        steps = history.beginning(history.own(events, text), self._kept(relation, text))
        return history.with_rows(history.versions(steps), history.combined(tables))

    def _kept(self, relation: int, key: str) -> list[tuple[Snapshot, str, int]]:
        """What snapshots have of a row, the oldest first."""
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
        """Changes counted by these. Whole days come from the roll-ups, where there are any."""
        from pyspark.sql import functions as f

        since, until = (None if each is None else _utc(each) for each in (since, until))
        whole = all(each is None or each.time() == datetime.min.time() for each in (since, until))
        if whole and delta.open_table(self.audit_path) is not None:
            return audit.summary(self._rolled(since, until), by)
        events = self.events(since and since.date(), until and until.date())
        if since is not None:
            events = events.filter(f.col("committed_at") >= f.lit(since))
        if until is not None:
            events = events.filter(f.col("committed_at") < f.lit(until))
        return audit.summary(audit.roll_up(events), by)

    def _rolled(self, since: datetime | None, until: datetime | None) -> DataFrame:
        from pyspark.sql.pandas.types import from_arrow_schema

        bounds = ((">=", since), ("<", until))
        filters = [("day", sign, at.date().isoformat()) for sign, at in bounds if at is not None]
        return delta.read(self.spark, self.audit_path, from_arrow_schema(audit.AUDIT), filters)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_END = datetime.max.replace(tzinfo=UTC)


def _utc(at: datetime) -> datetime:
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)


# ------------------------------------------------------------------------ reading rows


def _typed(found: _State, columns: Collection[str]) -> DataFrame:
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


def _known(tables: dict[int, Table], shape: int) -> Table:
    try:
        return tables[shape]
    except KeyError:
        raise ResyncRequired(
            f"the lake does not know shape {shape}, under which its events were written",
            hint="Keep the shapes of the database: headwater snapshot does.",
        ) from None
