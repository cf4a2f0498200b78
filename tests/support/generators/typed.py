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
    "smallint": (["'-32768'", "0", "32767"], []),
    "integer": (["'-2147483648'", "7", "2147483647"], []),
    "bigint": (["'-9223372036854775808'", "9223372036854775807"], []),
    "numeric(12,2)": (["1.50", "-0.01", "9999999999.99"], ["'NaN'"]),
    "numeric(38,0)": (["99999999999999999999999999999999999999"], ["'NaN'"]),
    "numeric(50,3)": (["123456789012345678901234567890123456789012.125"], []),
    "numeric": (["1.5", "2.50", "-3", "123456789.000000000000000001"], ["'Infinity'", "1e30"]),
    "percent": (["99.95", "0"], []),
    "real": (["0.1", "'NaN'", "'-Infinity'", "3.4e38", "1e-45", "'-0'"], []),
    "double precision": (
        ["0.1", "'NaN'", "'Infinity'", "'-0'", "1e-300", "5e-324", "1.7976931348623157e308"],
        [],
    ),
    "boolean": (["true", "false"], []),
    "text": (
        [
            "''",
            "'null'",
            "'NULL'",
            "'ä\"\\ '' \n €'",
            "'x'",
            "repeat('ö', 10000)",
            r"E'\x01\x1f\x7f\u2028\uFFFF\U0010FFFF'",
        ],
        [],
    ),
    "varchar(9)": (["'abc'", "''"], []),
    "char(4)": (["'ab'", "'abcd'", "''"], []),
    '"char"': (["'a'", "''", "'\"'"], []),
    "name": (["'n'", "''", "repeat('x', 63)"], []),
    "uuid": (
        ["'0b5d2c34-63c5-4b5e-8d4a-4f5a2a1e9d01'", "'00000000-0000-0000-0000-000000000000'"],
        [],
    ),
    "json": (['\'{"a": 1.50, "a": [1e400]}\'', "'[1, null]'", "'\"s\"'"], []),
    "jsonb": (['\'{"b": {"c": null}}\'', "'true'", "'-1e-30'", "'\"\\u00e4\"'", "'[]'"], []),
    "jsonpath": (["'$.a[*] ? (@ > 1)'"], []),
    "bytea": (["'\\x'", "'\\x00ff27'"], []),
    "date": (["'0001-01-01'", "'1582-10-10'", "'9999-12-31'"], ["'infinity'", "'0044-03-15 BC'"]),
    "timestamp": (
        ["'2026-01-31 12:00:00.123456'", "'0001-01-01'", "'9999-12-31 23:59:59.999999'"],
        ["'-infinity'", "'294276-12-31 23:59:59.999999'", "'4713-01-01 BC'"],
    ),
    "timestamptz": (
        [
            "'2026-01-31 12:00:00.1+02'",
            "'1900-01-01Z'",
            "'0001-01-01Z'",
            "'9999-12-31 23:59:59.999999Z'",
        ],
        ["'infinity'"],
    ),
    "time": (["'12:30'", "'23:59:59.999999'", "'24:00'", "'0:00'"], []),
    "timetz": (["'12:30+05:30'", "'24:00-15:59:59'", "'0:00+15:59:59'"], []),
    "interval": (
        [
            "'1 year 2 days'",
            "'-3 hours'",
            "'178000000 years'",
            "'-170000000 years -11 mons'",
            "'1 mon -1 day 0.000001 seconds'",
            "'0'",
        ],
        [],
    ),
    "inet": (["'10.0.0.1/8'", "'::1'", "'255.255.255.255'"], []),
    "cidr": (["'10.0.0.0/8'", "'0.0.0.0/0'", "'2001:db8::/32'"], []),
    "macaddr": (["'08:00:2b:01:02:03'", "'ff:ff:ff:ff:ff:ff'"], []),
    "macaddr8": (["'08:00:2b:01:02:03:04:05'"], []),
    "money": (["12.34", "'-92233720368547758.08'", "'92233720368547758.07'"], []),
    "bit(3)": (["b'101'", "b'000'"], []),
    "bit varying": (["b''", "b'101'", "repeat('01', 500)"], []),
    "varbit(7)": (["b''", "b'1111111'"], []),
    "oid": (["0", "4294967295"], []),
    "xid": (["'0'", "'4294967295'"], []),
    "xid8": (["'0'", "'18446744073709551615'"], []),
    "cid": (["'4294967295'"], []),
    "tid": (["'(0,1)'", "'(4294967295,65535)'"], []),
    "pg_lsn": (["'0/0'", "'FFFFFFFF/FFFFFFFF'"], []),
    "pg_snapshot": (["'10:20:10,14,15'"], []),
    "txid_snapshot": (["'10:10:'"], []),
    "refcursor": (["'c'"], []),
    "aclitem": (["'pg_monitor=r/pg_monitor'"], []),
    "regclass": (["'pg_class'", "0"], []),
    "regtype": (["'integer'", "'double precision[]'"], []),
    "regproc": (["'pg_backend_pid'"], []),
    "regprocedure": (["'pg_backend_pid()'"], []),
    "regoper": (["'||/'"], []),
    "regoperator": (["'+(integer,integer)'"], []),
    "regconfig": (["'simple'"], []),
    "regdictionary": (["'simple'"], []),
    "regnamespace": (["'pg_catalog'"], []),
    "regrole": (["'pg_monitor'"], []),
    "regcollation": (["'\"C\"'"], []),
    "point": (["'(1,2.5)'", "'(-0,1e300)'", "'(NaN,Infinity)'"], []),
    "line": (["'{1,-1,0}'"], []),
    "lseg": (["'[(0,0),(1,1)]'"], []),
    "box": (["'(2,2),(0,0)'"], []),
    "path": (["'[(0,0),(1,1)]'", "'((0,0),(1,1),(2,0))'"], []),
    "polygon": (["'((0,0),(1,1),(2,0))'"], []),
    "circle": (["'<(1,2),3>'", "'<(0,0),0>'"], []),
    "int4range": (["'[1,5)'", "'empty'", "'(,)'"], []),
    "int8range": (["'[-9223372036854775808,9223372036854775807)'"], []),
    "numrange": (["'(1.50,2.5]'", "'[1,NaN]'"], []),
    "daterange": (["'[2026-01-01,infinity)'", "'(,2026-01-01)'"], []),
    "tsrange": (["'[-infinity,2026-01-01 12:00]'", "'empty'"], []),
    "tstzrange": (["'[2026-01-01Z,)'"], []),
    "int4multirange": (["'{[1,2),[5,)}'", "'{}'"], []),
    "int8multirange": (["'{[1,9223372036854775807)}'"], []),
    "nummultirange": (["'{[1.50,2.5],[3,3]}'"], []),
    "datemultirange": (["'{(,2026-01-01),[2027-01-01,)}'"], []),
    "tsmultirange": (["'{[2026-01-01,2026-01-02)}'"], []),
    "tstzmultirange": (["'{[2026-01-01Z,2026-01-02Z)}'"], []),
    "tsvector": (["'a b'", "'x:3A ''it''''s'':5'", "''"], []),
    "tsquery": (["'a & !b'", "''"], []),
    "int2vector": (["'1 2'", "''"], []),
    "oidvector": (["'1 4294967295'"], []),
    "int[]": (["'{}'", "'{1,null,3}'", "'[0:1]={1,2}'"], ["'{{1,2},{3,4}}'"]),
    "text[]": (['\'{"a b",null,"\\"","NULL"}\'', "'{}'"], ["'{{a},{b}}'"]),
    "numeric(5,2)[]": (["'{1.50,null}'"], ["'{NaN}'"]),
    "date[]": (["'{2026-01-01}'"], ["'{infinity}'"]),
    "time[]": (["'{24:00,null,00:00:00.000001}'"], []),
    "timestamptz[]": (["'{2026-01-01Z}'"], []),
    "interval[]": (["'{1 day,null,-1 mon}'"], []),
    "uuid[]": (["'{0b5d2c34-63c5-4b5e-8d4a-4f5a2a1e9d01,null}'"], []),
    "jsonb[]": (["array['{\"a\": [1]}', null, '\"s\"', '1.50']"], ["array['[1]']"]),
    "bytea[]": (["array['\\x00ff'::bytea]"], []),
    "boolean[]": (["'{t,f,null}'"], []),
    "mood": (["'sad'", "'it''s'"], []),
    "mood[]": (["'{sad,glad}'"], []),
    "pair": (["'(1,x)'", "'(,\"a,b\")'"], []),
}
"""SQL literals of each type: those that a lake's type holds, and those that it does not."""

XML: tuple[list[str], list[str]] = (["'<a b=\"1\">ä</a>'", "''"], [])
"""Of `xml`, which not every server is built with."""

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
            return self.rename()
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

    def rename(self) -> str:
        """A statement that renames a column, often to a name that is the same to engines."""
        name = self._rng.choice(list(self.columns))
        kind = self.columns.pop(name)
        other = name.swapcase()
        if other in (name, *self.columns) or self._rng.random() < 0.3:
            other = self._named(kind)
        self.columns[other] = kind
        return f"alter table things rename {quoted(name)} to {quoted(other)}"


def quoted(name: str) -> str:
    return '"{}"'.format(name.replace('"', '""'))
