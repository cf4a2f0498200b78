"""Values of every type through Debezium's shape and back, from the log of a real database: nothing
changes. The operations are all that the log has, with changed keys, origins and actors."""

from __future__ import annotations

import random
import zlib
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from headwater.database import Connection, connect
from headwater.log.debezium import (
    Envelope,
    from_debezium,
    from_debezium_records,
    snapshot_envelopes,
    to_debezium_records,
)
from headwater.log.reading.reader import LogReader
from headwater.model import Actor, Change, Origin, Position
from headwater.protocol import Wire
from headwater.testing.values import MAKERS, prepare, types, values
from tests.support.generators.sizes import first_seed, size

POSITION = Position("9f3a61c2", 748, 752, (749,))
SEED = first_seed(18)
SHARE = size("debezium", 6, large=400)
"""Values of each type."""


@pytest.mark.timeout(300)
async def test_every_type_there_and_back(url: str) -> None:
    async with (
        await connect(url, purpose="test", application_path=True) as connection,
        await connect(url, purpose="reader", application_path=True) as reading,
    ):
        await prepare(connection)
        reader = await LogReader.open(reading)
        seen, ops, letters = set[str](), set[str](), set[str | None]()
        for name in await types(connection):
            chance = random.Random(zlib.crc32(name.encode()) + SEED)
            found = await values(connection, name, chance, SHARE)
            changes = await history(connection, reader, name, found)
            if not changes:
                continue
            traced = [with_origin(change, chance) for change in changes]
            letters |= there_and_back(traced)
            seen.add(name)
            ops |= {change.op for change in changes}
    assert ops == {"insert", "update", "delete", "truncate", "reset"}
    assert letters == {"c", "u", "d", "t", "m", "r", None}
    assert seen >= MAKERS.keys()


async def history(
    connection: Connection, reader: LogReader, name: str, found: list[str]
) -> list[Change]:
    """What the log has of a table with these values: inserted, updated to another value, moved to
    another key, deleted and truncated."""
    if not found:
        return []
    await connection.execute("drop table if exists v")
    await connection.execute(f"create table v (id int primary key, v {name})".encode())
    since = await reader.now(connection)
    await connection.execute("select headwater.enable_reactivity('v')")
    texts = [*found, None]
    for id_, text in enumerate(texts):
        statement = f"insert into v values (%s, %s::{name})"
        await connection.execute(statement.encode(), (id_, text))
    for id_, text in enumerate(reversed(texts)):
        statement = f"update v set v = %s::{name} where id = %s"
        await connection.execute(statement.encode(), (text, id_))
    await connection.execute("update v set id = id + 1000 where id % 2 = 0")
    await connection.execute("delete from v where id % 3 = 0")
    await connection.execute("truncate v")
    batch = await reader.read(connection, since)
    return [change for each in batch.transactions for change in each.changes]


def with_origin(change: Change, chance: random.Random) -> Change:
    committed = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=chance.getrandbits(50))
    origin = Origin(
        chance.choice(("shop", 'ä "b"')),
        chance.choice((None, "0-1-4711", "0/16B3748", '{"_data": "82"}')),
        chance.choice((None, committed)),
        chance.choice((None, "mysql", "sqlite")),
    )
    actor = Actor(*(chance.choice((None, "ann", "é")) for _ in range(3)))
    return msgspec.structs.replace(change, origin=chance.choice((None, origin)), actor=actor)


def there_and_back(changes: list[Change]) -> set[str | None]:
    """As records and as rows of a snapshot, through JSON."""
    table = changes[-1].table
    wire = Wire(table)
    sent = msgspec.json.decode(msgspec.json.encode(to_debezium_records(changes, wire.row)))
    back = from_debezium_records(sent, table)
    # Compared as text: NaN equals itself there, and 5.0 is not 5.00.
    assert [repr(each) for each in back] == [repr(each) for each in changes]
    tombstones = [key for key, envelope in sent if envelope is None]
    assert [tuple(key.values()) for key in tombstones] == [
        change.key for change in changes if change.op == "delete"
    ]
    last = changes[-1]
    rows = [change.after for change in changes if change.after is not None]
    position_rows = snapshot_envelopes(rows, table, POSITION, last.at, write=wire.row)
    read: list[Envelope] = msgspec.json.decode(msgspec.json.encode(list(position_rows)))
    assert [repr(from_debezium(each, table).after) for each in read] == [repr(row) for row in rows]
    return {*(each["op"] for each in read), *(_letter(value) for _, value in sent)}


def _letter(envelope: dict[str, Any] | None) -> str | None:
    return None if envelope is None else str(envelope["op"])
