"""Every type: a query and the binary log give the same text, which PostgreSQL reads and prints as
expected. The judge is a typed column of a real PostgreSQL."""

from __future__ import annotations

import psycopg
from psycopg import sql

from headwater.capture.source import SchemaChange, SourceTable
from tests.contract.sources.drivers.mysql import TYPES, MysqlDriver
from tests.support.mysql.reading import changed, copied, opened, transactions

_PRINTED = {
    "timestamp": "timestamp without time zone",
    "timestamptz": "timestamp with time zone",
    "numeric(20)": "numeric(20,0)",
}


def printed(url: str, table: SourceTable, row: tuple[str | None, ...]) -> list[str | None]:
    """The values as PostgreSQL prints them, from columns of the mirror's types."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("set time zone 'UTC'")
        columns = sql.SQL(", ").join(
            sql.SQL("c{} " + column.type).format(sql.SQL(str(i)))
            for i, column in enumerate(table.columns)
        )
        connection.execute(sql.SQL("create temp table t ({})").format(columns))
        places = ", ".join(["%s"] * len(row))
        connection.execute(f"insert into t values ({places})", row)
        printed = "case when c{0} is not null then format('%s', c{0}) end"
        names = ", ".join(printed.format(i) for i in range(len(row)))
        found = connection.execute(f"select {names} from t").fetchone()
        assert found is not None
        return list(found)


async def test_values_are_the_same_from_query_and_log(driver: MysqlDriver, empty_url: str) -> None:
    await driver.create_typed_table("t", TYPES)
    async with opened(driver.definition("t")) as source:
        (table,) = await source.tables()
        after = await source.start()
        await driver.insert_typed("t", 1, list(TYPES))
        await driver.insert_typed("t", 2, [None] * len(TYPES))
        items = await changed(source, after, await source.start())
        logged = [row for part in transactions(items) for c in part.changes for row in c.after]
        rows = await copied(source, table)
        assert not [item for item in items if isinstance(item, SchemaChange)]
        for i, case in enumerate(TYPES):
            assert (case.declared, logged[0][i + 1]) == (case.declared, rows["1",][i + 1])
        assert logged == list(rows.values())
        assert logged[1] == ("2", *[None] * len(TYPES))
        values = printed(empty_url, table, logged[0])  # type: ignore[arg-type]
        for column, case, value in zip(table.columns[1:], TYPES, values[1:], strict=True):
            assert (case.declared, value) == (case.declared, case.mirror_value)
            assert _PRINTED.get(column.type, column.type) == case.mirror_type
