"""Closure, SQL and router agree on every filter and every row, as PostgreSQL sees it."""

from __future__ import annotations

import datetime as dt
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwater import limits
from headwater.live.filters.check import check
from headwater.live.filters.compile import compile_filter
from headwater.live.filters.filter import Filter, c, canonical, from_json, to_json
from headwater.live.filters.sql import Sql, filter_sql
from headwater.live.needs import Undecided
from headwater.live.router import Router
from headwater.log.images import ImageDecoder
from headwater.model import Change, Column, Row, Table
from headwater.testing.oracle import SAMPLES, Connection, ask, connect
from tests.support.generators.sizes import first_seed, size

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
WORDS = (
    "", "a", "A", "b", "ab", "aB", "Ab ", "a%b", "a_b", "a\\b", "é", "É", "ß", "ẞ", "K",
    "\u212a", "İ", "ı", "i", "I", "Σ", "σς", "Straße", "ASSET-1", "asset-22", "a\nb", "😀", "100%",
)  # fmt: skip
PATTERNS = (
    "", "%", "_", "a%", "%b", "%a%", "a_b", "a\\%b", "a\\_b", "a\\\\b", "%%", "_%_", "é", "%É%",
    "k", "K%", "i", "I", "a%b%", "asset-%", "%ASSET%2", "_%b", "ß%", "σ%", "a b", "\\a", "100\\%",
    "%s%r%", "a__", "%a%b%", "%_s%e%",
)  # fmt: skip
CODE_POINT_COLLATIONS = ("C", "pg_c_utf8", "C.utf8", "pg_unicode_fast", "ucs_basic")


@pytest.fixture(scope="module")
def connection(postgres_url: str) -> Iterator[Connection]:
    with connect(postgres_url) as connection:
        yield connection


def table_of(*columns: Column) -> Table:
    return Table(1, "pg_temp", "f", (Column("k", "integer", "integer"), *columns), ("k",))


def create(connection: Connection, table: Table, rows: list[tuple[Any, ...]]) -> list[Row]:
    """A temporary table with these rows, and the rows as the log's reader gives them back."""
    columns = ", ".join(f'"{column.name}" {column.declared}' for column in table.columns)
    connection.execute(f"drop table if exists pg_temp.f; create temp table f ({columns})".encode())
    places = ", ".join(["%s"] * len(table.columns))
    with connection.cursor() as cursor:
        cursor.executemany(
            f"insert into f values ({places})".encode(),
            [(k, *values) for k, values in enumerate(rows)],
        )
    return ask(connection, Sql("select * from f order by k"), ImageDecoder(table))


def by_database(connection: Connection, where: Filter, table: Table) -> set[int]:
    question = filter_sql(where, table)
    text = f"select k from f where {question.text}".encode()
    return {k for (k,) in connection.execute(text, question.values)}


def assert_agreement(connection: Connection, table: Table, rows: list[Row], given: Any) -> int:
    """Compare the back ends on all rows; returns how many rows memory left to the database."""
    where = check(from_json(given), table)
    assert repr(check(from_json(to_json(where)), table)) == repr(where)
    truth = by_database(connection, where, table)
    assert by_database(connection, canonical(where), table) == truth
    matches = compile_filter(where, table)
    router: Router[str] = Router()
    router.add("query", where, table)
    undecided = 0
    for row in rows:
        expected = row["k"] in truth
        try:
            assert matches(row) == expected, (row, given)
        except Undecided:
            undecided += 1
        if expected:
            change = Change(0, 0, NOW, table, "insert", (row["k"],), None, row)
            assert router.candidates(change) == {"query"}, (row, given)
    return undecided


@pytest.mark.parametrize("name", SAMPLES)
def test_every_operator_on_every_type(connection: Connection, name: str) -> None:
    sample = SAMPLES[name]
    table = table_of(sample.column)
    rows = create(connection, table, [(value,) for value in sample.values])
    constants = [v == "t" if name == "b" else v for v in sample.values if v is not None]
    for operator, value in itertools.product(("=", "!=", "<", "<=", ">", ">="), constants):
        for condition in ([name, operator, value], {"not": [name, operator, value]}):
            undecided = assert_agreement(connection, table, rows, condition)
            assert name in ("m", "iv") or undecided == 0
    for count in range(3):
        for values in itertools.product([*constants, None], repeat=count):
            for operator in ("in", "not in"):
                assert_agreement(connection, table, rows, [name, operator, list(values)])


@pytest.mark.parametrize("type_", ["text", "character(6)", "character varying"])
@pytest.mark.parametrize("collation", CODE_POINT_COLLATIONS)
def test_like_and_ilike_match_as_the_database_does(
    connection: Connection, type_: str, collation: str
) -> None:
    declared = f'{type_} collate "{collation}"'
    table = table_of(Column("t", type_.removesuffix("(6)"), declared, "C"))
    length = 6 if type_ == "character(6)" else 100
    rows = create(connection, table, [*((word[:length],) for word in WORDS), (None,)])
    for pattern in PATTERNS:
        for operator in ("like", "not like"):
            assert assert_agreement(connection, table, rows, ["t", operator, pattern]) == 0
        for operator in ("ilike", "not ilike"):
            undecided = assert_agreement(connection, table, rows, ["t", operator, pattern])
            assert undecided <= (2 if pattern.isascii() else len(rows))


