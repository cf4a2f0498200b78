"""Replaying a table from its events: rebuilt, and change by change; and changes only in the log."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from headwater import Headwater
from headwater.commands.cli import app
from headwater.commands.output import change_as_json
from headwater.errors import ConfigError, PipelineError, ResyncRequired
from headwater.model import Position
from headwater.pipeline.reading import changes
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.replay import replay
from headwater.pipeline.replay.targets import ReplayRun, ReplayTarget
from tests.support.lake.tables import execute
from tests.support.lake.truth import Database, copy, fill, lake_at, opened, position, rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(900)

VALUES = {
    "smallint": ["-32768", "null"],
    "bigint": ["9223372036854775807", "null"],
    "numeric": ["'NaN'", "'-Infinity'", "1.10", "1e-30", "123456789012345678901234567890.5"],
    "numeric(8,3)": ["-12345.670"],
    "real": ["'NaN'", "0.1", "'-0'"],
    "double precision": ["'Infinity'", "5e-324", "0.1"],
    "boolean": ["true", "null"],
    "text": ["''", "E'a\\t\\n\\\\ \"quoted\" {x} é𝄞'", "null"],
    "varchar(5)": ["'abc'"],
    "character(4)": ["'a'"],
    '"char"': ["'x'"],
    "bytea": ["'\\x00ff41'", "''", "null"],
    "json": ['\'{"b" : 1,  "a":[1.10, null], "b":2}\'', "'3'"],
    "jsonb": ['\'{"b": 1.10, "a": {"x": [true, "s"]}}\'', "null"],
    "timestamptz": ["'infinity'", "'2026-11-15 10:00:00.123456+02'", "'0044-03-15 12:00+00 BC'"],
    "timestamp(3)": ["'-infinity'", "'2026-11-15 10:00:00.123'"],
    "date": ["'infinity'", "'0044-03-15 BC'", "'9999-12-31'", "'20000-01-01'"],
    "time": ["'24:00'", "'10:00:00.1'"],
    "timetz": ["'10:00+05:30'"],
    "interval": ["'1 year -2 days 03:04:05.6'", "'-1 month'"],
    "uuid": ["'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'"],
    "inet": ["'10.0.0.1/8'"],
    "money": ["'-1234.50'"],
    "bit(3)": ["B'101'"],
    "int4range": ["'[1,5)'", "'empty'"],
    "tsvector": ["'a:1 b:2'"],
    "point": ["'(1.5,2)'"],
    "public.mood": ["'happy'", "null"],
    "public.email": ["'a@b'"],
    "public.pair": ["row(1, 'x')", "row(null, null)", "null"],
    "integer[]": ["'{1,null,3}'", "'{{1,2},{3,4}}'", "'{}'", "null"],
    "text[]": ['\'{"a,b","NULL",null,""}\''],
    "numeric(5,2)[]": ["'{1.10,2.00}'"],
    "timestamptz[]": ["'{infinity,2026-01-01}'"],
    "bytea[]": ["'{\"\\\\\\\\x01ff\"}'"],
    "public.mood[]": ["'{sad,happy}'"],
    "public.pair[]": ["array[row(1,'a')::public.pair, null]"],
}

TYPES = """
    create type mood as enum ('sad', 'happy');
    create domain email as text check (value like '%@%');
    create type pair as (a int, b text);
