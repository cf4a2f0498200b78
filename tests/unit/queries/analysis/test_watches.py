"""Which queries a change concerns: by table, columns and predicate."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pytest

from headwater.live.filters import compile
from headwater.live.filters.check import check
from headwater.live.filters.filter import EVERYTHING, Filter, Or, c
from headwater.model import Change, Column, Op, Row, Table
from headwater.queries.analysis.statements import Read
from headwater.queries.analysis.watches import Watches, concerns

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
COLUMNS = (
    Column("id", "integer", "integer"),
    Column("region", "integer", "integer"),
    Column("status", "text", "text", "C"),
    Column("amount", "numeric", "numeric"),
    Column("odd", "money", "money"),
)
ORDERS = Table(11, "public", "orders", COLUMNS, ("id",), 1)
ALTERED = Table(12, "public", "orders", COLUMNS[:4], ("id",), 1)
RENAMED = Table(13, "public", "purchases", COLUMNS, ("id",), 1)
NAMESAKE = Table(14, "public", "orders", COLUMNS, ("id",), 9)
LINES = Table(21, "public", "lines", COLUMNS, ("id",), 2)


def row(id_: int = 1, region: int | None = 7, status: str | None = "open", amount: int = 5) -> Row:
    return {"id": id_, "region": region, "status": status, "amount": amount, "odd": "$1.00"}


def change(
    op: Op, before: Row | None = None, after: Row | None = None, table: Table = ORDERS
) -> Change:
    image = after or before
    return Change(1, 1, NOW, table, op, (image["id"],) if image else (), before, after)


def read(where: Filter = EVERYTHING, *columns: str, table: Table = ORDERS) -> Read:
    return Read(table, frozenset(columns) if columns else None, check(where, table))


ANY = read()
COUNT = Read(ORDERS, frozenset())
REGION_7 = read(c.region == 7, "region", "status")

CASES: list[tuple[str, Read, Change, bool]] = [
    ("insert that matches", REGION_7, change("insert", None, row()), True),
    ("insert that does not", REGION_7, change("insert", None, row(region=8)), False),
    ("insert of NULL", REGION_7, change("insert", None, row(region=None)), False),
    ("delete that matches", REGION_7, change("delete", row(), None), True),
    ("delete that does not", REGION_7, change("delete", row(region=8), None), False),
    ("enters", REGION_7, change("update", row(region=8), row(region=7)), True),
    ("leaves", REGION_7, change("update", row(region=7), row(region=8)), True),
    ("passes by", REGION_7, change("update", row(region=9), row(region=8)), False),
    ("stays, used column", REGION_7, change("update", row(), row(status="x")), True),
    ("stays, unused column", REGION_7, change("update", row(), row(amount=6)), False),
    ("count, update", COUNT, change("update", row(), row(amount=6)), False),
    ("count, insert", COUNT, change("insert", None, row()), True),
    ("count, delete", COUNT, change("delete", row(), None), True),
    ("any column", ANY, change("update", row(), row(amount=6)), True),
    ("truncate", REGION_7, change("truncate"), True),
    ("reset", COUNT, change("reset"), True),
    ("no image before", REGION_7, change("update", None, row(region=8)), True),
    ("another table", ANY, change("insert", None, row(), LINES), False),
    ("altered", REGION_7, change("update", row(region=8), row(region=9), ALTERED), True),
    ("renamed", REGION_7, change("insert", None, row(region=8), RENAMED), True),
    ("its name taken", REGION_7, change("insert", None, row(region=8), NAMESAKE), True),
    ("in", read(c.region.in_(7, None)), change("insert", None, row()), True),
    ("like", read(c.status.like("o%")), change("insert", None, row(status="held")), False),
    ("not", read(~(c.region == 7)), change("insert", None, row(region=8)), True),
    ("not, NULL", read(~(c.region == 7)), change("insert", None, row(region=None)), False),
    ("range", read(c.amount > 3), change("insert", None, row(amount=3)), False),
    ("never", read(Or()), change("insert", None, row()), False),
    ("undecided", read(c.odd == "$2.00"), change("insert", None, row()), True),
    ("image without the column", REGION_7, change("insert", None, {"id": 1}), True),
]


@pytest.mark.parametrize(("name", "watched", "event", "expected"), CASES, ids=[c[0] for c in CASES])
def test_which_queries_a_change_concerns(
    name: str, watched: Read, event: Change, expected: bool
) -> None:
    watches: Watches[str] = Watches()
    watches.put("query", [watched])
    assert watches.touched([event]) == ({"query"} if expected else set())
    assert concerns([watched], [event]) == expected


DOCUMENTS = Table(
    31,
    "public",
    "documents",
    (
        Column("id", "integer", "integer"),
        Column("binary", "jsonb", "jsonb"),
        Column("textual", "json", "json"),
        Column("weight", "double precision", "double precision"),
        Column("prices", "numeric[]", "numeric[]"),
        Column("price", "numeric", "numeric"),
    ),
    ("id",),
    3,
)
FIRST: dict[str, Any] = {
    "id": 1,
    "binary": {"a": [1]},
    "textual": "x",
    "weight": 1.5,
    "prices": [Decimal("1.0")],
    "price": Decimal("1.0"),
}


@pytest.mark.parametrize(
    ("column", "before", "after", "expected"),
    [
        ("binary", {"a": [1]}, {"a": [1]}, False),
        ("binary", {"a": 1}, {"a": True}, True),
        ("binary", 1, True, True),
        ("binary", None, None, True),
        ("binary", 1, 1.0, True),
        ("binary", {"a": [1.5]}, {"a": [1.5]}, True),
        ("textual", {"a": 1}, {"a": 1}, True),
        ("textual", "x", "x", True),
        ("weight", 1.5, 1.5, False),
        ("weight", 0.0, -0.0, True),
        ("weight", float("nan"), float("nan"), False),
        ("weight", None, None, False),
        ("prices", [Decimal("1.0")], [Decimal("1.0")], True),
        ("prices", [Decimal("1.0")], [Decimal("1.00")], True),
        ("price", Decimal("1.0"), Decimal("1.00"), True),
        ("price", Decimal("NaN"), Decimal("NaN"), False),
    ],
)
def test_which_columns_an_update_may_have_changed(
    column: str, before: Any, after: Any, expected: bool
) -> None:
    """In an update that certainly changed another column."""
    rows = {**FIRST, column: before}, {**FIRST, column: after, "id": 2}
    event = change("update", *rows, DOCUMENTS)
    assert concerns([Read(DOCUMENTS, frozenset({column}))], [event]) == expected


def test_an_update_without_visible_changes_may_have_changed_any_column() -> None:
    """If no column shows it, it may have been any; else it was one of those that may hide it."""
    plain = Table(
        32, "public", "prices", DOCUMENTS.columns[:1] + DOCUMENTS.columns[-1:], ("id",), 4
    )
    same = {"id": 1, "price": Decimal("1.0")}
    event = change("update", same, same, plain)
    assert concerns([Read(plain, frozenset({"price"}))], [event])
    assert not concerns([Read(plain, frozenset({"price"}), Or())], [event])
    event = change("update", FIRST, FIRST, DOCUMENTS)
    assert concerns([Read(DOCUMENTS, frozenset({"prices"}))], [event])
    assert not concerns([Read(DOCUMENTS, frozenset({"price"}))], [event])


def test_one_matching_read_of_several_is_enough() -> None:
    watches: Watches[str] = Watches()
    reads = [read(c.region == 7, "region"), read(c.region == 8, "region"), read(table=LINES)]
    watches.put("query", reads)
    far, near = (change("insert", None, row(region=n)) for n in (9, 8))
    assert watches.touched([far]) == set()
    assert watches.touched([far, near]) == {"query"}
    assert watches.touched([change("insert", None, row(), LINES)]) == {"query"}
    assert not concerns(reads, [far])
    assert concerns(reads, [far, near])
    assert not concerns([], [far])


def test_everything_is_touched_by_any_change() -> None:
    watches: Watches[str] = Watches()
    watches.put("query", [], everything=True)
    assert watches.touched([change("insert", None, row(), LINES)]) == {"query"}
    assert watches.touched([]) == set()


def test_putting_again_replaces_and_removing_leaves_nothing() -> None:
    watches: Watches[str] = Watches()
    insert = change("insert", None, row())
    watches.put("query", [REGION_7], everything=True)
    watches.put("query", [read(c.region == 8)])
    assert watches.touched([insert]) == set()
    watches.put("query", [REGION_7])
    watches.put("other", [REGION_7, ANY])
    watches.put("third", [Read(ALTERED)])
    assert watches.touched([insert]) == {"query", "other", "third"}
    watches.remove("other")
    watches.remove("other")
    assert watches.touched([insert]) == {"query", "third"}
    watches.remove("query")
    watches.remove("third")
    assert len(watches) == 0
    assert watches.touched([insert]) == set()
    assert not any((watches._tables, watches._oids, watches._filed))


def test_very_many_reads_of_a_table_are_one() -> None:
    watches: Watches[str] = Watches()
    watches.put("query", [read(c.region == n, "region", "status") for n in range(17)])
    watches.put("other", [read(c.region == n, "region") for n in range(16)])
    assert watches.touched([change("insert", None, row(region=99))]) == {"query"}
    assert watches.touched([change("update", row(), row(amount=1))]) == set()


def test_only_reads_that_may_match_are_visited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many items, only those in question have their filter compiled."""
    compiled: list[Filter] = []
    compile_filter = compile.compile_filter

    def counted(where: Filter, table: Table) -> Any:
        compiled.append(where)
        return compile_filter(where, table)

    monkeypatch.setattr("headwater.queries.analysis.watches.compile_filter", counted)
    watches: Watches[int] = Watches()
    for n in range(1_000):
        watches.put(n, [read((c.region == n) & (c.status == "open"), "region", "status")])
    assert watches.touched([change("update", row(), row(amount=6))]) == set()
    assert watches.touched([change("insert", None, row(region=5_000))]) == set()
    assert compiled == []
    assert watches.touched([change("update", row(region=3), row(region=4))]) == {3, 4}
    assert watches.touched([change("insert", None, row(region=3, status="held"))]) == set()
    assert len(compiled) == 2
