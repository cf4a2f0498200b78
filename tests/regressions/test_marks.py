"""Marks of capture that the writer forged: they cause at most a reset, never a wrong log.

The generator is tests/support/generators/histories.py with `forging`; these are its shortest
histories.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from tests.support.databases import fresh_database
from tests.support.generators.histories import FORGE, Connection, History, Step, play

PLAIN = "create table t (id int primary key, n int)"
PARTS = (
    "create table t (id int, n int, primary key (id, n)) partition by list (n);"
    " create table t_1 partition of t for values in (1)"
)
NEW_PARTITION = "create table t_2 partition of t for values in (2)"


def forge(how: str, prefix: str = "open", k: str = "1") -> str:
    return f"perform forge('{how}', 't', '{prefix}', '{k}')"


def trigger(*body: str) -> str:
    """A trigger of the writer's own that runs once, after a row was inserted."""
    return (
        "create function mine() returns trigger language plpgsql as $$ begin"
        f" if pg_trigger_depth() < 2 then {'; '.join(body)}; end if; return null; end $$;"
        " create trigger mine after insert on t for each row execute function mine()"
    )


UPDATE = "update t set n = n + 1 where id = new.id"
INSERT = Step("insert into t values (1, 1)")

# The setup, statements after the table was enabled, and the steps of one transaction.
CASES: dict[str, tuple[list[str], list[str], list[Step]]] = {
    "hidden and set again": (
        [PLAIN, FORGE, trigger(forge("save"), forge("clear"), UPDATE, forge("restore"))],
        [],
        [INSERT],
    ),
    "carried out of a statement that failed": (
        [PLAIN, FORGE, trigger(forge("clear"), UPDATE, forge("insert"), forge("restore"))],
        [],
        [INSERT],
    ),
    "what looks like an entry": (
        [PLAIN, FORGE, trigger(UPDATE, forge("junk", k=" I:<oid>"))],
        [],
        [INSERT],
    ),
    "a row of a new partition": (
        [PARTS, FORGE],
        [NEW_PARTITION],
        [
            Step(
                f"do $$ begin {forge('junk', k=' I:<oid>@1.<time>')};"
                f" insert into t_2 values (1, 2); {forge('clear', 'noted')}; end $$"
            )
        ],
    ),
}


@pytest.fixture(params=["postgres_url", "icu_postgres_url"], ids=["embedded", "system"])
def writer(request: pytest.FixtureRequest) -> Iterator[Connection]:
    with (
        fresh_database(request.getfixturevalue(request.param), installed=True) as url,
        psycopg.connect(url, autocommit=True, prepare_threshold=None) as connection,
    ):
        yield connection


@pytest.mark.parametrize("name", CASES)
def test_a_forged_mark_causes_at_most_a_reset(writer: Connection, name: str) -> None:
    setup, ddl, steps = CASES[name]
    before = [*(Step(sql, "ddl") for sql in ddl), Step("begin", "begin")]
    counts = play(writer, History(0, setup, ["t"], [*before, *steps, Step("commit", "commit")]))
    assert counts["statements"] == len(steps)


def test_a_writer_cannot_use_the_sequence_of_marks(writer: Connection) -> None:
    writer.execute("create table t (id int primary key)")
    writer.execute("select headwater.enable_reactivity('t')")
    (oid,) = writer.execute("select 't'::regclass::oid").fetchone() or ()
    writer.execute("create role forger")
    try:
        writer.execute("grant insert on t to forger")
        writer.execute("set role forger")
        writer.execute("insert into t values (1)")
        for call in ("setval('{}', 5)", "nextval('{}')", "currval('{}')"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                writer.execute(f"select {call.format(f'headwater.mark_{oid}')}".encode())
    finally:
        writer.execute("reset role")
        writer.execute("drop owned by forger")
        writer.execute("drop role forger")
