"""Sort keys, ORDER BY and keyset cursors agree with PostgreSQL for every type and direction."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from headwater.live.order import OrderBy, Ordering, check_order
from headwater.live.query import BoundQuery, LiveQuery
from headwater.live.statements import page
from headwater.log.images import ImageDecoder
from headwater.model import Column, Row, Table
from headwater.testing.oracle import SAMPLES, Connection, ask, connect

DIRECTIONS = [
    OrderBy("v", desc, nulls) for desc in (False, True) for nulls in (None, "first", "last")
]


@pytest.fixture(scope="module")
def connection(postgres_url: str) -> Iterator[Connection]:
    with connect(postgres_url) as connection:
        yield connection


def create(connection: Connection, name: str) -> Table:
    """Every value of the sample twice, so that the primary key has ties to break."""
    sample = SAMPLES[name]
    columns = (Column("k", "integer", "integer"), Column("w", "boolean", "boolean"))
    value = Column("v", sample.column.type, sample.ddl, sample.column.collation, sample.column.enum)
    connection.execute(
        f"drop table if exists o; create temp table o (k int, w boolean, v {sample.ddl})".encode()
    )
    with connection.cursor() as cursor:
        rows = enumerate(itertools.product(sample.values, (True, None)))
        cursor.executemany("insert into o values (%s, %s, %s)", [(k, w, v) for k, (v, w) in rows])
    return Table(1, "pg_temp", "o", (*columns, value), ("k",))


def ordered(connection: Connection, query: BoundQuery) -> list[Row]:
    return ask(connection, page(query, None, 1000), ImageDecoder(query.table))


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("by", DIRECTIONS, ids=str)
def test_sort_keys_order_as_the_database_does(
    connection: Connection, name: str, by: OrderBy
) -> None:
    table = create(connection, name)
    order = (OrderBy("w", True), by)
    truth = ordered(connection, BoundQuery(LiveQuery("o", order=order), table))
    compiled = Ordering(check_order(order, table), table)
    assert compiled.exact == (name not in ("m", "iv"))
    entries = [compiled.entries(()).make(row, rank) for rank, row in enumerate(truth)]
    assert all(one < other for one, other in itertools.pairwise(entries))
    for row, entry in zip(truth, entries, strict=True):
        key = compiled.key(compiled.cursor(row))
        assert key == entry if compiled.exact else key == entry[:-1]


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("by", DIRECTIONS, ids=str)
def test_a_page_begins_right_behind_its_cursor(
    connection: Connection, name: str, by: OrderBy
) -> None:
    table = create(connection, name)
    query = BoundQuery(LiveQuery("o", order=(OrderBy("w"), by)), table)
    truth = ordered(connection, query)
    decode = ImageDecoder(table)
    for index, row in enumerate(truth):
        found = ask(connection, page(query, query.order.cursor(row), 1000), decode)
        assert repr(found) == repr(truth[index + 1 :])