PIECES = ("a", "b", "aa", "ab", "é", "😀", "_", "__", "%", "%%", "\\%", "\\_", "\\\\", "\\a", "A")
SHAPES = ("%a", "_%", "%_", "a%", "%a_", "_a%b", "a_b")


def test_generated_patterns_match_as_the_database_does(connection: Connection) -> None:
    """Patterns that are hard for a matcher: many possible places, adjacent wildcards, escapes."""
    generator = random.Random(first_seed(1))
    table = table_of(Column("t", "text", 'text collate "C"', "C"))
    words = ("a", "b", "aa", "ab", "aab", "é", "😀", "%", "_", "\\", "A")
    texts = ["".join(generator.choices(words, k=k)) for k in (0, 1, 2, 3, 5, 8, 8, 13, 21, 300)]
    texts += ["a" * 60, "a" * 2_000, "a" * 1_999 + "b", "ab" * 1_000, "é" * 500, "aab" * 500 + "a"]
    rows = create(connection, table, [(text,) for text in texts])
    undecided = matched = 0
    for _ in range(size("patterns", 150, large=20_000)):
        pieces = generator.choices(PIECES, k=generator.choice((1, 2, 3, 4, 6, 10, 40)))
        pattern = generator.choice(SHAPES) * generator.choice((0, 0, 1, 3, 100)) + "".join(pieces)
        if generator.random() < 0.3:  # One that matches: a text with holes.
            text = generator.choice(texts[:-6])
            pattern = "".join(generator.choice((f"\\{mark}", mark, "%", "_")) for mark in text)
        pattern = pattern[: limits.FILTER_PATTERN_CHARS_MAX].rstrip("\\")
        for operator in ("like", "not ilike"):
            undecided += assert_agreement(connection, table, rows, ["t", operator, pattern])
        matched += sum(map(compile_filter(c.t.like(pattern), table), rows))
    assert matched > 0


@pytest.mark.parametrize("collation", CODE_POINT_COLLATIONS)
def test_only_two_characters_fold_into_ascii(connection: Connection, collation: str) -> None:
    """What `like.fold_guard` relies on, for every character there is."""
    found = connection.execute(
        f"""
        select chr(c) as character from generate_series(128, 1114111) c
        where c not between 55296 and 57343
        and (lower(chr(c) collate "{collation}") ~ '[\\x01-\\x7f]'
             or length(lower(chr(c) collate "{collation}")) <> 1)
        """.encode()
    )
    assert {character for (character,) in found} <= {"\u212a", "\u0130"}


NUMBERS = ("a", "b", "n")
number_conditions = st.one_of(
    st.tuples(
        st.sampled_from(NUMBERS),
        st.sampled_from(("=", "!=", "<", "<=", ">", ">=")),
        st.sampled_from((0, 1, 2, 1.5, "2", -1, 10**20)),
    ),
    st.tuples(
        st.sampled_from(NUMBERS),
        st.sampled_from(("in", "not in")),
        st.lists(st.sampled_from((0, 1, 2, None)), max_size=3),
    ),
    st.tuples(st.sampled_from(NUMBERS), st.just("between"), st.just([0, 1])),
    st.tuples(st.sampled_from(NUMBERS), st.sampled_from(("is null", "is not null"))),
).map(list)
trees = st.recursive(
    number_conditions,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda parts: {"and": parts}),
        st.lists(inner, max_size=4).map(lambda parts: {"or": parts}),
        inner.map(lambda part: {"not": part}),
    ),
    max_leaves=10,
)


@pytest.fixture(scope="module")
def numbers(connection: Connection) -> tuple[Table, list[Row]]:
    columns = (Column("a", "integer", "integer"), Column("b", "bigint", "bigint"))
    table = Table(
        1, "pg_temp", "g", (Column("k", "integer", "integer"), *columns,
        Column("n", "numeric", "numeric")), ("k",),
    )  # fmt: skip
    values = itertools.product((None, 0, 1, 2), (None, 1, 2), (None, 1, "NaN", 1.5))
    rows = create(connection, table, list(values))
    connection.execute("drop table if exists g; create temp table g as select * from f")
    return table, rows


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(given=trees)
def test_groups_follow_three_valued_logic(
    connection: Connection, numbers: tuple[Table, list[Row]], given: Any
) -> None:
    table, rows = numbers
    connection.execute("drop table if exists f; create temp table f as select * from g")
    assert assert_agreement(connection, table, rows, given) == 0
