"""Placeholders, held against the driver's own conversion."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg._queries import _query2pg_nocache

from headwater.errors import ConfigError
from headwater.queries.analysis.placeholders import convert, placed

PIECES = ["%s", "%(a)s", "%(b c)s", "%%", "select ", "'%%'", "\n", "ä", "$1", "(", ")", "s"]


def the_drivers(sql: str) -> tuple[str, tuple[str, ...]]:
    text, _, order, _ = _query2pg_nocache(sql.encode(), "utf-8")
    return text.decode(), tuple(order or ())


@given(st.lists(st.sampled_from([*PIECES, "%", "%d", "%t", "%(a)d", "%("])))
def test_as_the_driver_converts(pieces: list[str]) -> None:
    sql = "".join(pieces)
    try:
        expected = the_drivers(sql)
    except (psycopg.ProgrammingError, UnicodeDecodeError):  # the latter while it says so
        with pytest.raises(ConfigError):
            convert(sql)
        return
    if "%t" in sql.replace("%%", ""):
        return  # a format that we do not offer
    converted = convert(sql)
    assert (converted.sql, converted.names) == expected


@pytest.mark.parametrize(
    ("sql", "args", "named", "text", "values"),
    [
        ("select 1", (), {}, "select 1", ()),
        ("select 5 % 3", (), {}, "select 5 % 3", ()),
        ("select 5 %% %s", (3,), {}, "select 5 % $1", (3,)),
        ("select %s, %s", (1, "a"), {}, "select $1, $2", (1, "a")),
        ("select %(a)s, %(b)s, %(a)s", (), {"b": 2, "a": 1}, "select $1, $2, $1", (1, 2)),
        ("select %(a)s", (), {"a": 1, "more": 2}, "select $1", (1,)),
        ("select %s", ([1, 2],), {}, "select $1", ([1, 2],)),
    ],
)
def test_placed(
    sql: str, args: tuple[Any, ...], named: dict[str, Any], text: str, values: tuple[Any, ...]
) -> None:
    assert placed(sql, args, named) == (text, values)


@pytest.mark.parametrize(
    ("sql", "args", "named", "reason"),
    [
        ("select %s", (1, 2), {}, "has 1 placeholders %s, and 2 were given by place"),
        ("select %(a)s", (1,), {}, "has the placeholders %(a)s, and 1 were given by place"),
        ("select %(a)s", (), {"b": 1}, "has the placeholders %(a)s; given by name: b"),
        ("select %s", (), {"b": 1}, "has 1 placeholders %s; given by name: b"),
        ("select %s, %(a)s", (1,), {}, "mixes"),
        ("select %s", (1,), {"a": 1}, "by place and by name"),
        ("select 5 % 3 + %s", (1,), {}, "'% ' is not a placeholder"),
        ("select %d", (1,), {}, "'%d' is not a placeholder"),
    ],
)
def test_parameters_that_do_not_fit(
    sql: str, args: tuple[Any, ...], named: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        placed(sql, args, named)
    assert reason in str(caught.value)
    assert caught.value.hint
