"""Random schemas, triggers and statements for capture, from a seed, and the check of their log.

A history is a list of SQL steps; everything random is decided when it is made, so a step can be
left out and the rest played again. The database judges: after every step the log of the
transaction, folded onto what the table held before it, chains (each change's `before` is its key's
last `after`) and ends in what the table holds now.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import psycopg

Connection = psycopg.Connection[tuple[Any, ...]]

COLUMNS = ("id", "grp", "n", "flag", "ref", "ref2")
PARTITIONED, INHERITED, PLAIN = "partitioned", "inherited", "plain"
ACTIONS = ("cascade", "set null", "set default", "restrict", "no action")
KEY_TYPES = ("int", "int", "int", "int", "numeric", "float8", "text")

# What a writer can do about the settings that capture orders changes by: set, remove, save and set
# again, also with a value that was carried out of a statement that failed. `k` is what it chose.
FORGE = """
create function forge(how text, tab regclass, prefix text, k text) returns void
language plpgsql as $f$
declare
  mark constant text := concat('headwater.', prefix, '_', tab::oid);
begin
  if how = 'save' then
    perform set_config('mine.' || prefix || k, coalesce(current_setting(mark, true), ''), false);
  elsif how = 'restore' then
    perform set_config(mark, coalesce(current_setting('mine.' || prefix || k, true), ''), true);
  elsif how = 'clear' then
    perform set_config(mark, '', true);
  elsif how = 'junk' then
    perform set_config(mark, replace(replace(k, '<oid>', tab::oid::text), '<time>',
      (extract(epoch from now()) * 1e6)::bigint::text), true);
  elsif how = 'guess' then -- the number that the log stands at
    perform set_config(mark, coalesce(pg_sequence_last_value('headwater.log_seq'), 0)::text, true);
  else
    begin
      if how = 'insert' then
        execute format('insert into %s (id, n) values (carried(%L)::int, 1)', tab, mark);
      elsif how = 'update' then
        execute format('update %s set n = carried(%L)::int', tab, mark);
      else
        execute format('delete from %s where carried(%L) is null', tab, mark);
      end if;
    exception when raise_exception then
      perform set_config('mine.' || prefix || k, sqlerrm, false);
    when others then
      null;
    end;
  end if;
end $f$;
create function carried(mark text) returns text language plpgsql volatile as $f$
begin raise exception '%', current_setting(mark, true); end $f$
"""
JUNK = (
    " I:<oid>", " U:<oid>", " D:<oid>", " I:<oid>:1", " U:<oid>:9999999", " I:<oid> U:<oid>",
    " I:<oid>@1.<time>", " U:<oid>@1.<time> I:<oid>@2.<time>", " D:<oid>@1.<time>:1!",
    "!", " !", "B12 A13", "x",
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One statement, or a word: begin, commit, rollback, savepoint, undo (to the savepoint)."""

    sql: str
    kind: str = "statement"  # statement, ddl, copy, or one of the words


@dataclass
class History:
    seed: int
    setup: list[str] = field(default_factory=list)
    captured: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def is_inherited(self) -> bool:
        return any("inherits (t)" in sql for sql in self.setup)


