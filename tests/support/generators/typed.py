"""Random tables over every type, and statements that change their rows and their columns.

Most values fit the types of a lake; a few do not (`infinity`, NaN in a numeric, years before
Christ, arrays of two dimensions), so that columns must become text.
"""

from __future__ import annotations

import random

SCHEMA = (
    "create type mood as enum ('sad', 'glad', 'it''s')",
    "create type pair as (x int, note text)",
    "create domain percent as numeric(5,2) check (value <= 100)",
)

TYPES: dict[str, tuple[list[str], list[str]]] = {
    "smallint": (["-32768", "0", "32767"], []),
    "integer": (["-2147483648", "7", "2147483647"], []),
    "bigint": (["-9223372036854775808", "9223372036854775807"], []),
    "numeric(12,2)": (["1.50", "-0.01", "9999999999.99"], ["'NaN'"]),
    "numeric(38,0)": (["99999999999999999999999999999999999999"], ["'NaN'"]),
    "numeric(50,3)": (["123456789012345678901234567890123456789012.125"], []),
    "numeric": (["1.5", "2.50", "-3", "123456789.000000000000000001"], ["'Infinity'", "1e30"]),
    "percent": (["99.95", "0"], []),
    "real": (["0.1", "'NaN'", "'-Infinity'", "3.4e38"], []),
    "double precision": (["0.1", "'NaN'", "'Infinity'", "'-0'", "1e-300"], []),
    "boolean": (["true", "false"], []),
    "text": (["''", "'null'", "'NULL'", "'ä\"\\ '' \n €'", "'x'"], []),
    "varchar(9)": (["'abc'", "''"], []),
    "char(4)": (["'ab'", "'abcd'"], []),
    "name": (["'n'"], []),
    "uuid": (["'0b5d2c34-63c5-4b5e-8d4a-4f5a2a1e9d01'"], []),
    "json": (['\'{"a": 1.50, "a": [1e400]}\'', "'[1, null]'", "'\"s\"'"], []),
    "jsonb": (['\'{"b": {"c": null}}\'', "'true'"], []),
    "bytea": (["'\\x'", "'\\x00ff27'"], []),
    "date": (["'0001-01-01'", "'1582-10-10'", "'9999-12-31'"], ["'infinity'", "'0044-03-15 BC'"]),
    "timestamp": (["'2026-01-31 12:00:00.123456'", "'0001-01-01'"], ["'-infinity'"]),
    "timestamptz": (["'2026-01-31 12:00:00.1+02'", "'1900-01-01Z'"], ["'infinity'"]),
    "time": (["'12:30'", "'23:59:59.999999'", "'24:00'"], []),
    "timetz": (["'12:30+05:30'"], []),
    "interval": (["'1 year 2 days'", "'-3 hours'"], []),
    "inet": (["'10.0.0.1/8'", "'::1'"], []),
    "money": (["12.34"], []),
    "bit(3)": (["b'101'"], []),
    "point": (["'(1,2.5)'"], []),
    "int4range": (["'[1,5)'", "'empty'"], []),
    "tstzrange": (["'[2026-01-01Z,)'"], []),
    "tsvector": (["'a b'"], []),
    "int[]": (["'{}'", "'{1,null,3}'"], ["'{{1,2},{3,4}}'"]),
    "text[]": (['\'{"a b",null,"\\"","NULL"}\'', "'{}'"], ["'{{a},{b}}'"]),
    "numeric(5,2)[]": (["'{1.50,null}'"], ["'{NaN}'"]),
    "date[]": (["'{2026-01-01}'"], ["'{infinity}'"]),
    "timestamptz[]": (["'{2026-01-01Z}'"], []),
    "bytea[]": (["array['\\x00ff'::bytea]"], []),
    "boolean[]": (["'{t,f,null}'"], []),
    "mood": (["'sad'", "'it''s'"], []),
    "mood[]": (["'{sad,glad}'"], []),
    "pair": (["'(1,x)'", "'(,\"a,b\")'"], []),
}
"""SQL literals of each type: those that a lake's type holds, and those that it does not."""

