"""Tables read in chunks, in one snapshot of the database: exactly the rows that PostgreSQL has."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql

from headwater.errors import DatabaseError, TableLocked
from headwater.pipeline.snapshots.chunks import chunks_of
from headwater.pipeline.snapshots.database_snapshot import DatabaseSnapshot, database_snapshot
from headwater.pipeline.snapshots.reader import ChunkReader
from headwater.pipeline.views.storage.connections import ViewConnections
from headwater.pipeline.views.storage.staging import RUN, _Writer
from tests.support.generators.sizes import first_seed, size

HOSTILE = """we"ird %s 'na\\me' {"""


@pytest.fixture
def database(url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


def enable(database: psycopg.Connection, name: str) -> None:
    database.execute("select headwater.enable_reactivity(%s)", [name])


def read(now: DatabaseSnapshot, name: str | int, chunk_bytes: int = 8192) -> list[tuple[str, str]]:
    """All rows in chunks, read as a task does it."""
    with ChunkReader(now.exported) as reader:
        batches = [
            batch
            for chunk in chunks_of(now.tables[name].source, chunk_bytes)
            for batch in reader.rows(chunk)
        ]
    rows = [] if not batches else pa.Table.from_batches(batches).to_pylist()
    assert {row["shape"] for row in rows} <= {now.tables[name].table.id}
    return sorted((row["key"], row["image"]) for row in rows)


def images(database: psycopg.Connection, table: str) -> list[str]:
    """The rows by PostgreSQL, read through the table itself."""
    found = database.execute(f"select row_to_json(o.*)::text from {table} o".encode())
    return sorted(image for (image,) in found)


def test_rows_of_every_chunk_are_those_of_the_table(url: str, database: psycopg.Connection) -> None:
    name = sql.Identifier(HOSTILE)
    database.execute(
        sql.SQL("create table {} (id int, {} text, primary key (id, {}))").format(name, name, name)
    )
    insert = sql.SQL(
        "insert into {} select n, repeat({}, 1 + n %% 7) from generate_series(1, 900) n"
    )
    database.execute(
        insert.format(name, sql.Literal(HOSTILE)).as_string().replace("%%", "%").encode()
    )
    enable(database, sql.Identifier(HOSTILE).as_string())
    relation = database.execute("select max(relid::bigint) from headwater.tables").fetchone()
    assert relation is not None
    with database_snapshot(url, relation) as now:
        assert len(chunks_of(now.tables[relation[0]].source, 8192)) > 3
        found = read(now, relation[0])
    assert [image for _, image in sorted(found, key=lambda row: row[1])] == images(
        database, sql.Identifier(HOSTILE).as_string()
    )
    assert len({key for key, _ in found}) == 900


def test_writes_after_the_snapshot_are_not_seen(url: str, database: psycopg.Connection) -> None:
    database.execute("create table items (id int primary key, note text)")
    database.execute("insert into items select n, 'old' from generate_series(1, 500) n")
    enable(database, "items")
    with database_snapshot(url, ["items"]) as now:
        database.execute("update items set note = 'new' where id % 2 = 0")
        database.execute("delete from items where id % 3 = 0")
        database.execute("insert into items select n, 'new' from generate_series(501, 900) n")
        found = read(now, "items")
    assert {image for _, image in found} == {f'{{"id":{n},"note":"old"}}' for n in range(1, 501)}


SHAPES = {
    "partitions": """
        create table t (id int, region int, note text, primary key (region, id))
          partition by list (region);
        create table t_1 partition of t for values in (1);
        create table t_2 (note text, gone int, id int, region int, primary key (region, id));
        alter table t_2 drop column gone;
        alter table t attach partition t_2 for values in (2);
        create table t_3 partition of t for values in (3) partition by range (id);
        create table t_3_low partition of t_3 for values from (0) to (300);
        create table t_3_high partition of t_3 for values from (300) to (100000);
    """,
    "inheritance": """
        create table t (id int primary key, region int, note text);
        create table t_1 (extra int) inherits (t);
        create table t_2 (primary key (id)) inherits (t_1);
    """,
    "dropped column and virtual-free generated": """
        create table t (id int primary key, gone text, region int, note text,
          twice int generated always as (region * 2) stored);
        alter table t drop column gone;
    """,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_relation_of_a_table_is_read_once(
    url: str, database: psycopg.Connection, shape: str
) -> None:
    database.execute(SHAPES[shape].encode())
    targets = ("t", "t_1", "t_2") if shape == "inheritance" else ("t",)
    for place, target in enumerate(targets):
        database.execute(
            f"insert into {target} (id, region, note)"
            f" select n, 1 + n % 3, repeat('x', n) from generate_series({place * 600 + 1},"
            f" {place * 600 + 600}) n".encode()
        )
    enable(database, "t")
    with database_snapshot(url, ["t"]) as now:
        found = read(now, "t")
    assert sorted(image for _, image in found) == images(database, "t")


def test_a_large_table_is_divided_by_its_bytes_with_large_values(
    url: str, database: psycopg.Connection
) -> None:
    """Rows of a kilobyte on the page and a megabyte beside it."""
    database.execute("create table files (id int primary key, content text)")
    database.execute("alter table files alter content set storage external")
    database.execute(
        "insert into files select n, repeat('x', 1000000) from generate_series(1, 40) n"
    )
    database.execute("insert into files select n, '' from generate_series(41, 2000) n")
    enable(database, "files")
    with database_snapshot(url, ["files"]) as now:
        chunks = chunks_of(now.tables["files"].source, 8_000_000)
        assert sum(chunk.bytes for chunk in chunks) > 40_000_000
        assert max(chunk.bytes for chunk in chunks) <= 8_000_000
        with ChunkReader(now.exported) as reader:
            sizes = [batch.nbytes for chunk in chunks for batch in reader.rows(chunk)]
    assert sum(sizes) > 40_000_000
    assert max(sizes) < 12_000_000


def test_a_table_that_is_being_altered_does_not_block(
    url: str, database: psycopg.Connection
) -> None:
    """The statement waits for the driver's lock. A task that waited behind it would wait for
    ever."""
    database.execute("create table items (id int primary key)")
    database.execute("insert into items values (1)")
    enable(database, "items")
    with psycopg.connect(url, autocommit=True) as other, database_snapshot(url, ["items"]) as now:
        other.pgconn.send_query(b"alter table items add column note text")
        while not database.execute(
            "select 1 from pg_locks where not granted and relation = 'items'::regclass"
        ).fetchone():
            pass
        with pytest.raises(TableLocked, match="being altered"):
            read(now, "items")
        other.cancel_safe()
        other.pgconn.get_result()
        other.pgconn.get_result()
        # The reader continues over another connection.
        assert read(now, "items") == [('{"id":1}', '{"id":1}')]


def test_timeouts_of_the_database_do_not_end_a_long_read(
    url: str, database: psycopg.Connection
) -> None:
    """Neither that of the tasks, nor the driver's transaction and what a view writes meanwhile."""
    database.execute("create table items (id int primary key)")
    database.execute("insert into items values (1)")
    database.execute("create table headwater.staged (n bigint, run text)")
    enable(database, "items")
    names = ["idle_in_transaction_session_timeout", "statement_timeout"]
    names += ["transaction_timeout"] if database.info.server_version >= 170_000 else []
    for name in names:
        own = sql.Identifier(database.info.dbname)
        setting = sql.SQL("alter database {} set {} = '100ms'").format(own, sql.SQL(name))
        database.execute(setting)
    long = "select pg_sleep(0.3)"
    with database_snapshot(url, ["items"]) as now, closing(_Writer(url)) as writer:
        writer._copy("staged", pa.table({"n": [1], RUN: ["first"]}))
        with ChunkReader(now.exported) as reader:
            list(reader.answer(long))
            list(reader.answer(long))
        with closing(ViewConnections(url)) as views, views.transaction() as view:
            view.execute(long)
        assert list(now.rows("items", 10)) == [(['{"id":1}'], ['{"id":1}'])]
        writer.commit()
        # The bound of reconcile is its own.
        with (
            ChunkReader(now.exported, statement_seconds=0.05) as bounded,
            pytest.raises(DatabaseError, match="statement timeout"),
        ):
            list(bounded.answer(long))
    assert database.execute("select n from headwater.staged").fetchall() == [(1,)]


def test_row_security_is_an_error(url: str, database: psycopg.Connection) -> None:
    """Instead of a part of the rows."""
    database.execute("create table items (id int primary key)")
    database.execute("insert into items values (1), (2)")
    enable(database, "items")
    database.execute("create policy one on items for select using (id = 1)")
    database.execute("alter table items enable row level security, force row level security")
    role = f"reader_{random.Random(url).randrange(10**9)}"
    database.execute(f"create role {role} login".encode())
    try:
        database.execute(f"grant select on items to {role}".encode())
        with database_snapshot(url, ["items"]) as now:
            chunk = chunks_of(now.tables["items"].source)[0]
            exported = now.exported
            limited = psycopg.conninfo.make_conninfo(url, user=role)
            with (
                ChunkReader(type(exported)(limited, exported.name)) as reader,
                pytest.raises(DatabaseError, match="row-level security"),
            ):
                list(reader.rows(chunk))
    finally:
        database.execute(f"drop owned by {role}; drop role {role}".encode())


@pytest.mark.parametrize("number", range(size("snapshot_tables", 3, large=100)))
def test_generated_tables(url: str, database: psycopg.Connection, number: int) -> None:
    """Random writes before, and while chunks of any size are read."""
    chance = random.Random(first_seed(5100) + number)
    database.execute(
        "create table t (id int primary key, a text, b numeric, c timestamptz, d bytea)"
    )
    enable(database, "t")

    def write() -> None:
        first = chance.randrange(2000)
        database.execute(
            chance.choice(
                [
                    "insert into t select n, repeat('y', n % 400), n / 7.0,"
                    f" to_timestamp(n), decode(md5(n::text), 'hex') from generate_series({first},"
                    f" {first + 200}) n on conflict do nothing",
                    f"update t set a = a || 'z', b = b + 1 where id > {first}",
                    f"update t set id = id + 10000 where id between {first} and {first + 5}",
                    f"delete from t where id between {first} and {first + 300}",
                    "vacuum t",
                ]
            ).encode()
        )

    for _ in range(chance.randrange(12)):
        write()
    with database_snapshot(url, ["t"]) as now:
        expected = sorted(
            row for keys, texts in now.rows("t", 100) for row in zip(keys, texts, strict=True)
        )
        database.execute("select 1")
        write()
        write()
        assert read(now, "t", chance.choice([1, 8192, 50_000, 10**9])) == expected