class Maker:
    """Makes a history. Keys and values are few, so that everything meets everything."""

    def __init__(self, seed: int, length: int, *, forging: bool) -> None:
        self.random = random.Random(seed)
        self.history = History(seed)
        self.forging = forging
        self.shape = self.random.choice((PARTITIONED, INHERITED, PLAIN, PLAIN))
        self.key_type = self.random.choice(KEY_TYPES) if self.shape == PLAIN else "int"
        self.relations = ["t"]
        self.names = 0
        self.functions: list[str] = []
        self._schema()
        self._fill()
        for _ in range(length):
            self._transaction()

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def pick(self, *choices: str) -> str:
        return self.random.choice(choices)

    def name(self, prefix: str = "x") -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    # ------------------------------------------------------------------ the schema

    def _schema(self) -> None:
        add = self.history.setup.append
        add("create type mood as enum ('sad', 'happy')")
        add("create type pair as (a int, j json)")
        add("create table p (id int primary key, n int)")
        key = "primary key (id, grp)" if self.shape == PARTITIONED else "primary key (id)"
        add(
            f"create table t (id {self.key_type} not null, grp int not null default 1, n int,"
            " flag bool default false, ref int, ref2 int, m mood default 'sad', f float8, l int[],"
            f" c pair, g int generated always as (n * 2) stored, {key})"
            + (" partition by list (grp)" if self.shape == PARTITIONED else "")
        )
        if self.shape == PARTITIONED:
            add("create table t_1 partition of t for values in (1)")
            add("create table t_2 partition of t for values in (2) partition by list (id)")
            add("create table t_2_1 partition of t_2 for values in (1, 2, 3)")
            add("create table t_2_2 partition of t_2 default")
            add(  # its columns in another order
                "create table t_3 (c pair, l int[], flag bool,"
                " g int generated always as (n * 2) stored, n int, id int not null,"
                " grp int not null, ref2 int, ref int, m mood, f float8)"
            )
            add("alter table t attach partition t_3 for values in (3)")
            self.relations += ["t_1", "t_2", "t_2_1", "t_3"]
        if self.shape == INHERITED:
            # Keys are not unique across children. Rows with one key cannot be distinguished, so the
            # player takes a statement back that leaves such rows.
            add("create table t_1 (more int, primary key (id)) inherits (t)")
            self.relations += ["t_1"]
        add("create table u (id int primary key, n int, tid int, flag bool default false)")
        for column in ("ref", "ref2"):
            if self.chance(0.5):
                add(self._foreign_key(column))
        if self.shape == PLAIN and self.key_type == "int" and self.chance(0.4):
            add("alter table t add up int" + self._references("t"))
        if self.shape == PLAIN and self.key_type == "int" and self.chance(0.4):
            add("alter table u add foreign key (tid)" + self._references("t"))
        if self.forging:
            add(FORGE)
        for _ in range(self.random.choice((0, 0, 1, 2))):
            add(self._function())
        if self.functions and self.chance(0.3):
            add(f"alter table t alter n set default {self.pick(*self.functions)}(1)")
        for _ in range(self.random.choice((0, 1, 1, 2, 3))):
            add(self._trigger())
        self.history.captured = ["t", "u", "p"]

    def _references(self, table: str) -> str:
        return (
            f" references {table} on delete {self.pick(*ACTIONS)} on update {self.pick(*ACTIONS)}"
        )

    def _foreign_key(self, column: str) -> str:
        return f"alter table t add foreign key ({column})" + self._references("p")

    def _action(self, depth_limit: bool = True) -> str:
        """A statement inside a trigger or a function; `k` is a key, `v` a number."""
        table = self.pick("t", "t", "t", "u", "p")
        conflict = "(id, grp)" if table == "t" and self.shape == PARTITIONED else "(id)"
        near = self.pick("k", "k", "k", "k + 1", str(self.random.randint(1, 6)))
        if table == "t":
            near = f"({near})::{self.key_type}"
        statement = self.pick(
            f"update {table} set n = v where id = {near}",
            f"update {table} set n = coalesce(n, 0) + 1 where id = {near}",
            f"update {table} set n = coalesce(n, 0) + 1",
            f"delete from {table} where id = {near}",
            f"insert into {table} (id, n) values ({near}, v) on conflict do nothing",
            f"insert into {table} (id, n) values ({near}, v)"
            f" on conflict {conflict} do update set n = coalesce({table}.n, 0) + 1",
            f"update {table} set id = (k + 3)::{self.key_type if table == 't' else 'int'}"
            f" where id = {near}",
            "update t set flag = false where flag",
            f"update t set flag = false where flag and id <> {near if table == 't' else '3'}",
            f"delete from {table} where id = {near};"
            f" insert into {table} (id, n) values ({near}, v)",
        )
        if self.chance(0.25):
            fault = "raise exception 'undone';" if self.chance(0.5) else ""
            statement = f"begin {statement}; {fault} exception when others then null; end"
        if self.forging and self.chance(0.7):
            statement = self._forged(statement, table)
        return statement

    def _forge(self, how: str, table: str, prefix: str = "open", k: str = "1") -> str:
        return f"perform forge('{how}', '{table}', '{prefix}', '{k}')"

    def _forged(self, statement: str, table: str) -> str:
        """A statement, or more, with forging before and after it, as in a function of plpgsql."""
        forge, carry = self._forge, self.pick("insert", "update", "delete")
        return "; ".join(
            self.random.choice(
                (
                    lambda: [
                        forge("save", table), forge("clear", table), statement,
                        forge("restore", table),
                    ],
                    lambda: [
                        forge("clear", table), statement, forge("clear", table),
                        forge(carry, table), forge("restore", table),
                    ],
                    lambda: [statement, forge(carry, table), forge("restore", table)],
                    lambda: [forge("restore", table), statement, forge("restore", table)],
                    lambda: [self._any_forging(table), statement, self._any_forging(table)],
                    lambda: [
                        *(self._any_forging(table) for _ in range(self.random.randint(0, 3))),
                        statement,
                        *(self._any_forging(table) for _ in range(self.random.randint(0, 3))),
                    ],
                )
            )()
        )  # fmt: skip

    def _any_forging(self, table: str) -> str:
        how = self.pick(
            "save", "save", "restore", "restore", "clear", "junk", "guess",
            "insert", "update", "delete",
        )  # fmt: skip
        prefix = self.pick("open", "open", "noted", "row")
        return self._forge(how, table, prefix, self.pick(*(JUNK if how == "junk" else "112")))

    def _function(self) -> str:
        name = self.name("f")
        self.functions.append(name)
        return (
            f"create function {name}(k int) returns int language plpgsql volatile as $$"
            f" declare v int := {self.random.randint(0, 3)};"
            f" begin if pg_trigger_depth() < 2 then {self._action()}; end if;"
            " return v; end $$"
        )

    def _trigger(self) -> str:
        table = self.pick("t", "t", "t", "t", "u", "p")
        name = self.pick("a", "headwater0", "headwater_z", "Headwater", "z") + self.name("_")
        timing = self.pick("before", "after", "after")
        row = self.chance(0.75)
        events = self.random.sample(("insert", "update", "delete"), self.random.randint(1, 3))
        body = f"{self._action()};"
        if row and timing == "before":
            body = self.pick(
                body, body, body, "new.n := coalesce(new.n, 0) + 1;",
                "if v = 2 then return null; end if;",
            )  # fmt: skip
        if row and self.chance(0.4):
            body = f"if {self.pick('v > 1', 'k < 4', 'k = 2')} then {body} end if;"
        if "new." in body:
            body = f"if tg_op <> 'DELETE' then {body} end if;"
        values = (
            "k := (case when tg_op = 'DELETE' then old.id else new.id end)::int;"
            " v := coalesce(case when tg_op = 'DELETE' then old.n else new.n end, 0) % 4;"
            if row
            else f"k := {self.random.randint(1, 6)}; v := {self.random.randint(0, 3)};"
        )
        function = self.name("trigger_")
        return (
            f"create function {function}() returns trigger language plpgsql as $$"
            f" declare k int; v int; begin {values}"
            f" if pg_trigger_depth() < {self.random.randint(2, 4)} then {body} end if;"
            f" return {'case when tg_op = $q$DELETE$q$ then old else new end' if row else 'null'};"
            f" end $$;"
            f' create trigger "{name}" {timing} {" or ".join(events)} on {table}'
            f" for each {'row' if row else 'statement'} execute function {function}()"
        )

    # ------------------------------------------------------------------ statements

    def _fill(self) -> None:
        add = self.history.setup.append
        add("/* may fail */ insert into p select i, i from generate_series(1, 4) i")
        for _ in range(self.random.randint(0, 4)):
            add(f"/* may fail */ insert into t (id, grp, n, flag, ref) values {self._row()}")
        add("/* may fail */ insert into u values (1, 1), (2, 2)")

    def _transaction(self) -> None:
        add = self.history.steps.append
        if self.chance(0.12):
            add(Step(self._ddl(), "ddl"))
        level = self.pick(*["read committed"] * 6, "repeatable read", "serializable")
        add(Step(f"begin isolation level {level}", "begin"))
        for _ in range(self.random.choice((1, 1, 2, 3))):
            if self.chance(0.15):
                add(Step("savepoint s", "savepoint"))
                add(self._step())
                if self.chance(0.5):
                    add(Step("rollback to s", "undo"))
            else:
                add(self._step())
        add(Step("rollback", "rollback") if self.chance(0.1) else Step("commit", "commit"))

    def _ddl(self) -> str:
        choices: list[Callable[[], str]] = [self._trigger, self._trigger]
        choices.append(lambda: self._foreign_key(self.pick("ref", "ref2")))
        if self.shape == PARTITIONED:
            number = self.name("t_9")
            value = 2 + self.names
            if self.chance(0.7):
                self.relations.append(number)
            choices.append(
                lambda: f"create table {number} partition of t for values in ({value % 2 + 4})"
            )
        return self.random.choice(choices)()

    def _step(self) -> Step:
        if self.forging and self.chance(0.3):
            return Step(self._forging_step())
        if self.chance(0.06):
            rows = "".join(f"{self._key()}\t{self._grp()}\t{self._n()}\n" for _ in range(3))
            return Step(rows, "copy")
        if self.chance(0.04):
            return Step(
                self.pick("truncate t cascade", "truncate p cascade", "truncate u",
                          f"truncate {self.pick(*self.relations[:4])} cascade")
            )  # fmt: skip
        return Step(self.random.choice((self._plain, self._plain, self._with, self._merge))())

    def _forging_step(self) -> str:
        """At top level, or in a DO block around statements."""
        if self.chance(0.3):
            return self._any_forging("t").replace("perform", "select")
        parts = []
        for _ in range(self.random.randint(1, 3)):
            table = self._target()
            root = table if table in ("u", "p") else "t"
            parts.append(self._forged(self._modify(table), root))
        return f"do $$ begin {'; '.join(parts)}; end $$"

    def _key(self) -> str:
        number = self.random.randint(1, 6)
        if self.shape == INHERITED and self.chance(0.2):
            number += 100
        if self.key_type == "numeric":
            return f"{number}{self.pick('', '.0', '.00')}"
        if self.key_type == "float8" and self.chance(0.3):
            return self.pick("0", "'-0'::float8")
        return f"'{number}'" if self.key_type == "text" else str(number)

    def _grp(self) -> str:
        return self.pick("1", "1", "2", "2", "3", "4", "5") if self.shape == PARTITIONED else "1"

    def _n(self) -> str:
        return str(self.random.randint(0, 4))

    def _value(self) -> str:
        if self.functions and self.chance(0.3):
            return f"{self.pick(*self.functions)}({self.random.randint(1, 6)})"
        return self._n()

    def _row(self) -> str:
        ref = self.pick("null", "1", "2", "3")
        return (
            f"({self._key()}, {self._grp()}, {self._value()}, {self.pick('true', 'false')}, {ref})"
        )

    def _pair(self) -> str:
        return f"({self.random.randint(1, 6)}, {self._value()})"

    def _target(self) -> str:
        return self.pick(*["t"] * 4, *self.relations, "u", "p")

    def _where(self, table: str) -> str:
        key = self._key() if table not in ("u", "p") else str(self.random.randint(1, 6))
        return self.pick(
            f"id = {key}", f"id = {key}", f"id in ({key}, 2)", "true", "n % 2 = 0", f"id > {key}"
        )  # fmt: skip

    def _insert(self, table: str, *, conflict: bool = True) -> str:
        if table in ("u", "p"):
            columns, row = "id, n", self._pair
        else:
            columns, row = "id, grp, n, flag, ref", self._row
        rows = ", ".join(row() for _ in range(self.random.choice((1, 1, 2, 4))))
        statement = f"insert into {table} ({columns}) values {rows}"
        target = "(id, grp)" if self.shape == PARTITIONED and table not in ("u", "p") else "(id)"
        other = str(self.random.randint(1, 9))
        if not conflict or self.chance(0.4):
            return statement
        return statement + " on conflict " + self.pick(
            "do nothing",
            f"{target} do update set n = excluded.n",
            f"{target} do update set n = coalesce({table}.n, 0) + 1",
            f"{target} do update set id = {other}, n = 9",
        )  # fmt: skip

    def _update(self, table: str) -> str:
        where = self._where(table)
        if table in ("u", "p"):
            change = self.pick(f"n = {self._value()}", "n = n + 1", "id = id")
        else:
            change = self.pick(
                f"n = {self._value()}", "n = n + 1", "flag = not flag", "flag = true",
                f"id = {self._key()}", f"grp = {self._grp()}", "ref = 2, ref2 = 2", "m = 'happy'",
                "l = case when l is null then '{1,2}' else '[0:1]={1,2}'::int[] end",
                "f = case when f is null then 0 else -f end",
                """c = row(1, case when (c).j is null then 'null'::json end)::pair""",
                "n = n",
            )  # fmt: skip
        if change == "id = id" or (self.key_type != "text" and self.chance(0.15)):
            change = self.pick("id = id + 1", "id = id - 1", "id = 7 - id")
        return f"update {table} set {change} where {where}"

    def _modify(self, table: str) -> str:
        return self.random.choice(
            (
                lambda: self._insert(table),
                lambda: self._insert(table),
                lambda: self._update(table),
                lambda: self._update(table),
                lambda: f"delete from {table} where {self._where(table)}",
            )
        )()

    def _plain(self) -> str:
        table = self._target()
        if self.functions and self.chance(0.2) and table not in ("u", "p"):
            f = self.pick(*self.functions)
            return (
                f"insert into t (id, n) select x::{self.key_type}, {f}(x)"
                f" from generate_series({self.random.randint(1, 4)}, 6) x on conflict do nothing"
            )
        return self._modify(table)

    def _with(self) -> str:
        if self.chance(0.5):
            change = self.pick("n", "coalesce(n, 0) + 1", "n + 1")
            key = self.pick("id", "id", "id", self._key())
            return (
                f"with gone as (delete from t where {self._where('t')} returning *)"
                f" insert into t (id, grp, n, ref) select {key}, grp, {change}, ref from gone"
                + self.pick("", " limit 1", " on conflict do nothing")
            )
        parts = [self._modify(self._target()) for _ in range(self.random.randint(1, 2))]
        head = ", ".join(f"w{i} as ({part} returning id)" for i, part in enumerate(parts))
        return f"with {head} {self._modify(self._target())}"

    def _merge(self) -> str:
        keys = ", ".join(f"({self._key()})" for _ in range(self.random.randint(1, 4)))
        clauses = [
            f"when matched and {self.pick('t.n > 1', 't.n = 0', 'true')} then "
            + self.pick(
                "delete", "update set n = coalesce(t.n, 0) + 1", f"update set id = {self._key()}"
            ),
            f"when matched then {self.pick('delete', 'update set n = 5', 'do nothing')}",
            f"when not matched then insert (id, grp, n) values (v.id, {self._grp()}, {self._n()})",
        ]
        if self.chance(0.3):
            clauses.append(
                f"when not matched then insert (id, grp, n) values (v.id, {self._grp()}, 1)"
            )
            clauses.pop(0)
        source = f"(select distinct v::{self.key_type} as id from (values {keys}) x (v))"
        return f"merge into t using {source} v on t.id = v.id {' '.join(clauses)}"


