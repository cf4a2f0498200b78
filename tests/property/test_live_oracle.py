"""After every transaction the window and the replica equal the answer of the database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from headwater.testing.oracle import (
    ALL_SAMPLES,
    ICU_SAMPLES,
    SAMPLES,
    Connection,
    History,
    connect,
    play,
)
from tests.support.generators.sizes import size

HISTORIES = size("histories", 120, large=20_000)
FLUSHES = 60


@pytest.fixture(scope="module")
def connection(postgres_url: str) -> Iterator[Connection]:
    with connect(postgres_url) as connection:
        yield connection


@pytest.fixture(scope="module")
def icu_connection(icu_postgres_url: str) -> Iterator[Connection]:
    with connect(icu_postgres_url) as connection:
        yield connection


def conditions(columns: tuple[str, ...]) -> st.SearchStrategy[Any]:
    return st.sampled_from(columns).flatmap(_condition)


def _condition(name: str) -> st.SearchStrategy[Any]:
    sample = ALL_SAMPLES[name]
    present = [_constant(name, value) for value in sample.values if value is not None]
    value = st.sampled_from(present)
    choices = [
        st.tuples(st.just(name), st.sampled_from(("=", "!=", "<", "<=", ">", ">=")), value),
        st.tuples(
            st.just(name),
            st.sampled_from(("in", "not in")),
            st.lists(st.sampled_from([*present, None]), max_size=3),
        ),
        st.tuples(st.just(name), st.sampled_from(("is null", "is not null"))),
    ]
    if sample.column.type in ("text", "character") and name != "ci":  # before 18 it had no LIKE
        patterns = st.sampled_from(("a%", "%b", "_", "%", "", "a_%", r"50\%", "%B%", "A%", "É%"))
        operator = st.sampled_from(("like", "ilike", "not like", "not ilike"))
        choices.append(st.tuples(st.just(name), operator, patterns))
    return st.one_of(choices).map(list)


def _constant(name: str, value: str) -> Any:
    if name == "b":
        return value == "t"
    return value.replace("-0", "0") if name == "f" else value


def filters(columns: tuple[str, ...]) -> st.SearchStrategy[Any]:
    return st.recursive(
        conditions(columns),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3).map(lambda parts: {"and": parts}),
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"or": parts}),
            inner.map(lambda part: {"not": part}),
        ),
        max_leaves=4,
    )


@st.composite
def queries(draw: st.DrawFn, columns: tuple[str, ...], keys: tuple[str, ...]) -> dict[str, Any]:
    query: dict[str, Any] = {}
    if draw(st.booleans()):
        query["where"] = draw(filters(columns))
    if draw(st.integers(0, 9)) == 9:
        return {**query, "mode": "streamed"}
    by = st.builds(
        lambda column, direction, nulls: f"{column}{direction}{nulls}",
        st.sampled_from((columns[0], *columns, *columns, *keys)),
        st.sampled_from(("", " desc")),
        st.sampled_from(("", "", " nulls first", " nulls last")),
    )
    query["order"] = draw(st.lists(by, max_size=3))
    query["limit"] = draw(st.integers(1, 5))
    if draw(st.integers(0, 3)) == 3:
        query["after"] = draw(cursors(query, keys))
    if draw(st.integers(0, 3)) == 3:
        query["columns"] = draw(st.lists(st.sampled_from(columns), max_size=2))
    return query


def cursors(query: dict[str, Any], keys: tuple[str, ...]) -> st.SearchStrategy[list[Any]]:
    names = dict.fromkeys([*(text.split(" ")[0] for text in query["order"]), *keys])
    return st.tuples(*map(_cursor_value, names)).map(list)


def _cursor_value(name: str) -> st.SearchStrategy[Any]:
    if name in ("k", "k2"):
        return st.integers(-1, 4)
    values = ALL_SAMPLES[name].values
    return st.sampled_from([None if v is None else _constant(name, v) for v in values])


@st.composite
def histories(
    draw: st.DrawFn, among: tuple[str, ...] = (), always: tuple[str, ...] = ()
) -> History:
    first = (draw(st.sampled_from(always)),) if always else ()
    rest = draw(st.lists(st.sampled_from(among), min_size=1, max_size=3, unique=True))
    columns = (*first, *(name for name in rest if name not in first))
    composite = draw(st.integers(0, 4)) == 4
    number = st.integers(0, 2**40)
    transaction = st.lists(number, min_size=1, max_size=3).map(tuple)
    flush = st.one_of(transaction.map(lambda one: (one,)), st.tuples(transaction, transaction))
    keys = ("k", "k2") if composite else ("k",)
    query = draw(queries(columns, keys))
    return History(
        columns=columns,
        query=query,
        flushes=tuple(draw(st.lists(flush, min_size=FLUSHES, max_size=FLUSHES))),
        rows=tuple(draw(st.lists(number, max_size=12))),
        cushion=draw(st.integers(0, 3)),
        composite=composite,
    )


def fuzz(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    )


@pytest.mark.timeout(600 + HISTORIES)
@fuzz(HISTORIES)
@given(history=histories(among=tuple(SAMPLES)))
def test_every_history_equals_the_database(connection: Connection, history: History) -> None:
    play(connection, history)


@pytest.mark.timeout(600 + HISTORIES)
@fuzz(max(HISTORIES // 4, 10))
@given(history=histories(among=tuple(ALL_SAMPLES), always=tuple(ICU_SAMPLES)))
def test_every_history_equals_the_database_under_another_collation(
    icu_connection: Connection, history: History
) -> None:
    play(icu_connection, history)
