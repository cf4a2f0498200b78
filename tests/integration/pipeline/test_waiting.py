"""A planner without changes waits for a NOTIFY of a writer, or of the gateway that polls for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psycopg
import pytest

from headwater.log.waking.waker import CHANNEL, FROM_POLLER, WAKE_LOCK
from headwater.pipeline.stream import waiting
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.planning import Planner
from headwater.pipeline.stream.waiting import WaitPace
from tests.spark.conftest import capture

LONG = 60.0


class WaitingPlanner(Planner):
    """Says when it has looked and found nothing: it waits from then on."""

    def __init__(self, url: str) -> None:
        self.pace = WaitPace()
        super().__init__(url, pace=self.pace)
        self.has_looked = threading.Event()

    def latest(self, *arguments: object) -> Offset:
        end = super().latest(*arguments)  # type: ignore[arg-type]
        self.has_looked.set()
        return end


@pytest.fixture
def writer(url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("create table orders (id int primary key)")
        capture(connection, "orders")
        yield connection


@pytest.fixture
def planner(url: str, writer: psycopg.Connection) -> Iterator[WaitingPlanner]:
    planner = WaitingPlanner(url)
    yield planner
    planner.close()


def end_while(planner: WaitingPlanner, steps: object) -> tuple[Offset, Offset]:
    """Wait for changes from now on, and do the steps meanwhile."""
    start = Offset(planner.now())
    planner.has_looked.clear()

    def work() -> None:
        assert planner.has_looked.wait(LONG)
        steps()  # type: ignore[operator]

    thread = threading.Thread(target=work)
    thread.start()
    end = planner.next(start, None, LONG)
    thread.join()
    return start, end


@pytest.fixture
def no_safety(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NOTIFY, a test waits until it is stopped."""
    monkeypatch.setattr(waiting, "_SPARK_SAFETY_LOOK_SECONDS", 10 * LONG)


def insert(writer: psycopg.Connection) -> None:
    writer.execute("insert into orders select coalesce(max(id), 0) + 1 from orders")


@pytest.mark.usefixtures("no_safety")
@pytest.mark.timeout(50)
def test_a_writer_wakes_it(planner: WaitingPlanner, writer: psycopg.Connection) -> None:
    for _ in range(3):
        start, end = end_while(planner, lambda: insert(writer))
        assert planner.has_changes(start.position, end.position)
    assert planner.pace.pause(0) > LONG


@pytest.mark.usefixtures("no_safety")
@pytest.mark.timeout(50)
def test_a_gateway_that_polls_wakes_it(
    planner: WaitingPlanner, writer: psycopg.Connection, url: str
) -> None:
    """Writers send no NOTIFY while it holds the lock."""
    with psycopg.connect(url, autocommit=True) as gateway:
        gateway.execute("select pg_advisory_lock(%s, %s)", WAKE_LOCK)

        def steps() -> None:
            insert(writer)
            gateway.execute("select pg_notify(%s, %s)", (CHANNEL, FROM_POLLER))

        start, end = end_while(planner, steps)
    assert planner.has_changes(start.position, end.position)


def test_it_looks_where_no_session_notifies(
    planner: WaitingPlanner, writer: psycopg.Connection, url: str
) -> None:
    with psycopg.connect(url, autocommit=True) as gateway:
        gateway.execute("select pg_advisory_lock(%s, %s)", WAKE_LOCK)
        start, end = end_while(planner, lambda: insert(writer))
    assert planner.has_changes(start.position, end.position)


@pytest.mark.usefixtures("no_safety")
@pytest.mark.timeout(50)
def test_a_lost_connection_is_made_again(
    planner: WaitingPlanner, writer: psycopg.Connection
) -> None:
    def steps() -> None:
        insert(writer)
        writer.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'headwater pipeline' and datname = current_database()"
        )

    for _ in range(2):
        start, end = end_while(planner, steps)
        assert planner.has_changes(start.position, end.position)


def test_it_returns_without_changes_in_time(planner: WaitingPlanner) -> None:
    start = Offset(planner.now())
    assert planner.next(start, None, 0.1) == start


@pytest.mark.usefixtures("no_safety")
@pytest.mark.timeout(50)
def test_old_notifications_do_not_pile_up(
    planner: WaitingPlanner, writer: psycopg.Connection
) -> None:
    """A stream under load never waits. Those of its last batch remain."""
    start = Offset(planner.now())
    for _ in range(3):
        for _ in range(20):
            insert(writer)
        start = planner.next(start, None, LONG)
        connection = planner._connection
        assert connection is not None
        assert len(connection._notifies_backlog or ()) <= 20
