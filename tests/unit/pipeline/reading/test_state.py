"""Which snapshot serves a moment, and what stands in between."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import duckdb
import msgspec
import pytest

from headwater.errors import ResyncRequired
from headwater.model import Column, Position, Table
from headwater.pipeline.lake.moments import aware
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.reading.state import (
    ChangeSummary,
    StatePlan,
    check_shape,
    choose,
    days,
    missing_from_all,
    names_of,
    nearest,
    plan,
)

DAY = datetime(2026, 11, 1, 12, tzinfo=UTC)


def taken(day: int, snapshot: str, shape: int = 1, log: str = "a") -> TableSnapshot:
    position = Position.of_snapshot(log, snapshot)
    return TableSnapshot(7, day, position, DAY + timedelta(days=day), shape, 0, "table")


SNAPSHOTS = [taken(0, "10:10:"), taken(2, "30:35:32"), taken(4, "50:50:")]


@pytest.mark.parametrize(
    ("when", "found"),
    [
        (DAY, [0, 2]),
        (DAY - timedelta(days=1), [0]),
        (DAY + timedelta(days=3), [2, 4]),
        (DAY + timedelta(days=9), [4]),
        (Position("a", 20, 20), [0, 2]),
        (Position("a", 30, 36, (30,)), [0, 4]),  # neither contains the other
        (Position("a", 60, 60), [4]),
        (Position("b", 20, 20), []),
    ],
)
def test_the_nearest_snapshots(when: datetime | Position, found: list[int]) -> None:
    assert [snapshot.snapshot for snapshot in nearest(SNAPSHOTS, when)] == found


@pytest.mark.parametrize(
    ("snapshot", "when", "bounds"),
    [
        # A transaction that the snapshot of the 3rd lacks was open then: it began after the 1st.
        (1, DAY + timedelta(days=3), (date(2026, 11, 1), date(2026, 11, 4))),
        # Nothing was open on the 5th.
        (2, DAY + timedelta(days=9), (date(2026, 11, 5), date(2026, 11, 10))),
        (2, DAY + timedelta(days=1), (date(2026, 11, 2), date(2026, 11, 5))),
        (0, DAY - timedelta(days=3), (date(2026, 10, 29), date(2026, 11, 1))),
        (1, Position("a", 40, 40), (date(2026, 11, 1), date(2026, 11, 5))),
        (2, Position("a", 60, 60), (date(2026, 11, 5), None)),
        (0, Position("a", 5, 5), (None, date(2026, 11, 1))),
    ],
)
def test_the_days_between(
    snapshot: int, when: datetime | Position, bounds: tuple[date | None, date | None]
) -> None:
    assert days(SNAPSHOTS[snapshot], SNAPSHOTS, when) == bounds


def test_a_time_without_a_zone_is_in_utc() -> None:
    assert aware(DAY.replace(tzinfo=None)) == DAY


@pytest.mark.parametrize(
    ("spans", "passed", "truncated", "obstacle"),
    [
        ([], (1,), 0, ""),
        ([ChangeSummary(True, "row", 1, 5, 9)], (1,), 0, ""),
        ([ChangeSummary(True, "row", 2, 7, 9), ChangeSummary(True, "row", 1, 5, 6)], (1, 2), 0, ""),
        (
            [ChangeSummary(True, "truncate", 1, 3, 8), ChangeSummary(True, "row", 1, 5, 9)],
            (1,),
            8,
            "",
        ),
        ([ChangeSummary(False, "row", 1, 5, 9)], (1,), 0, ""),
        ([ChangeSummary(False, "row", 2, 5, 9)], (1,), 0, "altered"),
        ([ChangeSummary(False, "truncate", 1, 5, 9)], (1,), 0, "truncated"),
        ([ChangeSummary(True, "reset", 1, 5, 9)], (1,), 0, "reset"),
        # There and back: what is in between was written under another shape.
        ([ChangeSummary(True, "row", 2, 5, 6), ChangeSummary(True, "row", 1, 4, 9)], (2, 1), 0, ""),
    ],
)
def test_the_schema_changes_between_two_moments(
    spans: list[ChangeSummary], passed: tuple[int, ...], truncated: int, obstacle: str
) -> None:
    found = plan(SNAPSHOTS[0], spans)
    assert (found.passed, found.shape, found.truncated) == (passed, passed[-1], truncated)
    assert obstacle in found.obstacle
    assert bool(found.obstacle) == bool(obstacle)


def test_a_plan_without_a_schema_change_is_preferred() -> None:
    crossing = StatePlan(SNAPSHOTS[0], 2, (1, 2))
    straight = StatePlan(SNAPSHOTS[1], 2, (2,))
    closed = StatePlan(SNAPSHOTS[2], 2, (2,), obstacle="a reset")
    assert choose([crossing, straight], "orders", DAY) is straight
    assert choose([crossing, closed], "orders", DAY) is crossing
    with pytest.raises(ResyncRequired, match="at 2026-11-01 12:00:00 UTC is not known: a reset"):
        choose([closed], "orders", DAY)


def test_nothing_is_undone_past_a_schema_change_or_the_beginning() -> None:
    found = plan(SNAPSHOTS[1], [ChangeSummary(False, "row", 1, 5, 9)])
    assert not check_shape(found, 1, DAY).obstacle
    assert "altered" in check_shape(found, 2, DAY).obstacle
    assert "not captured yet" in check_shape(found, None, DAY).obstacle


def test_a_snapshot_knows_since_when_its_table_has_been_as_it_is() -> None:
    position = SNAPSHOTS[1].position
    altered = msgspec.structs.replace(SNAPSHOTS[1], altered_in=position.xmin - 5)
    found = plan(altered, [ChangeSummary(False, "row", 1, 5, 9)])
    after = Position(position.log, position.xmin - 4, position.xmin - 4)
    before = Position(position.log, position.xmin - 5, position.xmin - 5)
    assert not check_shape(found, 2, after).obstacle
    assert "altered" in check_shape(found, 2, before).obstacle
    assert "not captured yet" in check_shape(found, None, after).obstacle


def table(id_: int, *columns: str, key: tuple[str, ...] = ("id",)) -> Table:
    parts = (text.split(" ", 1) for text in columns)
    return Table(
        id_,
        "public",
        "t",
        tuple(Column(name, kind.partition("(")[0], kind) for name, kind in parts),
        key,
    )


def test_changes_that_many_positions_lack() -> None:
    """Of many tables some changes more are found, but none of tables far from them."""
    many = {each: Position("a", 10_000 - each, 10_000 - each) for each in range(1000, 2000)}
    few = {1: Position("a", 5, 9, (5, 7))}

    def found(positions: dict[int, Position], *changes: tuple[int, int]) -> list[tuple[int, int]]:
        events = ", ".join(map(str, changes))
        with duckdb.connect() as connection:
            return connection.execute(
                f"select * from (values {events}) events (relation, xid)"
                f" where {missing_from_all(positions)}"
            ).fetchall()

    assert found(few, *((1, xid) for xid in range(4, 11)), (2, 9)) == [
        (1, 5),
        (1, 7),
        (1, 9),
        (1, 10),
    ]
    lacked = [(each, position.xmax) for each, position in many.items()]
    old = [(each, position.xmax - 100) for each, position in many.items()]
    assert found(many, *lacked, *old, (999, 2**40), (2000, 2**40)) == lacked


def test_column_names_across_schema_changes() -> None:
    passed = [
        table(1, "id integer", "a text", "b text"),
        table(2, "id bigint", "x text", "b text"),
        table(3, "id bigint", "x text", "new integer"),
    ]
    assert names_of(passed) == {1: {"id": "id", "x": "a"}, 2: {"id": "id", "x": "x"}}
    assert names_of(passed[2:]) == {}


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (table(1, "id integer"), table(2, "id smallint"), "id became smallint"),
        (table(1, "id integer", "a real"), table(2, "id integer", "a text"), "a became text"),
        (
            table(1, "id integer", "a numeric(9,2)"),
            table(2, "id integer", "a numeric(9,1)"),
            r"a became numeric\(9,1\)",
        ),
        (table(1, "id integer"), table(2, "no integer", key=("no",)), "primary key was altered"),
    ],
)
def test_changes_that_the_log_does_not_have(before: Table, after: Table, reason: str) -> None:
    with pytest.raises(ResyncRequired, match=reason):
        names_of([before, after])
