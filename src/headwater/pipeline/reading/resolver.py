"""Resolves requests about the past: which table a name means, from which snapshot the state at a
moment is computed, how the history of a row begins, and what the lake cannot answer.

The rules are written once, for every engine: what they need to know of the events they ask as an
`EventQuery`, and the caller has it answered (`Ask`). Reads only the lists of the lake itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from headwater.errors import ConfigError, ResyncRequired, Unavailable
from headwater.model import Position, Table
from headwater.pipeline.lake import delta, gaps, retention, shapes, snapshots
from headwater.pipeline.lake.gaps import LakeGap
from headwater.pipeline.lake.keys import key_text
from headwater.pipeline.lake.moments import Moment
from headwater.pipeline.lake.schemas import as_text
from headwater.pipeline.lake.shapes import Shape
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.reading import changes as changes_
from headwater.pipeline.reading import history, state
from headwater.pipeline.reading.event_query import AnswerRow, Ask, EventQuery
from headwater.pipeline.reading.state import ChangeSummary, StatePlan
from headwater.pipeline.reading.tail import Tail
from headwater.pipeline.stream.offsets import Offset

END = datetime.max.replace(tzinfo=UTC)
"""The moment after everything."""


class LakePaths(msgspec.Struct, frozen=True):
    """The paths of the Delta tables of a lake."""

    root: str

    @property
    def events(self) -> str:
        return f"{self.root}/events"

    @property
    def shapes(self) -> str:
        return f"{self.root}/shapes"

    @property
    def gaps(self) -> str:
        return f"{self.root}/gaps"

    @property
    def snapshots(self) -> snapshots.Places:
        folder = f"{self.root}/snapshots"
        return snapshots.Places(
            f"{folder}/rows", f"{folder}/list", self.shapes, f"{folder}/_unfinished"
        )


class KnownState(msgspec.Struct, frozen=True):
    """How the state of a table at a moment is known: by a plan, or without one by its rows (key,
    image, shape)."""

    passed: tuple[Table, ...]
    plan: StatePlan | None
    rows: Sequence[tuple[str, str, int]] = ()

    @property
    def table(self) -> Table:
        return self.passed[-1]


class Resolver:
    """Of a lake at one version of its events, and the log up to one position (`tail`). For one
    request: the lists of the lake are read once."""

    def __init__(self, root: str, ask: Ask, *, version: int | None, tail: Tail | None) -> None:
        self.paths = LakePaths(root)
        self._ask = ask
        self._version = version
        self._tail = tail
        self._shapes: dict[str, list[Shape]] = {}
        self._snapshots: dict[int, list[TableSnapshot]] = {}

    # -------------------------------------------------------------------- what the lake has

    def shapes(self, name: str) -> list[Shape]:
        """The shapes of the tables that ever had the name."""
        if name not in self._shapes:
            found = shapes.load(self.paths.shapes, name)
            if self._tail is not None:
                found = shapes.with_new(found, self._tail.url, name)
            self._shapes[name] = found
        return self._shapes[name]

    def snapshots(self, relation: int) -> list[TableSnapshot]:
        if relation not in self._snapshots:
            self._snapshots[relation] = snapshots.load(self.paths.snapshots, relation)
        return self._snapshots[relation]

    def reached(self) -> Position | None:
        """The position up to which the lake has every event, as the stream saved it with its
        batches; None if no recent commit has one. With a log, the end of the log."""
        if self._tail is not None:
            return self._tail.until
        table = delta.open_table(self.paths.events, self._version)
        found = None if table is None else delta.offset_of(table)
        return None if found is None else Offset.from_dict(msgspec.json.decode(found)).position

    def check_retention(self, when: Moment) -> None:
        """ResyncRequired for a moment whose events may have been removed."""
        floor = retention.load(self.paths.root)
        if floor is not None:
            floor.check(when)

    def check_covered(self, needed: Sequence[Position]) -> None:
        """Unavailable for a position that the lake has not reached."""
        reached = self.reached() if needed else None
        for position in needed:
            if reached and position.log == reached.log and not reached.covers(position):
                raise Unavailable(
                    f"the lake has changes up to position {reached}, and {position} is needed",
                    hint="Try again when the pipeline has written more, or start it: headwater "
                    "pipeline run.",
                )

    def check_complete(self, relation: int, since: Moment | None, until: Moment | None) -> None:
        """ResyncRequired where the lake does not have everything of a table between two moments."""
        if since is not None:
            self.check_retention(since)
        for gap in gaps.load(self.paths.gaps, relation):
            is_beside = (since is not None and gap.is_after(since)) or (
                until is not None and gap.is_before(until)
            )
            if not is_beside:
                raise ResyncRequired(
                    str(gap),
                    hint="Make two requests, one up to the gap (until) and one after it (since).",
                )

    # -------------------------------------------------------------------- which table

    def relation(self, known: Iterable[Shape], name: str, when: Moment) -> int:
        """The table that had the name at the moment. Of several tables, the one with the last
        change under that name."""
        named = {each.table.id: each.table.oid for each in shapes.named(known, name)}
        if not named:
            raise self._unknown(name)
        if len(set(named.values())) == 1:
            return next(iter(named.values()))
        return self._last_written(named, when)

    def tables(self, name: str, relation: int) -> list[Table]:
        """The shapes of a table that ever had the name; ConfigError where the lake has none."""
        found = [each.table for each in self.shapes(name) if each.table.oid == relation]
        if not found:
            raise self._unknown(name)
        return found

    def _unknown(self, name: str) -> ConfigError:
        return ConfigError(
            f"the lake {self.paths.root} has no table {name}",
            hint=f"Enable the table, and make a snapshot: headwater pipeline snapshot {name}",
        )

    def _last_written(self, named: dict[int, int], when: Moment) -> int:
        shapes_ = f"shape in ({', '.join(map(str, named))})"
        last = EventQuery(
            relations=tuple(sorted(set(named.values()))),
            where=(shapes_, *(() if when == END else (changes_.inside_sql(when),))),
            columns={name: name for name in ("relation", "committed_at", "seq")},
            order=("-committed_at", "-seq"),
            limit=1,
        )
        for row in self._ask(last):
            return int(row["relation"])
        taken = snapshots.load(self.paths.snapshots)
        usable = [each for each in taken if each.shape in named and state.is_below(each, when)]
        return usable[-1].relation if usable else next(iter(named.values()))

    # -------------------------------------------------------------------- the state at a moment

    def known_state(
        self, known: Sequence[Shape], relation: int, when: Moment, key: object
    ) -> KnownState:
        """How the state at a moment is known: by a snapshot, or for one row, by its own changes.
        ResyncRequired or Unavailable where it is not."""
        tables = {shape.table.id: shape.table for shape in known if shape.table.oid == relation}
        taken = self.snapshots(relation)
        try:
            plan = state.choose(self._plans(taken, relation, when), label(known, relation), when)
        except ResyncRequired:
            found = None if key is None else self._row_of(tables, relation, key, when)
            if found is None:
                raise
            return found
        self._check_reached(plan.snapshot, when)
        passed = tuple(changes_.known(tables, shape) for shape in plan.passed)
        return KnownState(passed, plan)

    def _row_of(
        self, tables: Mapping[int, Table], relation: int, key: object, when: Moment
    ) -> KnownState | None:
        """A row at a moment from its own changes, where no snapshot can be used. None where these
        are not enough."""
        if isinstance(when, Position):
            self.check_covered([when])
        text = key_text(list(tables.values())[-1], key)
        missed = gaps.load(self.paths.gaps, relation)
        found = history.row_at(self._ask, relation, text, when, missed)
        if found is None:
            return None
        passed = tuple(changes_.known(tables, shape) for shape in found.passed)
        rows = [] if found.image is None else [(text, found.image, found.passed[0])]
        self.check_retention(when)
        return KnownState(passed, None, rows)

    def _plans(
        self, taken: Sequence[TableSnapshot], relation: int, when: Moment
    ) -> list[StatePlan]:
        """The plans for a moment; no more are made than needed."""
        plans: list[StatePlan] = []
        near = state.nearest(taken, when)
        missed = gaps.load(self.paths.gaps, relation)
        for snapshot in near:
            found = state.plan(snapshot, self._summaries(snapshot, taken, when))
            is_below = state.is_below(snapshot, when)
            if not is_below:
                shape = plans[0].shape if plans else self._shape_at(snapshot, when)
                found = state.check_shape(found, shape, when)
            found = state.outside_gaps(found, missed, when)
            if plans and not found.obstacle and _is_altered(plans[0], near, when):
                return [found]
            plans.append(found)
            if not found.obstacle and len(found.passed) == 1 and not _is_altered(found, near, when):
                break
        if all(each.obstacle for each in plans):
            plans += self._since_truncate(relation, missed, when)
        return plans

    def _since_truncate(
        self, relation: int, missed: Sequence[LakeGap], when: Moment
    ) -> Iterator[StatePlan]:
        """The plan that begins with the last truncate, if there is one."""
        for truncate in self._ask(state.last_truncate(relation, when)):
            begin = state.emptied(relation, truncate)
            found = state.plan(begin, self._summaries(begin, self.snapshots(relation), when))
            yield state.outside_gaps(found, missed, when)

    def changes_after(
        self,
        snapshot: TableSnapshot,
        when: Position,
        *where: str,
        order: str = "seq",
        limit: int | None = None,
    ) -> list[AnswerRow]:
        """Some columns of the changes of a table after a snapshot, in order."""
        apart = state.between(snapshot, when)
        return self._ask(
            EventQuery(
                relations=(snapshot.relation,),
                where=(apart.where, *where),
                columns={name: name for name in ("seq", "xid", "op", "committed_at")},
                order=(order,),
                limit=limit,
                days=days(snapshot, self.snapshots(snapshot.relation), when),
                among=state.bounds(snapshot, when),
            )
        )

    def plan_from(self, snapshot: TableSnapshot, when: Position) -> StatePlan:
        """The plan for rows at an earlier position, which need not be a snapshot of the lake."""
        taken = self.snapshots(snapshot.relation)
        found = state.plan(snapshot, self._summaries(snapshot, taken, when))
        return state.outside_gaps(found, gaps.load(self.paths.gaps, snapshot.relation), when)

    def _summaries(
        self, snapshot: TableSnapshot, taken: Sequence[TableSnapshot], when: Moment
    ) -> list[ChangeSummary]:
        explained = [seq for each in taken for seq in each.explained]
        answer = self._ask(state.summary(snapshot, when, days(snapshot, taken, when), explained))
        return [msgspec.convert(row, ChangeSummary) for row in answer]

    def _shape_at(self, snapshot: TableSnapshot, when: Moment) -> int | None:
        """The shape of the last change up to the moment; None if there is no change."""
        return next((row["shape"] for row in self._ask(state.shape_at(snapshot, when))), None)

    def _check_reached(self, snapshot: TableSnapshot, when: Moment) -> None:
        """Raise Unavailable where events are missing: for a position, all its events are needed,
        and to undo changes, all events of the snapshot. A time after the last event means the end
        of the lake."""
        if snapshot.position == when:
            return
        needed = [when] if isinstance(when, Position) else []
        if not state.is_below(snapshot, when):
            needed.append(snapshot.position)
        self.check_covered(needed)

    # -------------------------------------------------------------------- the history of a row

    def steps(
        self, name: str, key: object, *, relation: int | None = None
    ) -> tuple[list[Table], EventQuery]:
        """The shapes of a table, and the question for the events that concern one row of it. With a
        `relation`, it need not be the table that had the name last."""
        if relation is None:
            relation = self.relation(self.shapes(name), name, END)
        tables = self.tables(name, relation)
        return tables, history.steps(relation, key_text(tables[-1], key))

    def beginning(
        self,
        steps: EventQuery,
        first: AnswerRow | None,
        images: Callable[[Sequence[TableSnapshot], str], list[AnswerRow]],
    ) -> AnswerRow | None:
        """The row before the first of its steps. `images` are those of a key in snapshots."""
        (relation,), key = steps.relations, steps.key
        assert key is not None
        return history.start(first, self.snapshots(relation), lambda among: images(among, key))


def _is_altered(found: StatePlan, near: Sequence[TableSnapshot], when: Moment) -> bool:
    """Whether a later snapshot shows that the table had another shape at the moment already: it was
    altered before, and written only after the moment."""
    return any(
        not state.is_below(above, when)
        and above.shape != found.shape
        and state.is_unaltered_since(above, when)
        for above in near
    )


def days(snapshot: TableSnapshot, taken: Sequence[TableSnapshot], when: Moment) -> state.Days:
    """The days between a snapshot and a moment; `taken` are all snapshots of its table."""
    same = [each for each in taken if each.position.log == snapshot.position.log]
    return state.days(snapshot, same, when)


def label(known: Iterable[Shape], relation: int) -> str:
    """The last name of a table."""
    labels = [each.table.label for each in known if each.table.oid == relation]
    return labels[-1] if labels else f"relation {relation}"


def with_text(table: Table, columns: Collection[str]) -> Table:
    """The table with these columns read as PostgreSQL's text."""
    unknown = [name for name in columns if name not in {c.name for c in table.columns}]
    if unknown:
        raise ConfigError(
            f"{table.label} has no column {unknown[0]}",
            hint=f"It has: {', '.join(c.name for c in table.columns)}.",
        )
    return as_text(table, columns)
