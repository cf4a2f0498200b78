"""The oracle: random histories, and PostgreSQL's own answer after every step.

A `History` is plain data (a query and steps as numbers), so that a failure can be shrunk, printed
and stored. `play` runs one against a database: it makes the table, opens the query, and after every
flush compares three things with the database: the window's visible rows, its whole buffer (exactly
the first rows of the order), and a replica that has seen nothing but deltas.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import psycopg
from psycopg import sql

from headwater.client.state.replica import Replica, result_hash
from headwater.hub.reading.tables import FORMATS
from headwater.live.filters.sql import Sql
from headwater.live.needs import Outcome
from headwater.live.query import BoundQuery, LiveQuery
from headwater.live.state.streamed import Streamed
from headwater.live.state.window import Window
from headwater.live.statements import page, statement
from headwater.log.images import ImageDecoder
from headwater.model import Change, Column, Key, Row, Table

Connection = psycopg.Connection[Any]

_TIME = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


@dataclass(frozen=True, slots=True)
class Sample:
    """A column type with difficult values, as PostgreSQL reads them."""

    column: Column
    ddl: str
    values: tuple[str | None, ...]


def _sample(
    name: str, type: str, values: Iterable[str | None], ddl: str = "", **options: Any
) -> Sample:
    declared = ddl or type
    return Sample(Column(name, type, declared, **options), declared, tuple(values))


_WORDS = (None, "", "a", "B", "b", "ab", "a b", "é", "Z", "ß", "50%", "\uffff", "\U0001f600", "Ab")

SAMPLES: dict[str, Sample] = {
    sample.column.name: sample
    for sample in (
        _sample("i", "integer", (None, "0", "1", "2", "-1", "3")),
        _sample("big", "bigint", (None, "9007199254740993", "9007199254740992", "-5", "0")),
        _sample(
            "n", "numeric", (None, "0", "1.5", "1.50", "-1", "NaN", "Infinity", "-Infinity", "2",
            "1.50000000000000000000000000000000000001"),
        ),
        _sample("f", "double precision", (None, "0", "-0", "1.5", "NaN", "Infinity", "-1e300")),
        _sample("r", "real", (None, "0.1", "0.2", "16777217", "NaN", "-1.5")),
        _sample("b", "boolean", (None, "t", "f")),
        _sample("t", "text", _WORDS, 'text collate "C"', collation="C"),

        _sample("ch", "character", (None, "", "a", "ab", "B", "b"), 'char(3) collate "C"',
                collation="C"),
        _sample(
            "ts", "timestamp with time zone", (None, "2026-01-01 00:00:00+00", "infinity",
            "2026-01-01 02:00:00.000001+02", "-infinity", "0044-03-15 00:00:00+00 BC",
            "20000-01-01 00:00:00+00", "1999-12-31 23:59:59.5+00", "10000-01-01 00:00:00+00",
            "294276-12-31 23:59:59.999999+00", "4714-11-24 00:00:00+00 BC"),
        ),
        _sample("lts", "timestamp without time zone", (None, "2026-01-01", "infinity",
                "2026-01-01 02:00:00.000001", "0044-03-15 BC", "10000-01-01", "-infinity",
                "294276-12-31 23:59:59.999999")),
        _sample("d", "date", (None, "2026-01-01", "2026-01-02", "infinity", "0044-03-15 BC",
                "-infinity", "5874897-12-31", "10000-01-01")),
        _sample("tm", "time without time zone", (None, "00:00:00", "24:00:00", "12:30:00.5")),
        _sample("id4", "uuid", (None, "00000000-0000-0000-0000-000000000001",
                "ffffffff-ffff-ffff-ffff-ffffffffffff", "80000000-0000-0000-0000-000000000000")),
        _sample("by", "bytea", (None, r"\x", r"\x00", r"\x00ff", r"\xff", r"\x61")),
        _sample("m", "public.mood", (None, "sad", "ok", "happy"), "public.mood", enum=True),
        _sample("iv", "interval", (None, "1 day", "24:00:00", "1 mon", "-1 day")),
    )
}  # fmt: skip

ICU_SAMPLES: dict[str, Sample] = {
    sample.column.name: sample
    for sample in (
        _sample("u", "text", _WORDS, 'text collate "und-x-icu"', collation="und-x-icu"),
        _sample("ci", "text", _WORDS, 'text collate "no_case"', collation="no_case"),
        _sample("uc", "character", _WORDS, 'char(3) collate "und-x-icu"', collation="und-x-icu"),
    )
}
"""Columns that only a PostgreSQL built with ICU can have; in `no_case`, a equals A."""

ALL_SAMPLES = {**SAMPLES, **ICU_SAMPLES}

KEYS = 12
"""How many rows a history can have at once."""


@dataclass(frozen=True)
class History:
    """`columns` of SAMPLES, a live query in JSON, and flushes of transactions of operations.

    An operation is a number: its digits choose what happens to which row with which values. 0 does
    nothing, which is what a history shrinks to.
    """

    columns: tuple[str, ...]
    query: dict[str, Any]
    flushes: tuple[tuple[tuple[int, ...], ...], ...]
    rows: tuple[int, ...] = ()
    cushion: int = 2
    composite: bool = False

    def without_idle_flushes(self) -> History:
        kept = (
            tuple(tuple(filter(None, transaction)) for transaction in flush if any(transaction))
            for flush in self.flushes
        )
        return replace(self, flushes=tuple(filter(None, kept)))


# Generated numbers are mostly small; this makes all bits matter, and 0 stays 0.
_SCATTER = 0x9E3779B97F4A7C15


def operation(
    action: Literal["delete", "put", "truncate", "reset"], row: int, values: int = 0
) -> int:
    """The number of an operation, for histories written by hand."""
    digit = {"delete": 1, "put": 15, "truncate": 4, "reset": 5}[action]
    rest = 7 if action in ("truncate", "reset") else values
    return ((rest * KEYS + row) * 16 + digit) * pow(_SCATTER, -1, 2**64) % 2**64


@dataclass
class Played:
    """How much work a history was."""

    flushes: int = 0
    deltas: int = 0
    refills: int = 0
    asked: int = 0


def connect(url: str) -> Connection:
    """A connection that prints values as the log does."""
    connection: Connection = psycopg.connect(
        url,
        autocommit=True,
        prepare_threshold=None,
        options=f"{FORMATS} -c timezone=UTC -c client_min_messages=warning",
    )
    connection.execute(_TYPES)
    return connection


def ask(connection: Connection, question: Sql, decode: ImageDecoder) -> list[Row]:
    """The result of the database, printed as capture does and decoded as the reader of the log
    does."""
    text = f"select row_to_json(o.*)::text from ({question.text}) o"
    found = connection.execute(text.encode(), question.values).fetchall()
    return [decode(image) for (image,) in found]


_TYPES = """
do $$ begin
  create type public.mood as enum ('sad', 'ok', 'happy');
  if exists (select from pg_collation where collname = 'und-x-icu') then
    create collation public.no_case
      (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
  end if;
exception when duplicate_object then null;
end $$
"""


def make_table(history: History, schema: str = "pg_temp") -> Table:
    """The shape of a history's table."""
    key = ("k", "k2") if history.composite else ("k",)
    keys = [Column(name, "integer", "integer") for name in key]
    columns = [ALL_SAMPLES[name].column for name in history.columns]
    return Table(1, schema, "t", (*keys, *columns), key)


def create_table(connection: Connection, table: Table) -> None:
    """Create it as a temporary table, in place of any former one."""
    columns = ", ".join(f'"{c.name}" {c.declared}' for c in table.columns)
    connection.execute(
        f"drop table if exists pg_temp.t; create temp table t ({columns},"
        f" primary key ({', '.join(table.key)}))"
    )


_RETURNING = b" returning row_to_json(t.*)::text"


class Player:
    """A table, and the operations of a history on it as changes."""

    schema = "pg_temp"

    def __init__(self, connection: Connection, history: History) -> None:
        self._connection = connection
        self._history = history
        self.table = make_table(history, self.schema)
        self._decode = ImageDecoder(self.table)
        self.images: dict[Key, Row] = {}
        self._create()

    def _create(self) -> None:
        create_table(self._connection, self.table)

    def play(self, transactions: Sequence[Sequence[int]]) -> list[list[Change]]:
        """Run transactions, all in one round trip, and return the changes."""
        pending: list[list[tuple[str, Key, Any]]] = []
        alive = set(self.images)
        with self._connection.pipeline():
            for operations in transactions:
                self._connection.execute("begin")
                pending.append([done for number in operations for done in self._run(number, alive)])
                self._connection.execute("commit")
        return [[self._change(*done) for done in dones] for dones in pending]

    def _key(self, number: int) -> Key:
        return (number // 3, number % 3) if self._history.composite else (number,)

    def _run(self, number: int, alive: set[Key]) -> Iterator[tuple[str, Key, Any]]:
        number, action = divmod(number * _SCATTER % 2**64, 16)
        number, place = divmod(number, KEYS)
        key = self._key(place)
        if action == 0 or (action in (1, 2, 3) and key not in alive):
            return
        if action in (1, 2):
            alive.discard(key)
            yield "delete", key, None
            self._connection.execute(*self._where(f"delete from {self.schema}.t", (), key))
        elif action == 3:
            number, place = divmod(number, KEYS)
            yield from self._rekey(key, self._key(place), alive)
        elif action == 4 and number % 8 == 7:
            alive.clear()
            self._connection.execute(f"truncate {self.schema}.t".encode())
            yield "truncate", (), None
        elif action == 5 and number % 8 == 7:
            yield "reset", (), None
        elif key in alive:
            yield "update", key, self._update(key, number, whole=action > 10)
        else:
            alive.add(key)
            yield "insert", key, self._insert(key, number)

    def _rekey(self, old: Key, new: Key, alive: set[Key]) -> Iterator[tuple[str, Key, Any]]:
        if new in alive:
            return
        names = ", ".join(f"{name} = %s" for name in self.table.key)
        text, values = self._where(f"update {self.schema}.t set {names}", new, old)
        cursor = self._connection.execute(text + _RETURNING, values)
        alive.remove(old)
        alive.add(new)
        yield "delete", old, None
        yield "insert", new, cursor

    def _where(self, text: str, values: Sequence[Any], key: Key) -> tuple[bytes, Sequence[Any]]:
        condition = " and ".join(f"{name} = %s" for name in self.table.key)
        return f"{text} where {condition}".encode(), (*values, *key)

    def _values(self, number: int) -> list[str | None]:
        values = []
        for name in self._history.columns:
            pool = ALL_SAMPLES[name].values
            number, choice = divmod(number, len(pool))
            values.append(pool[choice])
        return values

    def _insert(self, key: Key, number: int) -> Any:
        places = sql.SQL(", ").join([sql.Placeholder()] * len(self.table.columns))
        table = sql.Identifier(self.schema, "t")
        text = sql.SQL("insert into {} values ({})").format(table, places).as_bytes(None)
        return self._connection.execute(text + _RETURNING, (*key, *self._values(number)))

    def _update(self, key: Key, number: int, *, whole: bool) -> Any:
        names, values = self._history.columns, self._values(number)
        if not whole:
            chosen = number % len(names)
            names, values = names[chosen : chosen + 1], values[chosen : chosen + 1]
        assignments = ", ".join(f'"{name}" = %s' for name in names)
        text, bound = self._where(f"update {self.schema}.t set {assignments}", values, key)
        return self._connection.execute(text + _RETURNING, bound)

    def _change(self, op: Any, key: Key, cursor: Any) -> Change:
        before = self.images.get(key)
        after = None if cursor is None else self._decode(cursor.fetchone()[0])
        if op == "truncate":
            self.images.clear()
        elif op == "delete":
            del self.images[key]
        elif after is not None:
            self.images[key] = after
        return Change(0, 0, _TIME, self.table, op, key, before, after)


@dataclass
class Game:
    """One history being played."""

    connection: Connection
    history: History
    player: type[Player] = Player
    played: Played = field(default_factory=Played)

    def run(self) -> Played:
        player = self.player(self.connection, self.history)
        self.decode = ImageDecoder(player.table)
        player.play([self.history.rows])
        query = BoundQuery(LiveQuery.from_json({"table": "t", **self.history.query}), player.table)
        state: Window | Streamed
        if query.mode == "maintained":
            state = Window(query, cushion=self.history.cushion)
        else:
            state = Streamed(query)
        replica = Replica()
        self._follow(state, query, replica, Outcome((), state.needs))
        self._compare(state, query, replica)
        for transactions in self.history.flushes:
            outcome = Outcome((), state.needs)
            for changes in player.play(transactions):
                if changes:
                    outcome = state.apply(changes)
                    self._fold(replica, outcome)
            self._follow(state, query, replica, Outcome((), outcome.needs))
            self._compare(state, query, replica)
            self.played.flushes += 1
        if isinstance(state, Window):
            self.played.refills += state.refills
        return self.played

    def _fold(self, replica: Replica, outcome: Outcome) -> None:
        self.played.deltas += len(outcome.deltas)
        replica.apply(outcome.deltas)

    def _follow(
        self, state: Window | Streamed, query: BoundQuery, replica: Replica, outcome: Outcome
    ) -> None:
        while outcome.needs:
            (need,) = outcome.needs
            question = statement(query, need)
            self.played.asked += 1
            outcome = state.answer(need, ask(self.connection, question, self.decode))
            self._fold(replica, outcome)

    def _compare(self, state: Window | Streamed, query: BoundQuery, replica: Replica) -> None:
        question = page(query, query.after, 1_000_000)
        true = ask(self.connection, question, self.decode)
        keyed = [(query.key_of(row), _seen(query, row)) for row in true]
        if isinstance(state, Streamed):
            assert state.members == {key for key, _ in keyed}
            assert replica.hash() == result_hash(sorted(keyed))
            return
        held = [{name: row[name] for name in query.layout.held} for row in true]
        assert repr(state.rows) == repr(held[: query.limit]), "window differs from the database"
        assert repr(state.buffer) == repr(held[: state.buffered]), "buffer is not the first rows"
        assert not state.complete or state.buffered == len(true), "complete, but rows are missing"
        assert replica.keys == [key for key, _ in keyed[: query.limit]], "replica has another order"
        assert replica.hash() == result_hash(keyed[: query.limit]), "replica has other rows"


def _seen(query: BoundQuery, row: Row) -> Row:
    return row if query.select is None else query.select(row)


def play(connection: Connection, history: History, player: type[Player] = Player) -> Played:
    """Run a history. AssertionError at the first difference; otherwise returns how much work it
    was. `player` says where changes come from."""
    try:
        return Game(connection, history, player).run()
    except AssertionError as error:
        error.add_note(f"Keep as: {history.without_idle_flushes()!r}")
        raise
