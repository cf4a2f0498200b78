"""Values of every type, at and around the ends of their ranges and at random, as PostgreSQL reads
them. PostgreSQL decides which texts are values of a type: every text is tried on every type.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from headwater.database import Connection

Make = Callable[[random.Random], str]


def _integer(bits: int) -> Make:
    top = 2 ** (bits - 1)

    def make(chance: random.Random) -> str:
        near = chance.choice((-top, top - 1, 0, chance.randrange(-top, top)))
        return str(min(max(near + chance.randint(-2, 2), -top), top - 1))

    return make


def _numeric(chance: random.Random) -> str:
    digits = chance.choice((0, 1, 5, 20, 60, 400))
    scale = chance.choice((0, 0, 2, 5, 40, 300))
    sign = chance.choice(("", "-"))
    whole = "".join(chance.choice("0123456789") for _ in range(digits)) or "0"
    return sign + whole + ("." + "".join(chance.choices("059", k=scale)) if scale else "")


def _float(smallest: int, largest: int) -> Make:
    def make(chance: random.Random) -> str:
        digits = chance.choice(("1", "1.5", "9.999999", str(chance.random() * 10)))
        return f"{chance.choice(('', '-'))}{digits}e{chance.randint(smallest, largest)}"

    return make


def _day(first: int, last: int) -> Make:
    def make(chance: random.Random) -> str:
        near = chance.choice((first, -44, 0, 1, 1000, 1582, 2000, 9999, 10000, last))
        year = chance.choice((near + chance.randint(-2, 2), chance.randint(first, last)))
        day = f"{chance.randint(1, 12):02}-{chance.randint(1, 28):02}"
        return f"{year:04}-{day}" if year > 0 else f"{1 - year:04}-{day} BC"

    return make


def _clock(chance: random.Random) -> str:
    micros = chance.choice(("", ".5", ".000001", ".999999", f".{chance.randint(0, 999999):06}"))
    second = chance.choice((0, 59, chance.randint(0, 59)))
    return f"{chance.choice((0, 12, 23)):02}:{chance.randint(0, 59):02}:{second:02}{micros}"


def _moment(zone: bool) -> Make:
    day = _day(-4712, 294276)

    def make(chance: random.Random) -> str:
        date, _, era = day(chance).partition(" ")
        offset = chance.choice(("+00", "+14", "-12", "+05:45", "+00:00:07")) if zone else ""
        return f"{date} {_clock(chance)}{offset}{' ' + era if era else ''}"

    return make


def _word(chance: random.Random) -> str:
    letters = "aAbBzZ09 é ß\uffff\U0001f600\u0130\u212a%_\\'\"{}[]():,-\t\n~\x7f\u0301"
    return "".join(chance.choices(letters, k=chance.choice((0, 1, 1, 2, 3, 8))))


def _interval(chance: random.Random) -> str:
    parts = (("years", 178_000_000), ("mons", 50), ("days", 2_147_483_647), ("hours", 2_000_000))
    chosen = chance.sample(parts, k=chance.randint(1, 3))
    words = (
        f"{chance.choice((0, 1, -1, most, -most, chance.randint(-most, most)))} {unit}"
        for unit, most in chosen
    )
    return " ".join(words)


def _uuid(chance: random.Random) -> str:
    number = chance.choice((0, 2**128 - 1, 2**127, 1, chance.getrandbits(128)))
    text = f"{number:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _bytes(chance: random.Random) -> str:
    return "\\x" + bytes(chance.choices((0, 1, 97, 127, 128, 255), k=chance.randint(0, 4))).hex()


def _json(chance: random.Random, depth: int = 3) -> str:
    scalar = (
        "null", "true", "0", "-0", "1e400", "-1e-400", "1" * 30, "1" * 5000, "0." + "1" * 40,
        '""', '"a"', '"\\u00e9"', '"NaN"', '"infinity"', '"\\\\x00"', '"2026-01-01"', '" "',
    )  # fmt: skip
    match chance.randint(0, 5 if depth else 2):
        case 3:
            return "[" + " , ".join(_json(chance, depth - 1) for _ in range(3)) + "]"
        case 4:
            first, second = _json(chance, depth - 1), _json(chance, depth - 1)
            return f'{{"a": {first}, "a":{second}}}'
        case 5:
            return f" {_json(chance, depth - 1)}\n"
    return chance.choice(scalar)


def _range(make: Make) -> Make:
    def made(chance: random.Random) -> str:
        if chance.random() < 0.1:
            return "empty"
        low, high = sorted((make(chance), make(chance)), key=lambda text: (len(text), text))
        ends = (chance.choice((f'"{low}"', "")), chance.choice((f'"{high}"', "")))
        return f"{chance.choice('[(')}{ends[0]},{ends[1]}{chance.choice('])')}"

    return made


def _address(chance: random.Random) -> str:
    parts = ".".join(str(chance.choice((0, 1, 10, 127, 255))) for _ in range(4))
    return chance.choice(
        (f"{parts}/{chance.choice((0, 8, 24, 31, 32))}", parts, "::1", "ffff::/16")
    )


MAKERS: dict[str, Make] = {
    "smallint": _integer(16),
    "integer": _integer(32),
    "bigint": _integer(64),
    "numeric": _numeric,
    "real": _float(-45, 37),
    "double precision": _float(-323, 307),
    "date": _day(-4712, 5874897),
    "timestamp without time zone": _moment(False),
    "timestamp with time zone": _moment(True),
    "time without time zone": _clock,
    "time with time zone": lambda chance: _clock(chance) + chance.choice(("+00", "-15:59", "+14")),
    "text": _word,
    "character varying": _word,
    "character": _word,
    "name": _word,
    "interval": _interval,
    "uuid": _uuid,
    "bytea": _bytes,
    "json": _json,
    "jsonb": _json,
    "inet": _address,
    "cidr": _address,
    "money": lambda chance: f"{_integer(56)(chance)}.{chance.randint(0, 99):02}",
    "bit varying": lambda chance: "".join(chance.choices("01", k=chance.randint(0, 70))),
    "int4range": _range(_integer(32)),
    "int8range": _range(_integer(64)),
    "numrange": _range(_numeric),
    "daterange": _range(_day(-4712, 5874897)),
    "tsrange": _range(_moment(False)),
    "tstzrange": _range(_moment(True)),
    "int4multirange": lambda chance: "{" + _range(_integer(32))(chance) + "}",
    "tstzmultirange": lambda chance: "{" + _range(_moment(True))(chance) + "}",
}

ENDS: tuple[str, ...] = (
    "", "0", "-0", "1", "-1", "t", "f", "true", "false", "a", "A", "a ", "a  ", "ab", "sad", "ok",
    "happy", "NaN", "Infinity", "-Infinity", "infinity", "-infinity",
    "32767", "-32768", "2147483647", "-2147483648", "9223372036854775807", "-9223372036854775808",
    "9007199254740993", "18446744073709551615", "4294967295",
    "9" * 131072, "-" + "9" * 131072, "0." + "0" * 16382 + "1", "1." + "0" * 16383, "1.0", "1.00",
    "1.50000000000000000000000000000000000001", "0.1", "0.2", "16777217", "1e23", "5e-324", "1e-45",
    "1.7976931348623157e308", "-1.7976931348623157e308", "3.4028235e38", "-3.4028235e38",
    "2.2250738585072014e-308", "1.1754944e-38",
    "4714-11-24 BC", "4713-01-01 BC", "0044-03-15 BC", "0001-12-31 BC", "0001-01-01", "1582-10-10",
    "9999-12-31", "10000-01-01", "5874897-12-31", "294276-12-31",
    "4714-11-24 00:00:00+00 BC", "0044-03-15 00:00:00 BC", "0001-12-31 23:59:59.999999+00 BC",
    "0001-01-01 00:00:00+00", "9999-12-31 23:59:59.999999+00", "10000-01-01 00:00:00+00",
    "294276-12-31 23:59:59.999999+00", "2026-01-01 02:00:00.000001+02", "2016-12-31 23:59:60",
    "24:00:00", "00:00:00", "23:59:59.999999", "24:00:00+15:59", "00:00:00-15:59",
    "1 day", "24 hours", "1 mon", "30 days", "-178000000 years", "178000000 years",
    "00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff",
    "\\x", "\\x00", "\\x00ff", "\\xff",
    "null", '{"a": 1, "a": 2}', '"\\u0000"', ' {"a" : [1e400]} ', "[" * 150 + "]" * 150,
    "[" * 300 + "]" * 300, "[" * 3000 + "]" * 3000, '{"a":"\\ud800"}', "1" * 5000,
    "empty", "[1,5)", "(,)", "{[1,2],[4,5]}", "{}", "[,2026-01-01]", "[-infinity,infinity]",
    "92233720368547758.07", "-92233720368547758.08", "$1,234.50",
    "127.0.0.1", "::ffff:1.2.3.4/96", "0.0.0.0/0", "08:00:2b:01:02:03", "08:00:2b:01:02:03:04:05",
    "101", "1" * 64, "a:1 b:2", "a & !b", "'q''q':1A", "<a>b &amp; c</a>", "$.a ? (@ > 1)",
    "(1,2)", "(0,0),(1,1)", "<(1,2),3>", "[(0,0),(1,1)]", "((0,0),(1,1))", "{1,-1,0}",
    "0/0", "FFFFFFFF/FFFFFFFF", "10:20:10,14,15", "(0,1)", "pg_class", "integer", "now()",
    "(1,a)", '(,"a ""b"" c")', "(-0,)",
    "\u0130", "\u212a", "\uffff", "\U0001f600", "é", "50%", "\x7f",
)  # fmt: skip

_SCALARS = """
    select format_type(t.oid, null) from pg_type t join pg_namespace n on n.oid = t.typnamespace
    where t.typtype in ('b', 'd', 'e', 'r', 'm', 'c') and t.typcategory <> 'A'
      and (n.nspname = 'pg_catalog' and t.typtype <> 'c' or n.nspname = 'sample')
      and not exists (select from pg_class c where c.oid = t.typrelid and c.relkind <> 'c')
    order by 1
