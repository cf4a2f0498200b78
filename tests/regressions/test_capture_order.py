"""Statements whose changes were once logged in the wrong order, each as the shortest test.

The check is that of tests/support/generators/histories.py: the log chains, and ends with the rows
of the table.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from tests.support.databases import fresh_database
from tests.support.generators.histories import Connection, History, Step, Wrong, play, shrink

PLAIN = "create table t (id int primary key, n int, flag bool)"
PARTS = (
    "create table t (id int, n int, flag bool, primary key (id, n)) partition by list (n);"
    " create table t_1 partition of t for values in (1);"
    " create table t_2 partition of t for values in (2)"
)


def trigger(timing: str, body: str, *, name: str = "mine", level: str = "row") -> str:
    """A trigger on t that writes once, also if its write fires it again."""
    return (
        f"create function {name}() returns trigger language plpgsql as $$ begin"
        f" if pg_trigger_depth() < 2 then {body}; end if;"
        f" return {'coalesce(new, old)' if level == 'row' else 'null'}; end $$;"
        f' create trigger "{name}" {timing} on t for each {level} execute function {name}()'
    )


def function(body: str, returns: str = "x") -> str:
    return (
        "create function f(x int) returns int language plpgsql as"
        f" $$ begin {body}; return {returns}; end $$"
    )


AFTER_NOTHING = trigger("after insert or update or delete", "perform 1")
REPLACE = "with gone as (delete from t returning *) insert into t select id, {n}, flag from gone"
MERGE = (
    "merge into t using (values (1), (2)) v (id) on t.id = v.id"
    " when matched and t.id = 1 then {one} when matched then {two}"
    " when not matched then insert (id, n) values (v.id, 1)"
)
TWO = "insert into t values (1, 1, true), (2, 2, true)"
ONLY_ONE = "update t set flag = false where flag and id <> new.id"
CLOSE = "update t set n = n + 1 where id = new.id - 1"
CHILD = "create table p (id int primary key); insert into p values (1), (2); "
REFERENCES = "references p on update cascade on delete set null"

CASES: dict[str, tuple[list[str], list[str]]] = {
    # One statement's own parts.
    "delete and insert": ([PLAIN, AFTER_NOTHING, TWO], [REPLACE.format(n="n + 1")]),
    "delete and insert of the same": ([PLAIN, AFTER_NOTHING, TWO], [REPLACE.format(n="n")]),
    "delete and insert without a trigger": ([PLAIN, TWO], [REPLACE.format(n="n") + " limit 1"]),
    "delete and insert in partitions": ([PARTS, TWO], [REPLACE.format(n="n")]),
    "merge": (
        [PLAIN, AFTER_NOTHING, TWO],
        [MERGE.format(one="delete", two="update set id = 1")],
    ),
    "an upsert that moves a key": (
        [PLAIN, AFTER_NOTHING, TWO],
        ["insert into t values (1, 5), (3, 5), (1, 6) on conflict (id) do update set id = 9"],
    ),
    "a merge that moves rows between partitions": (
        [PARTS, TWO],
        [
            "merge into t using (values (1)) v (id) on t.id = v.id"
            " when matched then update set n = 2"
        ],
    ),
    "a merge that inserts and updates in partitions": (
        [PARTS, TWO],
        [
            "merge into t using (values (3), (2), (4), (1)) v (id) on t.id = v.id"
            " when matched then update set flag = false"
            " when not matched then insert (id, n) values (v.id, 1)"
        ],
    ),
    # Triggers and functions that write to the table.
    "only one default, before": (
        [PLAIN, trigger("before insert or update", ONLY_ONE), TWO],
        ["insert into t values (3, 1, true), (4, 1, true), (5, 1, true)"],
    ),
    "only one default, after": (
        [PLAIN, trigger("after insert", ONLY_ONE), TWO],
        ["insert into t values (3, 1, true), (4, 1, true), (5, 1, true)"],
    ),
    "close the previous version": (
        [PLAIN, trigger("before insert", CLOSE)],
        ["insert into t values (1, 1), (2, 1), (3, 1), (4, 1)"],
    ),
    "a trigger deletes the old row before": (
        [PLAIN, trigger("before insert", "delete from t where id = new.id"), TWO],
        ["insert into t values (1, 1, true), (2, 7, true)"],
    ),
    "a trigger deletes the new row after": (
        [PLAIN, trigger("after insert", "delete from t where id = new.id"), TWO],
        ["insert into t values (3, 1, true), (4, 7, true)"],
    ),
    "a trigger takes the update back": (
        [PLAIN, trigger("after update", "update t set n = old.n where id = old.id"), TWO],
        ["update t set n = n + 1"],
    ),
    "a trigger whose writes are undone": (
        [
            PLAIN,
            trigger(
                "after insert",
                "begin update t set n = 9; raise exception ''; exception when others then"
                " update t set flag = false; end",
            ),
            TWO,
        ],
        ["insert into t values (3, 1, true), (4, 1, true)"],
    ),
    "a statement trigger whose name comes first": (
        [PLAIN, trigger("after insert", "update t set n = n + 1", name="a", level="statement")],
        [TWO],
    ),
    "a function in the statement": (
        [PLAIN, function("update t set n = n + 1 where id = x - 1"), TWO],
        ["insert into t select f(x), 1 from generate_series(3, 6) x", "update t set n = f(id)"],
    ),
    "a function in a default": (
        [
            PLAIN,
            function("insert into t values (x, x) on conflict (id) do update set n = t.n + 1"),
            "alter table t alter n set default f(7)",
        ],
        ["insert into t (id) values (1), (2), (3)"],
    ),
    "a function that nests": (
        [
            PLAIN,
            function("if x < 6 then insert into t values (x + 1, f(x + 1)); end if"),
        ],
        ["insert into t values (1, f(1))"],
    ),
    # Rows that one statement touches twice.
    "two foreign keys move the row": (
        [
            CHILD + f"create table t (id int primary key, a int {REFERENCES}, b int {REFERENCES})",
            "insert into t values (7, 1, 1), (8, 1, 2), (9, 2, 2)",
        ],
        ["update p set id = id + 10", "delete from p"],
    ),
    "the key itself is moved by a cascade": (
        [
            CHILD + f"create table t (a int {REFERENCES}, b int {REFERENCES}, n int,"
            " primary key (a, b))",
            "insert into t values (1, 1, 1), (1, 2, 1), (2, 2, 1)",
        ],
        ["update p set id = 3 - id where id = 1 and false", "update p set id = id + 10"],
    ),
    "images that look the same": (
        ["create table t (id int primary key, l int[], f float8)",
         "insert into t values (1, '{1,2}', 0)"],
        ["update t set l = '[0:1]={1,2}'", "update t set f = '-0'"],
    ),
    # Keys that are equal and look different.
    "numeric keys": (
        [
            "create table t (id numeric primary key, n int)",
            trigger("after insert", "update t set id = 1.00 where id = new.id"),
        ],
        ["insert into t values (1.0, 1)", "with gone as (delete from t returning *)"
         " insert into t select 1.000, n from gone"],
    ),
    "partitions whose columns stand in another order": (
        [
            "create table t (id int, n int, g int generated always as (id * 2) stored, flag bool,"
            " primary key (id, n)) partition by list (n)",
            "create table t_1 (flag bool, g int generated always as (id * 2) stored,"
            " n int not null, id int not null)",
            "alter table t attach partition t_1 for values in (1)",
            "create table t_2 partition of t for values in (2)",
        ],
        ["insert into t values (1, 1), (2, 2)", "insert into t_1 (id, n) values (3, 1)",
         "update t set n = 3 - n", "update t_1 set flag = true", "delete from t"],
    ),
}  # fmt: skip


@pytest.fixture(params=["postgres_url", "icu_postgres_url"], ids=["embedded", "system"])
def writer(request: pytest.FixtureRequest) -> Iterator[Connection]:
    with (
        fresh_database(request.getfixturevalue(request.param), installed=True) as url,
        psycopg.connect(url, autocommit=True, prepare_threshold=None) as connection,
    ):
        yield connection


def history(setup: list[str], statements: list[str]) -> History:
    return History(0, setup, ["t"], [Step("begin", "begin"), *map(Step, statements)])


WITH_RESET = {"a merge that moves rows between partitions"}


def test_stories(writer: Connection) -> None:
    """All in one database: making one for each takes longer than the statements."""
    wrong: dict[str, str] = {}
    for name, (setup, statements) in CASES.items():
        try:
            counts = play(writer, history(setup, statements))
        except (Wrong, psycopg.Error) as error:
            wrong[name] = str(error)
            continue
        if counts["statements"] != len(statements) or counts["refused"]:
            wrong[name] = f"not all ran: {counts}"
        if (counts["resets"] > 0) != (name in WITH_RESET):
            wrong[name] = f"resets: {counts['resets']}"
    assert wrong == {}


GARBAGE = ["x", " I:1", " I:1:99 U:2:3! D:0@1.1:5", ":::"]


def test_settings_are_not_trusted(writer: Connection) -> None:
    """For any value that a user puts into the settings of capture."""
    setup, statements = CASES["only one default, before"]
    for value in GARBAGE:
        spoil = (
            "do $$ begin perform set_config(format('headwater.%s_%s', name, 't'::regclass::oid),"
            f" '{value}', false) from unnest(array['open', 'row', 'noted']) name; end $$"
        )
        steps = [Step(spoil, "ddl"), *history([], statements).steps, Step(spoil)]
        steps += [Step("insert into t values (8, 1), (9, 2)"), Step("update t set n = 3 - n")]
        assert play(writer, History(0, setup, ["t"], steps))["refused"] == 0
        steps[2:3] = []
        assert play(writer, History(0, [PARTS, TWO], ["t"], steps))["refused"] == 0


def test_a_failing_history_is_shrunk(writer: Connection) -> None:
    """A log that was damaged does not chain, and the shrunk history has only the damage."""
    steps = [Step("begin", "begin"), Step(TWO), Step("update t set n = 7"), Step("delete from t")]
    spoil = Step("delete from headwater.log")
    spoiled = History(0, [PLAIN], ["t"], [*steps, Step(TWO), spoil, Step("update t set n = 8")])
    with pytest.raises(Wrong, match="ends in"):
        play(writer, spoiled)
    assert len(shrink(writer, spoiled).steps) <= 3


def test_many_rows_with_a_trigger_each(writer: Connection) -> None:
    """Linear, or this would take minutes."""
    setup = [PLAIN, trigger("after insert", "update t set n = n + 1 where id = new.id")]
    statement = "insert into t select i, 0 from generate_series(1, 3000) i"
    counts = play(writer, history(setup, [statement]))
    assert counts == {"statements": 1}


# What makes rows repeat within a statement, and came after the table was enabled.
LATER: dict[str, tuple[list[str], list[str], list[str]]] = {
    "foreign keys": (
        [CHILD + "create table t (id int primary key, a int, b int)", TWO.replace("true", "2")],
        [f"alter table t add foreign key ({column}) {REFERENCES}" for column in "ab"],
        ["insert into t values (3, 1, 1)", "update p set id = id + 10", "delete from p"],
    ),
    "an inheritance child": (
        [PLAIN, TWO],
        ["create table c () inherits (t)"],
        [
            "insert into c values (3, 1), (4, 1)",
            "update t set n = n + 1",
            "update t set id = id + 2",
        ],
    ),
}


@pytest.mark.parametrize("name", LATER)
def test_rows_that_can_repeat_since_a_later_ddl(writer: Connection, name: str) -> None:
    setup, later, statements = LATER[name]
    sync = "select headwater.sync_tables()"
    steps = [Step(sql, "ddl") for sql in (*later, sync)]
    for statement in statements:
        steps += [Step("begin", "begin"), Step(statement), Step("commit", "commit")]
    counts = play(writer, History(0, setup, ["t"], steps))
    assert counts == {"statements": len(statements)}


NEW_PARTITION = [
    "select headwater.enable_reactivity('t')",
    "create table t_3 partition of t for values in (3)",
]
BESIDE_ITS_PARENT = [
    "insert into t values (3, 3), (4, 3), (5, 3), (1, 1)",
    "with gone as (delete from t_3 where id = 3) update t set flag = true where id = 1",
    "with gone as (delete from t where id = 1) update t_3 set flag = true where id = 4",
    "with new as (insert into t_3 values (6, 3)) delete from t where id = 4",
    "with new as (insert into t_3 values (7, 3)) insert into t values (8, 3)",
]


def test_a_new_partition_beside_its_parent_in_a_statement(writer: Connection) -> None:
    """A row of it is written through the parent or directly, and its trigger cannot see which."""
    steps = [Step(sql, "ddl") for sql in NEW_PARTITION]
    for statement in BESIDE_ITS_PARENT:
        steps += [Step("begin", "begin"), Step(statement), Step("commit", "commit")]
    counts = play(writer, History(0, [PARTS], ["t"], steps))
    assert (counts["statements"], counts["refused"]) == (len(BESIDE_ITS_PARENT), 0)


def test_many_rows_in_a_new_partition(writer: Connection) -> None:
    """Through its parent: more than are noted one by one end in a reset."""
    resets = {}
    for rows in (20, 3_000):
        steps = [Step(sql, "ddl") for sql in NEW_PARTITION]
        insert = f"insert into t select i, 3 from generate_series(1, {rows}) i"
        steps += [Step("begin", "begin"), Step(insert), Step("update t set flag = true")]
        resets[rows] = play(writer, History(0, [PARTS], ["t"], steps))["resets"]
    assert resets == {20: 0, 3_000: 2}


LOOKS_THE_SAME = ("update t set l = '[0:1]={1,2}'", "update t set f = '-0'")
VALUES = "id int primary key, l int[], f float8"
SAME: dict[str, list[str]] = {
    "a row that may be touched twice": [f"{CHILD} create table t ({VALUES}, p int {REFERENCES})"],
    "a partition that is new": [
        f"create table t ({VALUES}) partition by range (id)",
        "select headwater.enable_reactivity('t')",
        "create table t_1 partition of t for values from (0) to (10)",
    ],
}


@pytest.mark.parametrize("name", SAME)
def test_updates_whose_images_look_the_same_are_logged(writer: Connection, name: str) -> None:
    for statement in SAME[name]:
        writer.execute(statement.encode())
    writer.execute("select headwater.enable_reactivity('t')")
    target = "t_1" if "t_1" in SAME[name][-1] else "t"
    if target == "t_1":  # as long as it has no function of its own
        writer.execute(
            "delete from headwater.captures where member = 't_1'::regclass;"
            " alter table t_1 disable trigger user; alter table t_1 enable trigger headwater_row"
        )
    writer.execute(f"insert into {target} values (1, '{{1,2}}', 0)".encode())
    for statement in LOOKS_THE_SAME:
        writer.execute(statement.replace("update t", f"update {target}").encode())
    writer.execute(f"update {target} set f = f".encode())
    found = writer.execute("select op::text from headwater.log where op <> 'R' order by seq")
    assert [op for (op,) in found] == ["I", "U", "U"]
