"""Generated histories: the folded changes are the table that a query gives, and PostgreSQL reads
every value. `HEADWATER_TEST_SEEDS=200:400` runs other histories."""

from __future__ import annotations

import os
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from psycopg import sql

from headwater.capture.mysql.source import MysqlSource
from headwater.capture.source import (
    Item,
    Progress,
    SchemaChange,
    SourceTable,
    TableDropped,
    TransactionPart,
)
from headwater.errors import SourceUnavailable
from tests.contract.sources.drivers.mysql import MysqlDriver
from tests.support.mysql.generating import History
from tests.support.mysql.reading import (
    Rows,
    changed,
    copied,
    fold,
    opened,
    positions,
)


def seeds(default: int) -> list[int]:
    given = os.environ.get("HEADWATER_TEST_SEEDS")
    return list(range(*map(int, given.split(":")))) if given else list(range(default))


@pytest.mark.parametrize("seed", seeds(12))
async def test_folded_changes_are_the_table(driver: MysqlDriver, empty_url: str, seed: int) -> None:
    history = History(driver.server, driver.database, seed)
    try:
        async with opened(driver.definition("t")) as source:
            (table,) = await source.tables()
            history.steps(20)
            after = await source.start()
            rows = await copied(source, table, rows=history.rng.choice([1, 3, 100]))
            history.steps(150)
            end = await source.start()
            items = await changed(source, after, end)
            assert not [item for item in items if isinstance(item, SchemaChange | TableDropped)]
            items = await _resumed(source, after, end, items, history)
            fold(rows, items, {"t": table})
            assert rows == await copied(source, table, rows=history.rng.choice([1, 3, 100]))
            _stored(empty_url, table, rows)
            _compared(driver, empty_url, table)
    finally:
        history.close()


async def _resumed(
    source: MysqlSource, after: str, end: str, items: list[Item], history: History
) -> list[Item]:
    """Reading from any position gives the rest, and the parts together give everything."""
    found, place = list[Item](), after
    whole = positions(items)
    for position in sorted(history.rng.sample(range(len(whole)), min(3, len(whole)))):
        found += await changed(source, place, whole[position])
        place = whole[position]
    found += await changed(source, place, end)
    assert _changes(found) == _changes(items)
    return found


def _changes(items: list[Item]) -> list[Any]:
    return [item for item in items if isinstance(item, TransactionPart)]


def _stored(url: str, table: SourceTable, rows: Rows) -> None:
    """In a PostgreSQL table of the mirror's types, with its key."""
    with psycopg.connect(url, autocommit=True) as connection:
        parts = [
            sql.SQL("{} {}{}").format(
                sql.Identifier(column.name),
                sql.SQL(column.type),
                sql.SQL("" if column.nullable else " not null"),
            )
            for column in table.columns
        ]
        key = sql.SQL(", ").join(map(sql.Identifier, table.key))
        connection.execute("drop table if exists t")
        connection.execute(
            sql.SQL("create table t ({}, primary key ({}))").format(sql.SQL(", ").join(parts), key)
        )
        places = sql.SQL(", ").join([sql.Placeholder()] * len(table.columns))
        with connection.cursor() as cursor:
            insert = sql.SQL("insert into t values ({})").format(places)
            cursor.executemany(insert, list(rows.values()))


def _compared(driver: MysqlDriver, url: str, table: SourceTable) -> None:
    """Each number, text and date is what PyMySQL, with its own conversions, reads from MariaDB."""
    comparable = [
        i
        for i, column in enumerate(table.columns)
        if column.type.startswith(("smallint", "integer", "bigint", "numeric", "date", "text"))
    ]
    names = [table.columns[i].name for i in comparable]
    theirs = ", ".join("`" + name.replace("`", "``") + "`" for name in names)
    ours = sql.SQL(", ").join(map(sql.Identifier, names))
    with psycopg.connect(url) as connection:
        found = connection.execute(sql.SQL("select {} from t").format(ours)).fetchall()
    expected = driver.server.run(f"select {theirs} from t", database=driver.database)
    assert sorted(map(repr, map(_plain, found))) == sorted(map(repr, map(_plain, expected)))


def _plain(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_value(value) for value in row)


def _value(value: Any) -> Any:
    if isinstance(value, str):
        text = value.replace("\0", "\u2400")
        return None if text[:4].isdigit() and text[4:5] == "-" else text  # An impossible date.
    return Decimal(value) if isinstance(value, int) else value


@pytest.mark.parametrize("seed", seeds(12))
async def test_schema_changes(driver: MysqlDriver, empty_url: str, seed: int) -> None:
    """What a runner does: the table is copied where a schema change says so, and changes up to the
    copy are skipped. The catalog is ahead of all of them."""
    history = History(driver.server, driver.database, seed, ddl=True)
    try:
        async with opened(driver.definition("t")) as source:
            (table,) = await source.tables()
            after = await source.start()
            rows = await copied(source, table)
            history.steps(200)
            end = await source.start()
            items = await changed(source, after, end)
            rows, table = await _mirrored(source, rows, table, items)
            (expected,) = await source.tables()
            assert table == expected
            assert rows == await copied(source, table)
            _stored(empty_url, table, rows)
    finally:
        history.close()


async def _mirrored(
    source: MysqlSource, rows: Rows, table: SourceTable, items: list[Item]
) -> tuple[Rows, SourceTable]:
    skipped, waiting, missing = list[Item](), "", False
    for item in items:
        match item:
            case SchemaChange(new, copies):
                rows = {} if missing or copies else _projected(rows, table, new)
                table, missing = new, missing or copies
                if copies or missing:
                    try:
                        chunk = await source.snapshot(table, None, 100_000)
                    except SourceUnavailable:
                        continue
                    rows = {tuple(str(r[p]) for p in table.key_places()): r for r in chunk.rows}
                    assert chunk.low == chunk.high
                    waiting, missing = chunk.high, False
            case TransactionPart() if missing:
                pass
            case TransactionPart(position=None) if waiting:
                skipped.append(item)
            case TransactionPart(position=str(position)) if waiting and source.contains(
                waiting, position
            ):
                skipped.clear()
            case TransactionPart():
                fold(rows, [*skipped, item], {"t": table}, exact=False)
                skipped.clear()
            case Progress() | TableDropped():
                pass
    assert not missing
    return rows, table


def _projected(rows: Rows, old: SourceTable, new: SourceTable) -> Rows:
    names = [column.name for column in old.columns]
    places = [names.index(column.name) if column.name in names else None for column in new.columns]
    return {
        key: tuple([None if place is None else row[place] for place in places])
        for key, row in rows.items()
    }