"""


def make_everything(database: Database) -> None:
    """A table with a column of every type, and a key of two."""
    database.execute(TYPES)
    columns = [f'"Col {n}" {declared}' for n, declared in enumerate(VALUES)]
    definition = f"id int, part text, must int not null, {', '.join(columns)}"
    database.execute(f"create table everything ({definition}, primary key (part, id))".encode())
    database.execute("select headwater.enable_reactivity('everything')")


def write_everything(database: Database, ids: range) -> None:
    for number in ids:
        values = [texts[number % len(texts)] for texts in VALUES.values()]
        row = (
            f"insert into everything values ({number}, '\"{number % 3}\"', 1, {', '.join(values)})"
        )
        database.execute(row.encode())


def as_texts(database: Database, table: str) -> list[Any]:
    """The rows as the database prints them: floats and numerics show every digit."""
    return database.execute(f"select t::text from {table} t order by id, part".encode()).fetchall()


def described(database: Database, table: str) -> list[Any]:
    return database.execute(
        "select attname, format_type(atttypid, atttypmod), attnotnull from pg_attribute"
        " where attrelid = %s::regclass and attnum > 0 order by attnum",
        [table],
    ).fetchall()


class Interrupted(Exception):
    pass


def interrupt_after(chunks: int) -> replay.ProgressCallback:
    seen = []

    def progress(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == chunks:
            raise Interrupted

    return progress


def test_a_table_is_rebuilt_as_it_was(
    url: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_REPLAY_CHUNK_ROWS", 3)
    lake = lake_at(tmp_path, spark)
    with opened(url) as database:
        make_everything(database)
        write_everything(database, range(6))
        lake.snapshot(url, "everything")
        write_everything(database, range(6, 12))
        database.execute("update everything set must = 2 where id in (2, 7)")
        database.execute("delete from everything where id = 3")
        database.execute("create table copied as select * from everything")
        (then,) = database.execute("select clock_timestamp()").fetchone() or ()
        database.execute("delete from everything where id < 9")
        fill(lake, url)

        def rebuild(into: str = "restored", **more: Any) -> ReplayRun:
            return replay.rebuild(lake, url, "everything", into=into, until=then, **more)

        with pytest.raises(Interrupted):
            rebuild(progress=interrupt_after(2))
        half = as_texts(database, "restored")
        assert len(half) == 6
        with pytest.raises(ConfigError, match="that of another replay, a rebuild of everything"):
            replay.rebuild(lake, url, "everything", into="restored")
        with pytest.raises(ConfigError, match="no replay made it"):
            rebuild("copied", restart=True)
        written = dict(database.execute("select id, xmin::text from restored").fetchall())
        done: list[int] = []
        run = rebuild(progress=lambda count, total: done.append(count))
        assert (run.count, run.done, done) == (11, True, [9, 11])
        assert str(Position.parse(run.end)) == run.end
        assert as_texts(database, "restored") == as_texts(database, "copied")
        now = dict(database.execute("select id, xmin::text from restored").fetchall())
        assert written.items() <= now.items()
        assert described(database, "restored") == described(database, "everything")
        assert rebuild() == run
        progress = CliRunner().invoke(
            app,
            [
                "replay",
                "everything",
                "--until",
                str(then),
                "--into",
                "restored",
                "--json",
                "--url",
                url,
                "--lake",
                lake.root,
            ],
            catch_exceptions=False,
        )
        document = {"table": "everything", "into": "restored", "rows": 11, "position": run.end}
        assert json.loads(progress.stdout) == document
        # A second replay that began beside the first fails.
        target = ReplayTarget(database, "restored")
        with (
            pytest.raises(PipelineError, match="another replay"),
            target.step(ReplayRun("orders", "rebuild", None, None, None, "")),
        ):
            pass


# ------------------------------------------------------------------------ changes


def write(database: Database, who: str, *statements: str) -> None:
    with database.transaction():
        database.execute("select set_config('headwater.user_id', %s, true)", [who])
        database.execute("select set_config('headwater.trace_id', 't1', true)")
        for statement in statements:
            database.execute(statement.encode())


HISTORY = """
    select op, coalesce(after, before)::text, user_id, trace_id, dense_rank() over (order by xid)
    from headwater.changes where table_name = %s and seq > %s and op <> 'reset' order by seq
