"""Random tables over all types, random rows, and random statements of interleaved connections,
from a seed. The database itself decides which statements succeed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pymysql

from headwater.capture.mysql.connection import quoted

Literal = Callable[[random.Random], str]

_TEXTS = ["", "a", "A ", " b", "Zoë", "ß", "日本語", "🦊", "it''s", "a\\\\b", "x\\0y", "\\n", "ÿ"]
_LATIN = ["", "a", "B ", "é", "ÿ", "€", "it''s", "x\\0y"]
_JSON = [
    "{}", "[]", "null", "true", "1.50", "1e400", '"x"', '{"a": {"b": [1, null]}}', '"\\\\u0000"',
    '"\\\\ud83e\\\\udd8a"', '"\\\\ud800"', '["a\\tb"]', '{"é": "\\\\\\\\u0000"}', "[1, 2.0, -3e-7]",
]  # fmt: skip


def _integers(low: int, high: int) -> Literal:
    return lambda rng: str(rng.choice([low, high, 0, rng.randint(low, high), rng.randint(-9, 9)]))


def _texts(of: list[str]) -> Literal:
    return lambda rng: "'" + "".join(rng.choice(of) for _ in range(rng.randrange(4))) + "'"


def _bytes(size: int) -> Literal:
    def literal(rng: random.Random) -> str:
        data = rng.randbytes(rng.randrange(size + 1)).hex()
        return f"x'{data}{rng.choice(['', '00'])}'"

    return literal


def _dates(rng: random.Random) -> str:
    year = rng.choice([1, 1000, 1970, 1999, 2024, 9999, rng.randint(1, 9999)])
    return f"{year:04d}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def _clock(rng: random.Random, digits: int) -> str:
    fraction = f".{rng.randrange(10**digits):0{digits}d}" if digits else ""
    return f"{rng.randrange(24):02d}:{rng.randrange(60):02d}:{rng.randrange(60):02d}{fraction}"


def _date(rng: random.Random) -> str:
    odd = ["0000-00-00", "2024-00-00", "2024-05-00", "0000-01-01"]
    return f"'{rng.choice(odd) if rng.random() < 0.1 else _dates(rng)}'"


def _datetime(digits: int) -> Literal:
    def literal(rng: random.Random) -> str:
        if rng.random() < 0.1:
            return "'0000-00-00 00:00:00'"
        return f"'{_dates(rng)} {_clock(rng, digits)}'"

    return literal


def _timestamp(digits: int) -> Literal:
    def literal(rng: random.Random) -> str:
        if rng.random() < 0.1:
            return "'0000-00-00 00:00:00'"
        day = f"{rng.randint(1971, 2037)}-0{rng.randint(1, 9)}-1{rng.randint(0, 9)}"
        return f"'{day} {_clock(rng, digits)}'"

    return literal


def _time(digits: int) -> Literal:
    def literal(rng: random.Random) -> str:
        hours = rng.choice([0, 1, 23, 24, 99, 100, 838])
        fraction = f".{rng.randrange(10**digits):0{digits}d}" if digits else ""
        sign = rng.choice(["", "-"])
        minute, second = rng.randrange(60), rng.randrange(59)
        return f"'{sign}{hours:02d}:{minute:02d}:{second:02d}{fraction if hours < 838 else ''}'"

    return literal


def _decimal(precision: int, scale: int) -> Literal:
    def literal(rng: random.Random) -> str:
        digits = rng.randint(1, precision)
        number = rng.randrange(10**digits)
        return (
            rng.choice(["", "-"]) + f"{number // 10**scale}.{number % 10**scale:0{max(scale, 1)}d}"
        )

    return literal


def _floats(rng: random.Random) -> str:
    return rng.choice(["0", "-0.0", "0.1", "1e-30", "16777217", "3.4e38", repr(rng.gauss(0, 1e6))])


def _uuid(rng: random.Random) -> str:
    text = rng.randbytes(rng.choice([14, 16])).ljust(16, b"\0").hex()
    return f"'{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}'"


def _choice(*literals: str) -> Literal:
    return lambda rng: rng.choice(literals)


COLUMNS: list[tuple[str, Literal]] = [
    ("tinyint", _integers(-128, 127)),
    ("tinyint unsigned", _integers(0, 255)),
    ("smallint", _integers(-32768, 32767)),
    ("smallint unsigned", _integers(0, 65535)),
    ("mediumint", _integers(-8388608, 8388607)),
    ("mediumint unsigned", _integers(0, 16777215)),
    ("int", _integers(-(2**31), 2**31 - 1)),
    ("int(7) unsigned zerofill", _integers(0, 2**32 - 1)),
    ("bigint", _integers(-(2**63), 2**63 - 1)),
    ("bigint unsigned", _integers(0, 2**64 - 1)),
    ("decimal(12,2)", _decimal(12, 2)),
    ("decimal(65,30)", _decimal(65, 30)),
    ("decimal(10)", _decimal(10, 0)),
    ("decimal(9,9)", _decimal(9, 9)),
    ("decimal(20,3) zerofill", lambda rng: _decimal(20, 3)(rng).lstrip("-")),
    ("float", _floats),
    ("float(10,2)", _integers(-99999, 99999)),
    ("double", lambda rng: rng.choice([_floats(rng), "1.7976931348623157e308", "5e-324"])),
    ("double(12,3)", _decimal(9, 3)),
    ("bit(1)", _choice("0", "1")),
    ("bit(9)", _integers(0, 511)),
    ("bit(64)", _integers(0, 2**64 - 1)),
    ("date", _date),
    ("datetime", _datetime(0)),
    ("datetime(1)", _datetime(1)),
    ("datetime(6)", _datetime(6)),
    ("timestamp null", _timestamp(0)),
    ("timestamp(3) null", _timestamp(3)),
    ("timestamp(6) null", _timestamp(6)),
    ("time", _time(0)),
    ("time(1)", _time(1)),
    ("time(4)", _time(4)),
    ("time(6)", _time(6)),
    ("year", _choice("0", "1901", "2155", "2024")),
    ("char(9)", _texts(_TEXTS)),
    ("char(200)", _texts(_TEXTS)),
    ("varchar(20)", _texts(_TEXTS)),
    ("varchar(400)", _texts(_TEXTS)),
    ("char(9) character set latin1", _texts(_LATIN)),
    ("varchar(20) character set latin1", _texts(_LATIN)),
    ("varchar(20) character set cp1251", _texts(["", "Ж", "я", "a"])),
    ("char(9) character set utf16", _texts(_TEXTS)),
    ("char(9) character set utf8mb3", _texts(_TEXTS[:7])),
    ("varchar(9) character set euckr", _texts(["", "가", "a"])),
    ("varchar(20) collate utf8mb4_bin", _texts(_TEXTS)),
    ("tinytext", _texts(_TEXTS)),
    ("text", _texts(_TEXTS)),
    ("longtext character set latin2", _texts(["", "ő", "a"])),
    ("binary(6)", _bytes(5)),
    ("binary(255)", _bytes(5)),
    ("varbinary(300)", _bytes(20)),
    ("blob", _bytes(20)),
    ("longblob", _bytes(20)),
    ("enum('a','it''s','é','')", _choice("'a'", "'it''s'", "'é'", "'wrong'", "''")),
    (
        "enum(" + ",".join(f"'m{i}'" for i in range(300)) + ")",
        lambda rng: f"'m{rng.randrange(300)}'",
    ),
    ("set('x','y','it''s')", _choice("''", "'x'", "'y,x'", "'it''s,x'", "'wrong'")),
    ("set(" + ",".join(f"'s{i}'" for i in range(40)) + ")", _choice("'s0,s39'", "'s12'")),
    ("json", lambda rng: "'" + rng.choice(_JSON) + "'"),
    ("uuid", _uuid),
    ("inet4", _choice("'0.0.0.0'", "'10.0.0.0'", "'255.1.2.3'")),
    ("inet6", _choice("'::'", "'::1'", "'::ffff:1.2.3.4'", "'2001:db8::'", "'::1.2.3.4'")),
    ("point", _choice("point(1, 2)", "point(-0.5, 1e9)")),
    ("geometry", _choice("point(1, 2)", "linestring(point(0, 0), point(1, 1))")),
]

KEYS: list[tuple[str, Literal]] = [
    ("int", _integers(-20, 20)),
    ("bigint unsigned", lambda rng: str(2**63 + rng.randrange(30))),
    ("varchar(20)", _texts(["a", "B", "ß", "é", "z "])),
    ("varchar(20) collate utf8mb4_bin", _texts(["a", "B", "ß", "z "])),
    ("varchar(9) character set latin1", _texts(["a", "é", "€"])),
    ("char(4) character set utf16", _texts(["a", "é"])),
    ("binary(3)", _bytes(2)),
    ("varbinary(9)", _bytes(2)),
    ("decimal(6,2)", _decimal(3, 2)),
    ("date", lambda rng: f"'2024-01-{rng.randint(1, 28):02d}'"),
    ("datetime(3)", lambda rng: f"'2024-01-01 00:00:{rng.randint(1, 28):02d}.5'"),
    ("timestamp(6)", lambda rng: f"'2024-01-01 00:00:{rng.randint(1, 28):02d}.5'"),
    ("time(2)", lambda rng: f"'-{rng.randint(1, 128):02d}:00:00.25'"),
    ("double", _choice("0.1", "-1e300", "7", "1e-9", "0")),
    ("float", _choice("0.1", "-1e30", "7", "0.3", "16777217")),
    ("bit(9)", _integers(0, 30)),
    ("enum('z','a','m','b')", _choice("'z'", "'a'", "'m'", "'b'")),
    ("set('z','a','m','b')", _choice("'z'", "'a,z'", "'m'", "'b,z,m'", "''")),
    ("uuid", _uuid),
    ("inet6", lambda rng: f"'::{rng.randrange(30):x}'"),
    ("year", lambda rng: str(rng.randint(1901, 1930))),
]


class History:
    """A table `t` of a database and connections that write to it."""

    def __init__(self, server: Any, database: str, seed: int, *, ddl: bool = False) -> None:
        self.rng = random.Random(seed)
        self._connections = [server.connect(database, autocommit=False) for _ in range(3)]
        for connection in self._connections:
            self._execute(connection, "set sql_mode = '', time_zone = '+00:00'")
            self._execute(connection, "set innodb_lock_wait_timeout = 0, lock_wait_timeout = 1")
        self._ddl = ddl
        self._added = 0
        self._create()

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _create(self) -> None:
        keys = self.rng.sample(KEYS, self.rng.choice([1, 1, 2]))
        self.columns = self.rng.sample(COLUMNS, self.rng.randint(3, 25))
        self.keys = [(f"k{i}", *key) for i, key in enumerate(keys)]
        self.values = [(f"c{i} é`", *column) for i, column in enumerate(self.columns)]
        parts = [f"{quoted(name)} {declared}" for name, declared, _ in (*self.values, *self.keys)]
        if self.rng.random() < 0.5:
            parts.append("v int generated always as (length(hex(k0))) virtual")
            parts.append("p int generated always as (length(hex(k0)) + 1) stored")
        if self.rng.random() < 0.5:
            parts.append("i int invisible default 7")
        names = ", ".join(quoted(name) for name, *_ in self.keys)
        statement = f"create table t ({', '.join(parts)}, primary key ({names}))"
        self._execute(self._connections[0], statement)
        self._execute(self._connections[0], f"create table u (id int primary key, {parts[0]})")
        self._execute(self._connections[0], "insert into u (id) values (1), (2)")
        self._connections[0].commit()

    def _execute(self, connection: Any, statement: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement)

    # ------------------------------------------------------------------ statements

    def steps(self, count: int) -> None:
        for _ in range(count):
            connection = self.rng.choice(self._connections)
            try:
                self._step(connection)
            except (
                pymysql.err.IntegrityError,
                pymysql.err.OperationalError,
                pymysql.err.DataError,
            ):
                connection.rollback()
            except pymysql.err.ProgrammingError as error:
                raise AssertionError(error.args) from error
        for connection in self._connections:
            connection.commit()

    def _step(self, connection: Any) -> None:
        chosen = self.rng.random()
        if chosen < 0.2:
            connection.commit()
        elif chosen < 0.25:
            connection.rollback()
        elif chosen < 0.27 and self._ddl:
            for each in self._connections:
                each.commit()
            self._alter(connection)
        elif chosen < 0.28:
            for each in self._connections:
                each.commit()
            self._execute(connection, "truncate table t")
        elif chosen < 0.33:
            self._savepoint(connection)
        else:
            self._execute(connection, self.statement())

    def _savepoint(self, connection: Any) -> None:
        self._execute(connection, "savepoint s")
        self._execute(connection, self.statement())
        self._execute(connection, "rollback to savepoint s")
        self._execute(connection, self.statement())

    def statement(self) -> str:
        kind = self.rng.choice(
            ["insert"] * 4 + ["replace", "upsert", "update", "rekey", "delete", "join"]
        )
        where = f"where rand({self.rng.randrange(99)}) < 0.3 limit {self.rng.randint(1, 5)}"
        name, literal = self._pick(self.values)
        if kind == "insert":
            return self._insert("insert", self.rng.randint(1, 6))
        if kind == "replace":
            return self._insert("replace", self.rng.randint(1, 3))
        if kind == "upsert":
            return f"{self._insert('insert', 2)} on duplicate key update {name} = {literal}"
        if kind == "update":
            return f"update t set {name} = {literal} {where}"
        if kind == "rekey":
            key, value = self._pick(self.keys)
            return f"update t set {key} = {value} {where}"
        if kind == "join":
            return f"update t join u on true set t.{name} = {literal} where rand() < 0.2"
        return f"delete from t {where}"

    def _pick(self, columns: list[Any]) -> tuple[str, str]:
        name, _, literal = self.rng.choice(columns)
        null = columns is self.values and self.rng.random() < 0.15
        return quoted(name), "null" if null else literal(self.rng)

    def _insert(self, verb: str, count: int) -> str:
        columns = [*self.keys, *self.values]
        names = ", ".join(quoted(name) for name, *_ in columns)
        rows = list[str]()
        for _ in range(count):
            keys = [literal(self.rng) for _, _, literal in self.keys]
            values = [
                "null" if self.rng.random() < 0.15 else literal(self.rng)
                for _, _, literal in self.values
            ]
            rows.append(f"({', '.join([*keys, *values])})")
        return f"{verb} into t ({names}) values {', '.join(rows)}"

    # ------------------------------------------------------------------ DDL

    def _alter(self, connection: Any) -> None:
        kind = self.rng.choice(["add", "add", "drop", "change", "index", "swap", "modify", "first"])
        declared, literal = self.rng.choice(COLUMNS)
        if kind in ("add", "first"):
            self._added += 1
            name = f"a{self._added}"
            place = " first" if kind == "first" else ""
            self._execute(connection, f"alter table t add column {name} {declared}{place}")
            self.values.append((name, declared, literal))
        elif kind == "drop" and len(self.values) > 3:
            name, *_ = self.values.pop()
            self._execute(connection, f"alter table t drop column {quoted(name)}")
        elif kind == "change":
            self._added += 1
            old, declared, literal = self.values.pop()
            new = f"b{self._added}"
            statement = f"alter table t change column {quoted(old)} {new} {declared}"
            self._execute(connection, statement)
            self.values.append((new, declared, literal))
        elif kind == "modify":
            self._added += 1
            name = f"m{self._added}"
            self._execute(connection, f"alter table t add {name} int default 5, add index (k0)")
            self._execute(connection, f"alter table t modify {name} varchar(30)")
            self.values.append((name, "varchar(30)", _texts(_TEXTS)))
        elif kind == "swap":
            self._execute(connection, "create table t_new like t")
            self._execute(connection, "rename table t to t_old, t_new to t")
            self._execute(connection, "drop table t_old")
        elif kind == "index":
            self._execute(connection, f"alter table t comment = 'c{self._added}'")