def make(seed: int, length: int, *, forging: bool = False) -> History:
    """With `forging`, the writer also sets what capture orders changes by."""
    return Maker(seed, length, forging=forging).history


# ---------------------------------------------------------------------- playing and judging


class Wrong(AssertionError):
    """The log does not chain, or does not end in the table's state."""


Rows = dict[Any, str]
Change = tuple[str, str | None, str | None]


@dataclass
class Reset:
    """A reset in a transaction: what its statement had left in the log, and in the table."""

    changes: list[Change]
    rows: Rows


class Player:
    """Plays a history in a schema of its own and judges after each step."""

    def __init__(self, connection: Connection, history: History) -> None:
        self.connection = connection
        self.history = history
        self.counts: Counter[str] = Counter()
        self.before: dict[str, Rows] = {}
        self.resets: dict[str, list[Reset]] = {}
        self.keys: dict[str, list[str]] = {}

    def play(self) -> Counter[str]:
        try:
            self.start()
            for step in self.history.steps:
                self.step(step)
        finally:
            self.finish()
        return self.counts

    def start(self) -> None:
        run = self.connection.execute
        for sql in ("create schema h", "set search_path = h", "set timezone = 'UTC'"):
            run(sql.encode())
        for sql in self.history.setup:
            try:
                run(sql.encode())
            except psycopg.Error:
                if not sql.startswith("/* may fail"):
                    raise
        for table in self.history.captured:
            run("select headwater.enable_reactivity(%s)", (table,))
            found = run("select headwater.describe(%s::regclass) -> 'key'", (table,)).fetchone()
            assert found is not None
            self.keys[table] = found[0]
        self.remember()

    def finish(self) -> None:
        for sql in (
            "rollback",
            "drop schema h cascade",
            "select headwater.sync_tables()",
            "truncate headwater.log",
        ):
            self.connection.execute(sql.encode())

    def step(self, step: Step) -> None:
        run = self.connection.execute
        if step.kind in ("begin", "savepoint"):
            if step.kind == "begin":
                self.remember()
            run(step.sql.encode())
            return
        if step.kind in ("commit", "rollback", "undo"):
            try:
                run(step.sql.encode())
            except psycopg.Error:  # deferred checks; a savepoint that was never made
                run("rollback")
            if step.kind == "undo":
                self.forget_undone()
            return
        if step.kind == "ddl":
            try:
                run(step.sql.encode())
            except psycopg.Error:
                self.counts["refused"] += 1
            self.remember()
            return
        run("savepoint judged")
        try:
            self._execute(step)
            if self.shares_keys():
                run("rollback to judged")
                return
            self.counts["statements"] += 1
        except psycopg.Error as error:
            if "function headwater." in str(error) and error.sqlstate != "40001":
                raise  # a write must never fail for us
            run("rollback to judged")
            self.counts["refused"] += 1
        self.judge(step)

    def shares_keys(self) -> bool:
        """Whether rows of inheritance children have the same key."""
        if not self.history.is_inherited:
            return False
        found = self.connection.execute("select from t group by id having count(*) > 1")
        return found.fetchone() is not None

    def _execute(self, step: Step) -> None:
        if step.kind != "copy":
            self.connection.execute(step.sql.encode())
            return
        with self.connection.cursor().copy("copy t (id, grp, n) from stdin") as copy:
            copy.write(step.sql.replace("'", "").replace("::float8", ""))

    def remember(self) -> None:
        self.before = {table: self.content(table) for table in self.history.captured}
        self.resets = {table: [] for table in self.history.captured}

    def forget_undone(self) -> None:
        logged = self.logged()
        for table, resets in self.resets.items():
            size = len(logged.get(table, []))
            resets[:] = [reset for reset in resets if len(reset.changes) <= size]

    def key_of(self, table: str, image: str) -> Any:
        row = json.loads(image, parse_float=Decimal)
        return tuple(row[name] for name in self.keys[table])

    def content(self, table: str) -> Rows:
        found = self.connection.execute(f"select row_to_json(x)::text from {table} x".encode())
        return {self.key_of(table, image): image for (image,) in found}

    def judge(self, step: Step) -> None:
        logged = self.logged()
        for table in self.history.captured:
            if folded := self.fold(table, logged.get(table, []), self.content(table)):
                raise Wrong(f"{folded}\nof {table} after: {step.sql}")

    def fold(self, table: str, changes: list[Change], now: Rows) -> str:
        """What is wrong with the log of this transaction; nothing if it is right.

        After a reset readers read the table again. So the statement that has one ends in what the
        table holds, and what follows chains from there.
        """
        resets = self.resets[table]
        if count_resets(changes) > (count_resets(resets[-1].changes) if resets else 0):
            self.counts["resets"] += 1
            resets.append(Reset(changes, now))
            return ""
        rows, done = dict(self.before[table]), 0
        if resets:
            rows, done = dict(resets[-1].rows), len(resets[-1].changes)
            if changes[:done] != resets[-1].changes:
                self.counts["unjudged"] += 1
                return ""
        story: list[str] = []
        for op, before, after in changes[done:]:
            story.append(f"{op} {before} -> {after}")
            if op == "T":
                rows = {}
                continue
            key = self.key_of(table, after or before or "")
            if rows.get(key) != before:
                return f"does not chain: {key} is {rows.get(key)}\n" + "\n".join(story)
            if after is None:
                del rows[key]
            else:
                rows[key] = after
        if rows != now:
            return f"ends in {rows}\nnot in {now}\n" + "\n".join(story)
        return ""

    def logged(self) -> dict[str, list[Change]]:
        """What this transaction has logged, by table."""
        found = self.connection.execute(
            "select s.table_name, l.op::text, l.before::text, l.after::text from headwater.log l"
            " cross join lateral"
            " (select table_name from headwater.shapes where id = l.shape limit 1) s"
            " where l.xid = pg_current_xact_id_if_assigned() order by l.seq"
        )
        changes: dict[str, list[Change]] = {}
        for table, *change in found:
            changes.setdefault(table, []).append((change[0], change[1], change[2]))
        return changes


def count_resets(changes: list[Change]) -> int:
    return sum(op == "R" for op, _, _ in changes)


def play(connection: Connection, history: History) -> Counter[str]:
    return Player(connection, history).play()


def shrink(connection: Connection, history: History) -> History:
    """The history without the steps and parts of the schema that it fails without."""

    def fails(candidate: History) -> bool:
        try:
            play(connection, candidate)
        except Wrong:
            return True
        except psycopg.Error:
            return False
        return False

    best = history
    for attribute in ("steps", "setup", "steps", "setup"):
        size = max(1, len(getattr(best, attribute)) // 2)
        while size:
            place = 0
            while place < len(getattr(best, attribute)):
                parts = getattr(best, attribute)
                candidate = History(best.seed, list(best.setup), best.captured, list(best.steps))
                setattr(candidate, attribute, parts[:place] + parts[place + size :])
                if fails(candidate):
                    best = candidate
                else:
                    place += size
            size //= 2
    return best