_RETYPED = {
    "smallint": ["integer", "text"],
    "integer": ["bigint", "numeric(12,2)", "text"],
    "numeric(12,2)": ["numeric(50,3)", "numeric", "text"],
    "real": ["double precision"],
    "varchar(9)": ["text"],
    "date": ["text", "timestamp"],
    "boolean": ["text"],
    "int[]": ["text[]"],
    "mood": ["text"],
}

NAMES = ("a", "A", "a b", "größe", "_key", "order", "op", "x.y", "_2", "valid_from")
"""Names of columns, of which some are the same to engines that read a lake."""


class Things:
    """The table `things` and statements on it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._types = list(TYPES)
        rng.shuffle(self._types)
        self.columns: dict[str, str] = {}
        for _ in range(rng.randint(4, 12)):
            self._named(self._next_type())

    def create(self) -> str:
        columns = "".join(f", {quoted(n)} {kind}" for n, kind in self.columns.items())
        return f"create table things (id int, part text default 'p', primary key (id){columns})"

    def _next_type(self) -> str:
        self._types.append(self._types.pop(0))
        return self._types[-1]

    def _named(self, kind: str) -> str:
        free = [name for name in NAMES if name not in self.columns]
        name = self._rng.choice(free) if free and self._rng.random() < 0.4 else ""
        number = len(self.columns)
        while not name or name in self.columns:
            name, number = f"c{number}", number + 1
        self.columns[name] = kind
        return name

    def literal(self, kind: str) -> str:
        fitting, hostile = TYPES[kind]
        if self._rng.random() < 0.15:
            return "null"
        among = hostile if hostile and self._rng.random() < 0.03 else fitting
        return f"{self._rng.choice(among)}::{kind}"

    def write(self) -> str:
        """A statement that changes rows."""
        one, other = self._rng.randint(1, 12), self._rng.randint(1, 12)
        names = ", ".join(quoted(name) for name in self.columns)
        values = ", ".join(self.literal(kind) for kind in self.columns.values())
        some = self._rng.sample(list(self.columns), min(2, len(self.columns)))
        sets = ", ".join(f"{quoted(n)} = {self.literal(self.columns[n])}" for n in some)
        insert = f"insert into things (id{', ' if names else ''}{names})"
        insert += f" values ({one}{', ' if values else ''}{values})"
        return self._rng.choice(
            [
                f"{insert} on conflict (id) do update set part = excluded.part || 'x'",
                f"{insert} on conflict (id) do nothing",
                f"update things set {sets or 'part = null'} where id between {one} and {one + 4}",
                f"update things set part = 'q{other}' where id % 3 = {one % 3}",
                f"delete from things where id = {one}",
                f"update things set id = {other} where id = {one}"
                f" and not exists (select from things where id = {other})",
                f"delete from things where id = {one}; {insert} on conflict do nothing",
            ]
        )

    def alter(self) -> str:
        """A statement that changes columns."""
        retyped = [name for name, kind in self.columns.items() if kind in _RETYPED]
        choice = self._rng.choice(["add", "add", "drop", "rename", "retype", "retype", "key"])
        if choice == "drop" and len(self.columns) > 2:
            name = self._rng.choice(list(self.columns))
            del self.columns[name]
            return f"alter table things drop column {quoted(name)}"
        if choice == "rename" and self.columns:
            name = self._rng.choice(list(self.columns))
            kind = self.columns.pop(name)
            return f"alter table things rename {quoted(name)} to {quoted(self._named(kind))}"
        if choice == "retype" and retyped:
            name = self._rng.choice(retyped)
            kind = self._rng.choice(_RETYPED[self.columns[name]])
            self.columns[name] = kind
            column = quoted(name)
            return f"alter table things alter {column} type {kind} using {column}::text::{kind}"
        if choice == "key":
            return "alter table things alter id type bigint"
        kind = self._next_type()
        default = self.literal(kind)
        return f"alter table things add {quoted(self._named(kind))} {kind} default {default}"


def quoted(name: str) -> str:
    return '"{}"'.format(name.replace('"', '""'))