"""
_SETUP = """
    create schema sample;
    create type sample.mood as enum ('sad', 'ok', 'happy', '24:00:00', 'NaN', 'infinity', '');
    create type sample.pair as (a real, b text);
    create domain sample.share as numeric check (value is null or value <> 7);
    create domain sample.words as text[];
    create type sample.span as range (subtype = float8);
    create function sample.is_value(input text, type text) returns boolean language plpgsql as $$
    declare made text;
    begin
      execute format('select (%L::%s)::text', input, type) into made;
      return true;
    exception when others then return false;
    end $$;
"""


async def prepare(connection: Connection) -> None:
    """Make what the values need: an enumeration, a composite type, domains, a range."""
    await connection.execute(_SETUP.encode())


async def types(connection: Connection) -> list[str]:
    """Every type that a column can have, and arrays of it."""
    cursor = await connection.execute(_SCALARS.encode())
    scalars = [name for (name,) in await cursor.fetchall()]
    return [*scalars, *(f"{name}[]" for name in scalars)]


def _texts(type_: str, chance: random.Random, count: int) -> Iterator[str]:
    """Texts that may be values of a type that is no array."""
    make = MAKERS.get(type_)
    yield from ENDS
    for _ in range(count):
        yield make(chance) if make else chance.choice(list(MAKERS.values()))(chance)


def array_text(chance: random.Random, pool: list[str]) -> str:
    """An array of these elements: empty, with NULLs, of two dimensions, or with bounds."""

    def listed(count: int) -> str:
        chosen = (chance.choice(pool) for _ in range(count))
        quoted = (
            "NULL"
            if chance.random() < 0.15
            else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
            for text in chosen
        )
        return "{" + ",".join(quoted) + "}"

    match chance.randint(0, 5):
        case 0:
            return "{}"
        case 1:
            return f"[0:1]={listed(2)}"
        case 2:
            return "{" + ",".join(listed(2) for _ in range(2)) + "}"
    return listed(chance.randint(1, 3))


async def values(
    connection: Connection, type_: str, chance: random.Random, count: int
) -> list[str]:
    """At most this many values of a type, ends and others mixed; none for a type that reads no text
    of ours. An array's elements are values of the element's type."""
    if type_.endswith("[]"):
        pool = await values(connection, type_.removesuffix("[]"), chance, count)
        # Many large ones would only take time.
        pool = [text for text in pool if len(text) < 1000] or pool[:1]
        tried = [array_text(chance, pool) for _ in range(count)] if pool else []
    else:
        tried = list(dict.fromkeys(_texts(type_, chance, count)))
    tried = [text for text in tried if "\0" not in text]
    cursor = await connection.execute(
        "select x.text from unnest(%s::text[]) with ordinality x (text, n)"
        " where sample.is_value(x.text, %s) order by x.n",
        (tried, type_),
    )
    found = [text for (text,) in await cursor.fetchall()]
    chance.shuffle(found)
    return found[:count]
