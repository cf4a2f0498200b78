"""Batches of the log against a real PostgreSQL, without Spark: nothing missing, nothing doubled,
the changes of a row in their order, a batch always the same."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from headwater.capture.postgres import schema
from headwater.database import connect
from headwater.errors import ConfigError, DatabaseError, NotInstalled, ResyncRequired
from headwater.model import Position
from headwater.pipeline.stream import planning, worker
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.planning import Planner
from headwater.pipeline.stream.worker import read
from tests.spark.conftest import capture
from tests.support.databases import fresh_database

Change = dict[str, Any]

_planners: list[Planner] = []


def planner_of(url: str, *tables: str, patience: float = 5.0) -> Planner:
    _planners.append(Planner(url, tables, patience=patience))
    return _planners[-1]


@pytest.fixture(autouse=True)
def connections_are_closed() -> Iterator[None]:
    yield
    while _planners:
        _planners.pop().close()
    for url, owner in list(worker._connections):
        worker.forget(url, owner)


def rows_of(planner: Planner, start: Offset, end: Offset, **times: Any) -> list[Change]:
    parts = planner.parts(start, end, **times)
    return [row for part in parts for batch in read(part) for row in batch.to_pylist()]


class Stream:
    """Takes batches as Spark does, and remembers them."""

    def __init__(self, url: str, *tables: str) -> None:
        self.url, self.tables = url, tables
        self.planner = planner_of(url, *tables)
        self.at = Offset(self.planner.beginning())
        self.batches: list[tuple[Offset, Offset, list[Change]]] = []

    @property
    def rows(self) -> list[Change]:
        return [row for *_, rows in self.batches for row in rows]

    def take(self, rows_max: int | None = None) -> bool:
        end = self.planner.latest(self.at, rows_max)
        if end == self.at:
            return False
        rows = rows_of(self.planner, self.at, end)
        assert rows_max is None or len(rows) <= rows_max
        self.batches.append((self.at, end, rows))
        self.at = end
        return True

    def take_all(self, rows_max: int | None = None) -> list[Change]:
        while self.take(rows_max):
            pass
        return self.rows

    def restart(self) -> None:
        self.planner.close()
        self.planner = planner_of(self.url, *self.tables)
        self.at = Offset.from_dict(json.loads(json.dumps(self.at.to_dict())))

    def check_replay(self) -> None:
        for start, end, rows in self.batches:
            assert rows_of(self.planner, start, end) == rows


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.pipeline.stream.planning._SPARK_PART_CHANGES", 3)


class Writers:
    """Sessions whose transactions overlap, one step at a time."""

    def __init__(self, url: str, sessions: list[psycopg.Connection], seed: int) -> None:
        self.sessions = sessions
        self.random = random.Random(seed)

    def step(self) -> None:
        session = self.random.choice(self.sessions)
        match self.random.randrange(8):
            case 0 | 1:
                session.commit()
            case 2:
                session.rollback()
            case 3 | 4:
                numbers = [
                    self.random.randrange(10_000) for _ in range(self.random.randrange(1, 5))
                ]
                session.execute(
                    "insert into orders select n, 0 from unnest(%s::int[]) n"
                    " where not exists (select from orders where id = n) on conflict do nothing",
                    ([n * len(self.sessions) + self.sessions.index(session) for n in numbers],),
                )
            case 5 | 6:
                session.execute(
                    "update orders set amount = amount + 1 where id in"
                    " (select id from orders where id < 8 for update skip locked)"
                )
            case 7:
                session.execute(
                    "delete from orders where id in"
                    " (select id from orders where id > 8 limit 2 for update skip locked)"
                )


@pytest.mark.parametrize("seed", range(6))
def test_overlapping_writers(
    url: str, orders: psycopg.Connection, small_parts: None, seed: int
) -> None:
    orders.execute("insert into orders select n, 0 from generate_series(0, 7) n")
    stream = Stream(url)
    with ExitStack() as stack:
        sessions = [stack.enter_context(psycopg.connect(url)) for _ in range(4)]
        left_open = stack.enter_context(psycopg.connect(url))
        left_open.execute("insert into orders values (-1, 0)")
        writers = Writers(url, sessions, seed)
        for _ in range(150):
            writers.step()
            if writers.random.random() < 0.15:
                stream.take(writers.random.choice([1, 2, 3, 7, None]))
            if writers.random.random() < 0.1:
                stream.restart()
        for session in sessions:
            session.commit()
        stream.take_all(writers.random.choice([1, 4, None]))
        assert {"id": -1, "amount": 0} not in [json.loads(r["after"] or "0") for r in stream.rows]
        left_open.commit()
        assert [row["key"] for row in stream.take_all()[-1:]] == ['{"id":-1}']
    written = orders.execute("select seq from headwater.log order by seq").fetchall()
    assert sorted(row["seq"] for row in stream.rows) == [seq for (seq,) in written]
    by_key, times = defaultdict(list), defaultdict(set)
    for row in stream.rows:
        by_key[row["key"]].append(row["seq"])
        times[row["xid"]].add(row["committed_at"])
    assert all(seqs == sorted(seqs) for seqs in by_key.values())
    assert all(len(each) == 1 for each in times.values())
    stream.restart()
    stream.check_replay()


def test_a_gap_in_the_numbers_is_crossed_at_once(
    url: str, orders: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.pipeline.stream.planning._SPARK_PARTS_MAX", 5)
    orders.execute("insert into orders values (1, 1)")
    orders.execute("select setval('headwater.log_seq', 1000000000)")
    orders.execute("insert into orders values (2, 1), (3, 1)")
    stream = Stream(url)
    assert [row["key"] for row in stream.take_all(1)] == ['{"id":1}', '{"id":2}', '{"id":3}']
    assert len(stream.batches) == 3
    assert len(stream.planner.parts(Offset(stream.planner.beginning()), stream.at)) <= 5


def test_the_row_of_a_change(url: str, orders: psycopg.Connection) -> None:
    stream = Stream(url)
    with orders.transaction():
        orders.execute("set local headwater.user_id = 'ann'")
        orders.execute("insert into orders values (1, 5)")
    orders.execute("update orders set id = 2")
    orders.execute("update orders set amount = 6")
    orders.execute("truncate orders")
    orders.execute(
        "insert into headwater.log (op, shape) select 'R', shape from headwater.log limit 1"
    )
    found = [(row["op"], row["key"], row["user_id"]) for row in stream.take_all()]
    assert found == [
        ("insert", '{"id":1}', "ann"),
        ("delete", '{"id":1}', None),
        ("insert", '{"id":2}', None),
        ("update", '{"id":2}', None),
        ("truncate", None, None),
        ("reset", None, None),
    ]
    first, update = stream.rows[0], stream.rows[3]
    assert (first["schema_name"], first["table_name"]) == ("public", "orders")
    assert first["position"] == str(stream.at.position)
    assert json.loads(update["before"]) == {"id": 2, "amount": 5}
    assert json.loads(update["after"]) == {"id": 2, "amount": 6}


def test_a_key_of_several_columns_and_odd_names(url: str, orders: psycopg.Connection) -> None:
    orders.execute('create table lines (b int, "a ""b" text, n int, primary key ("a ""b", b))')
    capture(orders, "lines")
    orders.execute("insert into lines values (1, 'x ''\"é', 0)")
    (row,) = Stream(url, "lines").take_all()
    assert json.loads(row["key"]) == {'a "b': "x '\"é", "b": 1}
    assert row["key"].startswith('{"a \\"b":')


def test_only_some_tables(url: str, orders: psycopg.Connection) -> None:
    """The time of a transaction does not depend on which of its changes are wanted."""
    orders.execute("create table lines (id int primary key)")
    capture(orders, "lines")
    with orders.transaction():
        orders.execute("insert into lines values (1)")
        orders.execute("insert into orders values (1, 1)")
    everything = Stream(url).take_all()
    lines = Stream(url, "public.lines").take_all(1)
    assert [row["table_name"] for row in everything] == ["lines", "orders"]
    assert [(row["table_name"], row["committed_at"]) for row in lines] == [
        ("lines", everything[0]["committed_at"])
    ]
    with pytest.raises(ConfigError, match="nothing was never captured"):
        Stream(url, "nothing").take_all()


@pytest.mark.parametrize("tracked", [True, False])
def test_a_transaction_cut_apart_has_one_time(
    url: str,
    orders: psycopg.Connection,
    small_parts: None,
    monkeypatch: pytest.MonkeyPatch,
    tracked: bool,
) -> None:
    """That of its commit if the server keeps it (the embedded one does), else of its last
    change."""
    monkeypatch.setattr(Planner, "has_commit_times", lambda _: tracked)
    orders.execute("insert into orders select n, 0 from generate_series(1, 20) n")
    rows = Stream(url).take_all(7)
    assert len(rows) == 20
    committed = orders.execute(
        "select pg_xact_commit_timestamp(xid::xid) from headwater.log limit 1"
    ).fetchone()
    assert committed is not None
    assert {row["committed_at"] for row in rows} == {committed[0] if tracked else rows[-1]["at"]}


@pytest.mark.parametrize("looks", [0, 1_000])
@pytest.mark.parametrize("tracked", [True, False])
def test_many_transactions_have_their_times(
    url: str,
    orders: psycopg.Connection,
    small_parts: None,
    monkeypatch: pytest.MonkeyPatch,
    looks: int,
    tracked: bool,
) -> None:
    """Looked up one by one or all together, also for a transaction with others in between."""
    monkeypatch.setattr("headwater.pipeline.stream.worker._SPARK_LOOKS_MAX", looks)
    monkeypatch.setattr(Planner, "has_commit_times", lambda _: tracked)
    with psycopg.connect(url) as other:
        for number in range(20):
            orders.execute("insert into orders values (%s, 0)", (number,))
            if number % 4 == 0:
                other.execute("insert into orders values (%s, 0)", (number + 100,))
    truth = orders.execute(
        "select distinct on (xid) xid::text::bigint, at, pg_xact_commit_timestamp(xid::xid)"
        " from headwater.log order by xid, seq desc"
    ).fetchall()
    rows = Stream(url).take_all(7)
    assert len(rows) == 25
    found = {(row["xid"], row["committed_at"]) for row in rows}
    assert found == {(xid, commit if tracked else at) for xid, at, commit in truth}


def test_a_range_of_time(url: str, orders: psycopg.Connection) -> None:
    for number in range(4):
        orders.execute("insert into orders values (%s, 0)", (number,))
    stream = Stream(url)
    rows = stream.take_all()
    since, until = rows[1]["committed_at"], rows[3]["committed_at"]
    start = Offset(stream.planner.before(since))
    found = rows_of(stream.planner, start, stream.at, not_before=since, before=until)
    assert [row["key"] for row in found] == ['{"id":1}', '{"id":2}']
    later = stream.planner.before(datetime(9999, 1, 1, tzinfo=UTC))
    assert later.xmin >= stream.at.position.xmax


def test_a_time_before_what_is_still_running(url: str, orders: psycopg.Connection) -> None:
    """It wrote after that time, has the lowest id, and is not in the log yet."""
    stream = Stream(url)
    moment = datetime.now(UTC)
    with psycopg.connect(url) as running:
        running.execute("insert into orders values (1, 1)")
        orders.execute("insert into orders values (2, 1)")
        stream.at = Offset(stream.planner.before(moment))
    assert [row["key"] for row in stream.take_all()] == ['{"id":1}', '{"id":2}']


# ---------------------------------------------------------------------------- what is gone


def trim(connection: psycopg.Connection) -> None:
    """As if the retention were over."""
    connection.execute(
        "update headwater.log set at = at - interval '40 days',"
        " slot = headwater.slot_at(at - interval '40 days')"
    )
    assert connection.execute("select headwater.trim_log()").fetchone() != (0,)


def test_trimmed_past_a_position(url: str, orders: psycopg.Connection) -> None:
    stream = Stream(url)
    orders.execute("insert into orders values (1, 1), (2, 1)")
    cut = stream.planner.latest(stream.at, 1)
    trim(orders)
    orders.execute("insert into orders values (3, 1)")
    for start in (stream.at, cut):
        with pytest.raises(ResyncRequired, match="trimmed past position") as error:
            stream.planner.latest(start, 1)
        assert "since=beginning" in str(error.value.hint)
    with pytest.raises(ResyncRequired, match="does not reach back"):
        stream.planner.before(datetime(2020, 1, 1, tzinfo=UTC))
    stream.at = Offset(stream.planner.beginning())
    assert [row["key"] for row in stream.take_all()] == ['{"id":3}']


def test_trimmed_between_planning_and_reading(url: str, orders: psycopg.Connection) -> None:
    stream = Stream(url)
    orders.execute("insert into orders values (1, 1)")
    end = stream.planner.latest(stream.at, None)
    (part,) = stream.planner.parts(stream.at, end)
    trim(orders)
    with pytest.raises(ResyncRequired, match="trimmed past position"):
        list(read(part))
    with pytest.raises(ResyncRequired, match="trimmed past position"):
        stream.planner.parts(stream.at, end)


def test_another_database(url: str, server_url: str, orders: psycopg.Connection) -> None:
    with fresh_database(server_url, installed=True) as elsewhere:
        position = planner_of(elsewhere).now()
        with pytest.raises(ResyncRequired, match="another log"):
            planner_of(url).latest(Offset(position), None)


def test_a_position_ahead(url: str, orders: psycopg.Connection) -> None:
    planner = planner_of(url)
    ahead = planner.now().xmax + 1_000
    with pytest.raises(ResyncRequired, match="ahead of the database"):
        planner.latest(Offset(Position(planner.now().log, ahead, ahead)), None)


# ---------------------------------------------------------------------------- connections


def end_sessions(connection: psycopg.Connection) -> None:
    connection.execute(
        "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
        " where application_name = 'headwater pipeline' and datname = current_database()"
    )


def test_lost_connections_are_opened_again(url: str, orders: psycopg.Connection) -> None:
    stream = Stream(url)
    for number in range(2):
        orders.execute("insert into orders values (%s, 1)", (number,))
        stream.take()
        end_sessions(orders)
    assert len(stream.take_all()) == 2


@pytest.fixture
def closed_to_others(url: str, server_url: str) -> Iterator[str]:
    yield url
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"alter database {name_of(url)} allow_connections true".encode())


def name_of(url: str) -> str:
    return url.split("?")[0].rsplit("/", 1)[1]


def test_a_lost_database_is_an_error_after_a_while(closed_to_others: str, server_url: str) -> None:
    planner = planner_of(closed_to_others, patience=0.5)
    planner.now()
    with psycopg.connect(server_url, autocommit=True) as connection:
        name = name_of(closed_to_others)
        connection.execute(f"alter database {name} allow_connections false".encode())
        connection.execute(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity where datname = %s",
            (name,),
        )
    with pytest.raises(DatabaseError, match="not currently accepting connections"):
        planner.now()


def test_an_unknown_database_is_an_error_at_once(empty_url: str) -> None:
    with pytest.raises(NotInstalled):
        planner_of(empty_url).now()
    with pytest.raises(DatabaseError, match="cannot reach"):
        planner_of("postgresql://localhost:1/nowhere").now()


async def test_a_schema_of_a_release_without_capture_from_the_wal(empty_url: str) -> None:
    async with await connect(empty_url, purpose="test") as connection:
        await schema.install(connection, upto=22)
        planner = planner_of(empty_url)
        assert not planner.has_origins()
        assert planner.now().covers(planner.beginning())


# ------------------------------------------------------------------------ large rows


def test_batches_and_parts_are_bounded_in_bytes(
    orders: psycopg.Connection, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the rows compress well in the database."""
    orders.execute("create table papers (id int primary key, note text)")
    capture(orders, "papers")
    stream, rows = Stream(url), planning._SPARK_SAMPLED_CHANGES + 10
    orders.execute(f"insert into papers select i, 'x' from generate_series(1, {rows}) i")
    small = stream.planner.latest(stream.at, 50_000)
    assert small.until is None
    assert len(stream.planner.parts(stream.at, small)) == 1
    monkeypatch.setattr(planning, "_SPARK_PART_CHANGES", 10_000)
    bytes_each = 20 * planning._SPARK_ROW_BYTES
    orders.execute(f"update papers set note = repeat('x', {bytes_each})")
    start, batches = small, []
    while (end := stream.planner.latest(start, 10_000)) != start:
        batches.append(rows_of(stream.planner, start, end))
        start = end
    assert [len(batch) for batch in batches] == [500, 500, rows - 1000]
    parts = stream.planner.parts(small, Offset(stream.planner.now()))
    assert len(parts) == 3