"""


async def tailed(url: str, table: str, since: Position) -> list[dict[str, Any]]:
    """What `headwater tail --json` prints."""
    lines: list[dict[str, Any]] = []
    async with Headwater(url) as hw:
        async for transaction in hw.changes(table, since=since):
            lines += (json.loads(change_as_json(c, transaction)) for c in transaction.changes)
            if any(change.op == "truncate" for change in transaction.changes):
                return lines
    return lines


async def test_changes_are_replayed(
    url: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = lake_at(tmp_path, spark)
    with opened(url) as database, opened(url) as other:
        database.execute("create table orders (id int primary key, amount numeric(8,2), note text)")
        database.execute("insert into orders values (1, 1, 'old')")
        database.execute("select headwater.enable_reactivity('orders')")
        beginning = position(database)
        lake.snapshot(url, "orders")
        with other.transaction():
            other.execute("insert into orders values (2, 2.50, 'early')")
            write(database, "ann", "insert into orders values (3, 3, 'x')")
            other.execute("update orders set note = 'late' where id = 2")
        middle = copy(database, "orders")
        write(
            database,
            "bob",
            "update orders set amount = amount + 1",
            "delete from orders where id = 1",
            "update orders set id = 9 where id = 3",
        )
        database.execute("alter table orders add column extra int")
        database.execute("alter table orders rename column note to remark")
        database.execute("select headwater.sync_tables()")  # as maintenance does
        write(database, "ann", "insert into orders values (4, 4, 'y', 7)")
        truth = copy(database, "orders")
        write(database, "eve", "truncate orders")
        fill(lake, url)

        # As a DataFrame, between times and between positions.
        every = [r["seq"] for r in lake.changes("orders").collect()]
        assert every == sorted(every)
        later = lake.changes("orders", since=middle.at).collect()
        assert [r["seq"] for r in later] == [
            r["seq"] for r in lake.changes("orders", since=middle.position).collect()
        ]
        assert len(lake.changes("orders", middle.at, truth.at).collect()) == len(later) - 1
        settled = lake.settle(middle.at)
        assert isinstance(settled, Position)
        assert rows_of(lake.as_of("orders", settled)) == middle.rows

        # To standard output, as `headwater tail` prints them; in two parts.
        expected = await tailed(url, "orders", beginning)
        runner, cursor = CliRunner(), str(tmp_path / "cursor")

        def emitted(*arguments: str) -> list[dict[str, Any]]:
            where = ["--url", url, "--lake", lake.root]
            done = runner.invoke(
                app, ["replay", "orders", "--emit", *arguments, *where], catch_exceptions=False
            )
            assert done.exit_code == 0, done.output
            return [json.loads(line) for line in done.stdout.splitlines()]

        printed = emitted("--since", str(beginning), "--speed", "1000x", "--cursor", cursor)
        assert _plain(printed) == _plain(expected)
        assert emitted("--since", str(beginning), "--speed", "9x", "--cursor", cursor) == []
        assert emitted("--since", printed[-1]["position"]) == []
        with pytest.raises(ConfigError, match="cursor of another replay"):
            emitted("--cursor", cursor)
        half = replay.emit(lake, "orders", since=middle.at, cursor=tmp_path / "half")
        first = [next(half), next(half)]
        half.close()
        rest = list(replay.emit(lake, "orders", since=middle.at, cursor=tmp_path / "half"))
        assert first[1].xid == rest[0].xid
        assert [c.seq for t in [first[0], *rest] for c in t.changes] == [r["seq"] for r in later]

        # Into a table, which begins with its old rows; its subscribers see the same history.
        def again(into: str, **more: Any) -> ReplayRun:
            return replay.reapply(lake, url, "orders", into=into, **more)

        monkeypatch.setattr(changes, "TRANSACTION_PART_CHANGES", 2)
        with pytest.raises(Interrupted):
            again("again", until=truth.position, progress=interrupt_after(2))
        run = again("again", until=truth.position)
        assert run.done
        assert copy(database, "again").rows == truth.rows
        with pytest.raises(ConfigError, match="that of another replay"):
            again("again")
        again("followed", since=middle.at, until=None, progress=lambda done, total: None)
        assert copy(database, "followed").rows == []
        database.execute("select headwater.enable_reactivity('followed')")
        mark = execute(url, "select max(seq) from headwater.log")[0][0]
        write(database, "dan", "insert into orders values (5, 5, null, 1), (6, 6, null, 2)")
        write(database, "ann", "update orders set extra = 3 where id = 5")
        fill(lake, url)
        assert again("followed", since=middle.at).count == 3
        original = database.execute(HISTORY, ["orders", mark]).fetchall()
        assert database.execute(HISTORY, ["followed", mark]).fetchall() == original
        database.execute("insert into followed values (7, 0, null, 0)")
        write(database, "ann", "insert into orders values (7, 7, null, 7)")
        fill(lake, url)
        with pytest.raises(PipelineError, match="not as the replay left it"):
            again("followed", since=middle.at)
        database.execute("select headwater.disable_reactivity('orders')")
        database.execute("select headwater.enable_reactivity('orders')")
        fill(lake, url)
        with pytest.raises(ResyncRequired, match=r"\(a reset\)"):
            again("followed", since=middle.at, restart=True)


def _plain(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: line[name] for name in line if name != "position"} for line in lines]


# ------------------------------------------------------------------------ the end of the log


def test_recent_changes_come_from_the_log(url: str, spark: SparkSession, tmp_path: Path) -> None:
    lake = lake_at(tmp_path, spark)
    whole = Lake(lake.root, spark, url=url)
    with opened(url) as database:
        database.execute("create table orders (id int primary key, amount int)")
        database.execute("select headwater.enable_reactivity('orders')")
        lake.snapshot(url, "orders")
        database.execute("insert into orders values (1, 1), (2, 2)")
        fill(lake, url)
        assert rows_of(whole.as_of("orders", datetime.now(UTC))) == copy(database, "orders").rows
        write(database, "ann", "update orders set amount = 5 where id = 1")
        database.execute("alter table orders add column note text")
        write(database, "bob", "insert into orders values (3, 3, 'new')")
        truth = copy(database, "orders")
        assert rows_of(whole.as_of("orders", truth.at)) == truth.rows
        assert rows_of(whole.as_of("orders", truth.position)) == truth.rows
        assert [v["user_id"] for v in whole.history("orders", 1).collect()] == [None, "ann"]
        assert len(lake.history("orders", 1).collect()) == 1
        fill(lake, url)
        assert [v["user_id"] for v in whole.history("orders", 1).collect()] == [None, "ann"]
        write(database, "eve", "delete from orders where id = 3")
        seqs = [r["seq"] for r in whole.events().collect()]
        assert len(seqs) == len(set(seqs)) == 6
    runner = CliRunner()

    def history(address: str) -> str:
        arguments = ["history", "orders", "3", "--lake", lake.root, "--url", address]
        done = runner.invoke(app, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    assert "eve" in history(url)
    assert "eve" not in history("postgresql://127.0.0.1:1/gone")
