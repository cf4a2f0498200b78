"""The state of tables at any moment, against copies that were taken at the time."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest

from headwater.errors import ConfigError, InvalidQuery, ResyncRequired, Unavailable
from headwater.live.filters.filter import Filter, c
from headwater.model import Position
from headwater.pipeline.lake.moments import Moment
from headwater.pipeline.reading import state
from tests.support.lake.truth import Copy, Database, copy, fill, lake_at, opened, position, rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headwater.pipeline.reading.lake import Lake

pytestmark = pytest.mark.timeout(900)

ITEMS = """
    create table items (
      id int primary key, region int, amount numeric(12,2), note text, changed timestamptz)
"""


def enable(database: Database, table: str) -> None:
    database.execute("select headwater.enable_reactivity(%s)", [table])


def drop_snapshots(lake: Lake) -> None:
    shutil.rmtree(f"{lake.root}/snapshots")


def a_transaction(database: Database, rng: random.Random, ids: range) -> None:
    """Some statements on rows of its own, which may contradict each other."""
    with database.transaction():
        for _ in range(rng.randint(1, 4)):
            one, other = rng.choice(ids), rng.choice(ids)
            amount, note = rng.randint(-999, 999) / 100, rng.choice(["", 'ä"\\\n', None, "null"])
            match rng.randint(0, 5):
                case 0 | 1 | 2:
                    database.execute(
                        "insert into items values (%s, %s, %s, %s, clock_timestamp())"
                        " on conflict (id) do update set amount = excluded.amount,"
                        " note = excluded.note, changed = excluded.changed",
                        [one, one % 7, amount, note],
                    )
                case 3:
                    database.execute("delete from items where id = %s", [one])
                case 4:
                    database.execute(
                        "update items set id = %s where id = %s"
                        " and not exists (select from items where id = %s)",
                        [other, one, other],
                    )
                case 5:
                    database.execute(
                        "update items set amount = amount + 1 where id %% 3 = %s and id = any(%s)",
                        [one % 3, list(ids)],
                    )


def test_a_random_history(url: str, spark: SparkSession, tmp_path: Path) -> None:
    """Rows that were there before, overlapping transactions, truncates, changed keys; snapshots of
    both kinds in between. The database does not exist any more when the lake is queried."""
    rng = random.Random(20261115)
    lake = lake_at(tmp_path, spark)
    copies: list[tuple[Copy, bool]] = []
    with opened(url) as database, opened(url) as other:
        database.execute(ITEMS)
        database.execute(
            "insert into items select i, i, i, 'old', now() from generate_series(1, 30) i"
        )
        enable(database, "items")
        for turn in range(24):
            a_transaction(database, rng, range(1, 40))
            is_open = turn % 4 == 1
            if is_open:
                other.execute("begin")
                a_transaction(other, rng, range(100, 120))
            a_transaction(database, rng, range(1, 40))
            if turn == 12:
                database.execute("truncate items")
            if turn % 3 == 1:
                copies.append((copy(database, "items"), not is_open))
            if turn in (4, 16):
                lake.snapshot(url, "items")
            if is_open:
                other.execute("commit")
            if turn == 9:
                quiet = copy(database, "items")
                fill(lake, url)
                folded = lake.fold_snapshot("items", quiet.position)
                assert (folded.origin, folded.rows) == ("events", len(quiet.rows))
                copies.append((quiet, True))
        fill(lake, url)
        database.execute("drop table items")
        database.execute("drop schema headwater cascade")
    for taken, _ in copies:
        assert rows_of(lake.as_of("items", taken.position)) == taken.rows
    for taken in [taken for taken, is_quiet in copies if is_quiet][::2]:
        assert rows_of(lake.as_of("items", taken.at)) == taken.rows
    for (taken, _), key in zip(copies[::3], (1, 20, 105), strict=True):
        expected = [row for row in taken.rows if row["id"] == key]
        assert rows_of(lake.as_of("items", taken.position, key=key)) == expected


def test_a_row_without_a_snapshot_is_found_in_its_history(
    url: str, spark: SparkSession, tmp_path: Path
) -> None:
    """Without any snapshot, with truncates and an added column: a row is as it was, or is refused
    if its history does not have it either."""
    rng = random.Random(17)
    lake = lake_at(tmp_path, spark)
    copies: list[Copy] = []
    with opened(url) as database:
        database.execute(ITEMS)
        database.execute(
            "insert into items select i, i, i, 'old', now() from generate_series(1, 9) i"
        )
        enable(database, "items")
        for turn in range(8):
            for _ in range(3):
                a_transaction(database, rng, range(1, 7))
            if turn == 3:
                database.execute("truncate items")
            if turn == 5:
                database.execute("alter table items add column extra int")
            copies.append(copy(database, "items"))
        fill(lake, url)
    answered = 0
    for taken in rng.sample(copies, 4):
        moment: Moment = taken.position if rng.random() < 0.5 else taken.at
        if taken is copies[3] or taken is copies[4]:
            # The truncate is itself a snapshot, of no rows.
            assert rows_of(lake.as_of("items", moment)) == taken.rows
        elif copies.index(taken) < 3:
            with pytest.raises(ResyncRequired, match="no snapshot"):
                lake.as_of("items", moment)
        for key in rng.sample(range(1, 7), 2):
            versions = lake.history("items", key).toArrow().to_pylist()
            is_in_history = any(v["valid_from"] and v["valid_from"] <= taken.at for v in versions)
            expected = [row for row in taken.rows if row["id"] == key]
            try:
                found = rows_of(lake.as_of("items", moment, key=key))
            except ResyncRequired:
                assert not is_in_history
                continue
            answered += 1
            assert [{**row, "extra": row.get("extra")} for row in found] == [
                {**row, "extra": row.get("extra")} for row in expected
            ]
    assert answered > 4
    with pytest.raises(ResyncRequired, match="no snapshot"):
        lake.as_of("items", copies[0].position, key=8)  # no change has it


def test_schema_changes(url: str, spark: SparkSession, tmp_path: Path) -> None:
    lake = lake_at(tmp_path, spark)
    copies: list[Copy] = []
    with opened(url) as database:
        database.execute(ITEMS)
        enable(database, "items")
        lake.snapshot(url, "items")
        for number, statement in enumerate(
            [
                "insert into items select i, i, i, 'a', '2026-01-01' from generate_series(1, 9) i",
                "alter table items add column extra int",
                "alter table items drop column region",
                "alter table items rename column note to remark",
            ],
            1,
        ):
            database.execute(statement.encode())
            database.execute("update items set amount = amount + 1 where id = %s", [number])
            copies.append(copy(database, "items"))
        # The log has only that the rows were rewritten, not how.
        database.execute("alter table items alter column id type bigint")
        database.execute("alter table items add column tag text default 'none'")
        database.execute("alter table items alter column amount type int using (amount * 100)::int")
        database.execute("update items set amount = amount + 1 where id = 7")
        copies.append(copy(database, "items"))
        fill(lake, url)
        with pytest.raises(ResyncRequired, match=r"without changes in the log \(a reset\)"):
            lake.as_of("items", copies[-1].position).collect()
        database.execute("update items set extra = 5, tag = 'some' where id = 8")
        lake.snapshot(url, "items")
        copies.append(copy(database, "items"))
        fill(lake, url)
        database.execute("alter table items rename to things")
        database.execute("update things set extra = 6 where id = 8")
        copies.append(copy(database, "things"))
        database.execute("drop table things")
        database.execute("create table items (id text primary key, other date)")
        database.execute("insert into items values ('a', '2026-02-03')")
        enable(database, "items")
        lake.snapshot(url, "items")
        copies.append(copy(database, "items"))
        fill(lake, url)
    for number, taken in enumerate(copies):
        # Of the rewrites after the fourth, only the transaction is known, and not the time.
        when = taken.at if number % 2 and number != 3 else taken.position
        assert rows_of(lake.as_of("items", when)) == taken.rows
    with pytest.raises(ResyncRequired, match="rows changed without changes in the log"):
        lake.as_of("items", copies[3].at)
    assert rows_of(lake.as_of("things", copies[-2].position)) == copies[-2].rows


def test_unknown_moments_are_refused(url: str, spark: SparkSession, tmp_path: Path) -> None:
    lake = lake_at(tmp_path, spark)
    with opened(url) as database:
        database.execute(ITEMS)
        database.execute("insert into items values (1)")
        enable(database, "items")
        before = copy(database, "items")
        fill(lake, url)
        with pytest.raises(ResyncRequired, match="no snapshot") as caught:
            lake.as_of("items", before.position)
        assert "headwater pipeline snapshot items" in str(caught.value.hint)
        database.execute("update items set region = 5")
        lake.snapshot(url, "items")
        with pytest.raises(Unavailable, match="the lake has changes up to position"):
            lake.as_of("items", before.at)
        database.execute("truncate items")
        fill(lake, url)
        assert rows_of(lake.as_of("items", before.position)) == before.rows
        drop_snapshots(lake)
        lake.snapshot(url, "items")
        fill(lake, url)
        with pytest.raises(ResyncRequired, match="truncated in between"):
            lake.as_of("items", before.position)
        database.execute("select headwater.disable_reactivity('items')")
        database.execute("insert into items values (2)")
        enable(database, "items")
        after = copy(database, "items")
        fill(lake, url)
        with pytest.raises(ResyncRequired, match="a reset"):
            lake.as_of("items", after.position)
        taken = lake.snapshot(url, "items")
        assert rows_of(lake.as_of("items", taken.position)) == after.rows
        fill(lake, url)
        assert rows_of(lake.as_of("items", after.position)) == after.rows
    with pytest.raises(ConfigError, match="has no table nothing"):
        lake.as_of("nothing", after.at)
    with pytest.raises(ConfigError, match="has no column x"):
        lake.as_of("items", after.at, as_text=["x"])


FILTERS: list[tuple[Filter, str]] = [
    (c.region == 3, "region = 3"),
    (c.region.not_in(3, 4), "region not in (3, 4)"),
    (c.region.in_(3, None), "region in (3, null)"),
    ((c.amount >= "2.50") & (c.note.is_null() | (c.note > "b")),
     "amount >= 2.5 and (note is null or note > 'b' collate \"C\")"),
    (~(c.note.like("a\\%_%")), r"not note like 'a\%_%'"),
    (c.note.ilike("A%"), "note ilike 'A%'"),
    (c.ratio == "NaN", "ratio = 'NaN'"),
    (c.ratio > 1e300, "ratio > 1e300"),
    (c.tall >= "2026-01-02T00:00:00Z", "tall >= '2026-01-02Z'"),
    (c.code == "0b5d2c34-63c5-4b5e-8d4a-4f5a2a1e9d01",
     "code = '0b5d2c34-63c5-4b5e-8d4a-4f5a2a1e9d01'"),
    (c.padded == "ab", "padded = 'ab'"),
    (c.at < "12:30:00.5", "at < '12:30:00.5'"),
    # Numbers that the type of the column cannot hold.
    (c.wide.in_("7.004", "-1e50", "NaN"), "wide in (7.004, -1e50, 'NaN')"),
    ((c.wide >= "6.999") & (c.wide < "7.001"), "wide >= 6.999 and wide < 7.001"),
    ((c.wide > "7.004") | (c.wide <= "6.996"), "wide > 7.004 or wide <= 6.996"),
    ((c.wide != "7.004") & (c.amount < "NaN"), "wide <> 7.004 and amount < 'NaN'"),
    ((c.region < 10**20) & (c.region > "2.5"), "region < 1e20 and region > 2.5"),
    ((c.big == 2**63 - 1) | (c.big == 2**63), "big in (9223372036854775807, 9223372036854775808)"),
    ((c.big > "-1e50") & (c.region > "-1e30"), "big > -1e50 and region > -1e30"),
]  # fmt: skip


def test_filters_and_types(url: str, spark: SparkSession, tmp_path: Path) -> None:
    """Spark finds the same rows as PostgreSQL; each type comes back unchanged."""
    lake = lake_at(tmp_path, spark)
    with opened(url) as database:
        database.execute("""
            create table things (
              id int primary key, region smallint, amount numeric, note text, ratio float8,
              tall timestamptz, code uuid, padded char(4), at time, day date, plain timestamp,
              raw bytea, tags text[], sums numeric(5,2)[], document json, small real, big bigint,
              yes boolean, forever date, wide numeric(38,2) default 7)""")
        enable(database, "things")
        database.execute(r"""
            insert into things values
              (1, 3, 2.50, 'a%bc', 'NaN', '2026-01-02 10:00+02',
               '0b5d2c34-63c5-4b5e-8d4a-4f5a2a1e9d01', 'ab', '12:30', '2026-01-31',
               '2026-01-31 12:00:00.123456', '\x00ff',
               array['x', null, '"'], array[1.50, null], '{"a": 1.50, "a": [1e400]}', 0.1,
               9223372036854775807, true, null),
              (2, 4, 123456789.000000000000000001, 'Abc', 'Infinity', '2025-01-01', null, 'abc',
               '12:30:00.51', null, null, '', '{}', null, '"5"', '-Infinity', null, false, null),
              (3, null, null, null, 1.5, null, null, null, '23:59:59.5', null, null, null, null,
               null, 'null', 'NaN', -1, null, null)""")
        found = copy(database, "things")
        lake.snapshot(url, "things")
        fill(lake, url)
        rows = rows_of(lake.as_of("things", found.position))
        documents = database.execute("select document::text from things order by id").fetchall()
        texts = [row["document"] for row in rows]
        assert texts[:2] == [text for (text,) in documents][:2]
        for row, expected in zip(rows, found.rows, strict=True):
            for name in ("code", "at", "document"):
                row.pop(name), expected.pop(name)
            row["small"] = expected["small"] = None  # PostgreSQL prints it with fewer digits
            assert without_nan(row) == without_nan(expected)
        for where, text in FILTERS:
            ids = database.execute(f"select id from things where {text} order by id".encode())
            got = lake.as_of("things", found.position, where=where).toArrow().column("id")
            assert sorted(got.to_pylist()) == [id_ for (id_,) in ids.fetchall()], text
        database.execute("update things set forever = 'infinity' where id = 1")
        later = position(database)
        fill(lake, url)
    with pytest.raises(Exception, match=r"things\.forever is date and holds .infinity"):
        lake.as_of("things", later).collect()
    as_text = lake.as_of("things", later, key="1", as_text=["forever"])
    assert as_text.toArrow().column("forever").to_pylist() == ["infinity"]
    with pytest.raises(InvalidQuery, match="key of things"):
        lake.as_of("things", later, key=(1, 2))


def without_nan(row: dict[str, Any]) -> dict[str, Any]:
    return {name: repr(value) if value != value else value for name, value in row.items()}


def test_changes_are_counted_from_the_position_of_each_table(spark: SparkSession) -> None:
    rng = random.Random(7)
    names = ("relation", "shape", "op", "xid")
    events = [
        (
            rng.randint(0, 150),
            rng.randint(1, 2),
            rng.choice(["insert", "update"]),
            rng.randint(1, 99),
        )
        for _ in range(2_000)
    ]
    positions = {
        each: Position("a", 10, 50 + each % 40, (10, 20 + each % 7)) for each in range(1, 150)
    }
    expected: dict[tuple[object, ...], list[int]] = {}
    for relation, shape, op, xid in events:
        if relation in positions and not positions[relation].contains(xid):
            expected.setdefault((relation, shape, op), []).append(xid)
    rows = pa.table(dict(zip(names, map(list, zip(*events, strict=True)), strict=True)))
    found = state.counted_after(spark.createDataFrame(rows), positions).collect()
    assert {tuple(row[:3]): tuple(row[3:]) for row in found} == {
        group: (len(ids), min(ids), max(ids)) for group, ids in expected.items()
    }


def test_a_table_must_be_captured(url: str, tmp_path: Path, spark: SparkSession) -> None:
    with psycopg.connect(url, autocommit=True) as database:
        database.execute(ITEMS)
    with pytest.raises(Exception, match="items is not captured"):
        lake_at(tmp_path, spark).snapshot(url, "items")
