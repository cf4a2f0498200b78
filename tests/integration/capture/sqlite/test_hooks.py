"""The changes of one apsw connection: what is delivered, and what is not."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import apsw
import pytest

from headwater import ConfigError, SqliteChange, SqliteHooks


@pytest.fixture
def db(tmp_path: Path) -> Iterator[apsw.Connection]:
    connection = apsw.Connection(str(tmp_path / "shop.db"))
    connection.execute(
        "create table orders (id integer primary key, name text unique);"
        "create table lines (a, b, primary key (b, a)) without rowid;"
    )
    yield connection
    connection.close()


class Received:
    """Transactions, as (table, operation, values before, values after)."""

    def __init__(self, db: apsw.Connection) -> None:
        self.transactions: list[list[tuple[Any, ...]]] = []
        self.hooks = SqliteHooks(db)
        self.hooks.on_commit(self.receive)

    def receive(self, changes: Sequence[SqliteChange]) -> None:
        self.transactions.append(
            [(c.table, c.op, _values(c.before), _values(c.after)) for c in changes]
        )

    def take(self) -> list[list[tuple[Any, ...]]]:
        found, self.transactions = self.transactions, []
        return found


def _values(row: dict[str, Any] | None) -> tuple[Any, ...] | None:
    return None if row is None else tuple(row.values())


@pytest.fixture
def received(db: apsw.Connection) -> Received:
    return Received(db)


INSERT = ("orders", "insert", None, (1, "a"))


def execute(db: apsw.Connection, *statements: str) -> None:
    for statement in statements:
        db.execute(statement)


def test_a_transaction_is_delivered_after_its_commit(
    db: apsw.Connection, received: Received
) -> None:
    seen: list[bool] = []
    received.hooks.on_commit(lambda changes: seen.append(db.in_transaction))
    execute(db, "begin", "insert into orders values (1, 'a')", "insert into lines values (1, 2)")
    assert received.take() == []
    execute(db, "commit")
    assert received.take() == [[INSERT, ("lines", "insert", None, (1, 2))]]
    assert seen == [False]


def test_every_operation(db: apsw.Connection, received: Received) -> None:
    for statement, changes in [
        ("insert into orders values (1, 'a')", [INSERT]),
        ("update orders set id = 2", [("orders", "update", (1, "a"), (2, "a"))]),
        (
            "replace into orders values (3, 'a')",
            [("orders", "delete", (2, "a"), None), ("orders", "insert", None, (3, "a"))],
        ),
        (
            "insert into orders values (3, 'b') on conflict do update set name = 'c'",
            [("orders", "update", (3, "a"), (3, "c"))],
        ),
        ("insert into lines values (1, 2)", [("lines", "insert", None, (1, 2))]),
        ("update lines set b = 3", [("lines", "update", (1, 2), (1, 3))]),
        ("delete from lines", [("lines", "delete", (1, 3), None)]),
        ("delete from orders", [("orders", "delete", (3, "c"), None)]),
    ]:
        execute(db, statement)
        assert received.take() == [changes], statement
    assert received.take() == []


def test_names_and_keys(db: apsw.Connection) -> None:
    found: list[SqliteChange] = []
    SqliteHooks(db).on_commit(found.extend)
    execute(db, "insert into lines values (1, 2)", "alter table lines rename a to c")
    execute(db, "begin", "update lines set c = 9", "alter table lines rename c to d", "commit")
    assert found == [
        SqliteChange("main", "lines", "insert", None, {"a": 1, "b": 2}, ("b", "a")),
        SqliteChange("main", "lines", "update", {"c": 1, "b": 2}, {"c": 9, "b": 2}, ("b", "c")),
    ]


@pytest.mark.parametrize(
    ("statements", "changes"),
    [
        (["insert into orders values (1, 'a')", "rollback"], None),
        (["savepoint s", "insert into orders values (1, 'a')", "rollback to s", "commit"], None),
        (["insert into orders values (1, 'a')", "savepoint s", "delete from orders",
          "rollback /* c */ transaction to savepoint \"S\";", "commit"], [INSERT]),
        (["insert into orders values (1, 'a')", "savepoint s", "savepoint s",
          "delete from orders", "-- c\n release s", "rollback to s", "commit"], [INSERT]),
        (["insert into orders values (1, 'a')",
          "insert into orders values (2, 'b'), (3, 'a')", "commit"], [INSERT]),
        (["insert into orders values (1, 'a')",
          "insert or fail into orders values (2, 'b'), (3, 'a')", "commit"],
         [INSERT, ("orders", "insert", None, (2, "b"))]),
        (["insert into orders values (1, 'a')",
          "insert or rollback into orders values (2, 'b'), (3, 'a')"], None),
        (["insert into orders values (1, 'a')",
          "insert or ignore into orders values (1, 'x')", "commit"], [INSERT]),
    ],
)  # fmt: skip
def test_what_is_undone_is_not_delivered(
    db: apsw.Connection,
    received: Received,
    statements: list[str],
    changes: list[tuple[Any, ...]] | None,
) -> None:
    execute(db, "begin")
    for statement in statements:
        try:
            db.execute(statement)
        except apsw.ConstraintError:
            continue
    assert received.take() == ([] if changes is None else [changes])


def test_a_failed_statement_whose_triggers_wrote(db: apsw.Connection, received: Received) -> None:
    execute(
        db,
        "create trigger t after insert on orders begin"
        " insert into lines values (new.id, new.name); end",
        "begin",
        "insert into orders values (1, 'a')",
    )
    with pytest.raises(apsw.ConstraintError):
        execute(db, "insert into orders values (2, 'b'), (1, 'c')")
    execute(db, "commit")
    assert received.take() == [[INSERT, ("lines", "insert", None, (1, "a"))]]


def test_a_view_with_a_trigger(db: apsw.Connection, received: Received) -> None:
    """The statement itself changes nothing; what its trigger wrote stays."""
    execute(
        db,
        "create view v as select id from orders",
        "create trigger t instead of insert on v begin"
        " insert into orders values (new.id, 'a'); end",
        "begin",
        "insert into v values (1)",
        "commit",
    )
    assert received.take() == [[INSERT]]


def test_a_commit_that_fails(db: apsw.Connection, received: Received) -> None:
    execute(
        db,
        "pragma foreign_keys = on",
        "create table child (id int references orders (id) deferrable initially deferred)",
        "begin",
        "insert into child values (1)",
    )
    with pytest.raises(apsw.ConstraintError):
        execute(db, "commit")
    assert received.take() == []
    execute(db, "insert into orders values (1, 'a')", "commit")
    assert received.take() == [[("child", "insert", None, (1,)), INSERT]]


def test_another_connection_is_in_the_way(
    db: apsw.Connection, received: Received, tmp_path: Path
) -> None:
    reader = apsw.Connection(str(tmp_path / "shop.db"))
    cursor = reader.execute("select * from sqlite_schema")
    execute(db, "begin", "insert into orders values (1, 'a')")
    with pytest.raises(apsw.BusyError):
        execute(db, "commit")
    assert received.take() == []
    cursor.close()
    reader.close()
    execute(db, "commit")
    assert received.take() == [[INSERT]]


def test_an_attached_database(db: apsw.Connection, tmp_path: Path) -> None:
    found: list[SqliteChange] = []
    SqliteHooks(db).on_commit(found.extend)
    db.execute("attach ? as other", (str(tmp_path / "other.db"),))
    execute(db, "create table other.orders (x)", "insert into other.orders values (5)")
    assert found == [SqliteChange("other", "orders", "insert", None, {"x": 5})]


def test_all_rows_are_deleted_by_a_prepared_statement(db: apsw.Connection) -> None:
    """SQLite deletes all rows at once, without hooks, if nothing asks for them when the statement
    is prepared."""
    execute(db, "delete from orders", "insert into orders values (1, 'a')")
    received = Received(db)
    execute(db, "delete from orders")
    assert received.take() == [[("orders", "delete", (1, "a"), None)]]


def test_rows_that_are_not_fetched(db: apsw.Connection, received: Received) -> None:
    cursor = db.execute("insert into orders values (1, 'a'), (2, 'b') returning id")
    next(cursor)
    cursor.close()
    received.hooks.flush()
    assert received.take() == [[INSERT, ("orders", "insert", None, (2, "b"))]]


def test_virtual_generated_columns_cannot_be_read(db: apsw.Connection, received: Received) -> None:
    execute(
        db, "create table g (id integer primary key, v as (id + 1))", "insert into g values (1)"
    )
    assert received.take() == [[("g", "insert", None, None)]]


def test_a_function_that_writes_and_one_that_fails(
    db: apsw.Connection, received: Received, caplog: pytest.LogCaptureFixture
) -> None:
    def write(changes: Sequence[SqliteChange]) -> None:
        if changes[0].table == "orders":
            db.execute("insert into lines values (1, 2)")
        raise RuntimeError("no")

    received.hooks.on_commit(write)
    execute(db, "insert into orders values (1, 'a')")
    assert received.take() == [[INSERT], [("lines", "insert", None, (1, 2))]]
    assert "failed" in caplog.text


def test_several_hooks_and_their_end(db: apsw.Connection, received: Received) -> None:
    with SqliteHooks(db) as hooks:
        other: list[SqliteChange] = []
        hooks.on_commit(other.extend)
        execute(db, "insert into orders values (1, 'a')")
    execute(db, "insert into orders values (2, 'b')")
    assert len(received.take()) == 2
    assert len(other) == 1


def test_bad_connections(db: apsw.Connection) -> None:
    with pytest.raises(ConfigError, match=r"apsw\.Connection, not Connection"):
        SqliteHooks(sqlite3.connect(":memory:"))  # type: ignore[arg-type]
    execute(db, "begin")
    with pytest.raises(ConfigError, match="open transaction"):
        SqliteHooks(db)
