"""Live queries: the JSON form, what is refused, what is shared."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headwater.errors import ConfigError, InvalidQuery
from headwater.live.filters.filter import c
from headwater.live.order import OrderBy
from headwater.live.query import BoundQuery, LiveQuery, Rules
from headwater.live.statements import by_keys, page
from headwater.model import Column, Table

ORDERS = Table(
    1,
    "sales",
    "orders",
    (
        Column("id", "bigint", "bigint"),
        Column("region", "integer", "integer"),
        Column("price", "numeric", "numeric"),
        Column("doc", "jsonb", "jsonb"),
    ),
    ("id",),
)

WHOLE: dict[str, Any] = {
    "table": "orders",
    "where": ["region", "=", 7],
    "order": [["price", "desc", "nulls last"]],
    "limit": 20,
    "after": ["9.50", 1042],
    "columns": ["id", "price"],
}


def test_json_there_and_back() -> None:
    assert LiveQuery.from_json(WHOLE).to_json() == WHOLE
    assert LiveQuery.from_json({"table": "orders"}) == LiveQuery("orders")
    assert LiveQuery("orders").to_json() == {"table": "orders"}


@pytest.mark.parametrize(
    ("text", "by"),
    [
        ("price", OrderBy("price")),
        ("price asc", OrderBy("price")),
        ("price desc", OrderBy("price", True)),
        ("price nulls first", OrderBy("price", False, "first")),
        ("price desc nulls last", OrderBy("price", True, "last")),
        ("unit price desc", OrderBy("unit price", True)),
    ],
)
def test_order_as_text(text: str, by: OrderBy) -> None:
    query = LiveQuery.from_json({"table": "orders", "order": [text]})
    assert query.order == (by,)
    assert OrderBy.parse(str(by)) == by


@pytest.mark.parametrize(
    ("change", "path", "says"),
    [
        ({"offset": 10}, "", "unknown field `offset`"),
        ({"limit": "10"}, "limit", "expected `int | null`"),
        ({"limit": 0}, "limit", "expected 1 to 1,000"),
        ({"limit": 5_000}, "limit", "expected 1 to 1,000"),
        ({"mode": "magic"}, "mode", "magic"),
        ({"order": [7]}, "order[0]", "expected `str | array`"),
        ({"order": ["colour"]}, "order[0]", "no sortable column 'colour'"),
        ({"order": ["doc"]}, "order[0]", "jsonb cannot be ordered"),
        ({"order": ["id"] * 9}, "order", "more than 8 columns"),
        ({"after": [1]}, "after", "expected 2 values: price, id"),
        ({"after": ["x", 1]}, "after[0]", "expected a number"),
        ({"after": [None, None]}, "after[1]", "expected an integer, got None"),
        ({"columns": ["colour"]}, "columns[0]", "no column 'colour'"),
        ({"where": ["region", "=", "x"]}, "where.value", "expected an integer"),
        ({"mode": "streamed"}, "mode", "no order and no cursor"),
    ],
)
def test_an_error_names_the_mistake(change: dict[str, Any], path: str, says: str) -> None:
    with pytest.raises(InvalidQuery) as caught:
        BoundQuery(LiveQuery.from_json({**WHOLE, **change}), ORDERS)
    assert caught.value.path == path
    assert says in str(caught.value)


def test_a_table_says_what_may_be_used() -> None:
    rules = Rules(frozenset({"region"}), frozenset({"price"}), 50)
    BoundQuery(LiveQuery("orders", c.region == 1, (OrderBy("price"), OrderBy("id"))), ORDERS,
               Rules(frozenset({"region"}), frozenset({"price"})))  # fmt: skip
    for query, path in (
        (LiveQuery("orders", c.price == 1, limit=5), "where.column"),
        (LiveQuery("orders", order=(OrderBy("region"),), limit=5), "order[0]"),
        (LiveQuery("orders", limit=51), "limit"),
    ):
        with pytest.raises(InvalidQuery) as caught:
            BoundQuery(query, ORDERS, rules)
        assert caught.value.path == path


def test_a_table_needs_a_primary_key() -> None:
    with pytest.raises(InvalidQuery, match="no primary key"):
        BoundQuery(LiveQuery("t"), Table(1, "public", "t", ORDERS.columns, ()))


SAME = [
    (LiveQuery("orders"), LiveQuery("orders", order=(OrderBy("id"),))),
    (LiveQuery("orders", columns=("price", "id")), LiveQuery("orders", columns=("price",))),
    (LiveQuery("orders", columns=("price", "id", "region", "doc")), LiveQuery("orders")),
    (LiveQuery("orders", order=(OrderBy("price", True, "first"),)),
     LiveQuery("orders", order=(OrderBy("price", True),))),
    (LiveQuery("orders", (c.id == 1) & (c.region == 7)),
     LiveQuery("orders", (c.region == 7.0) & (c.id == "1"))),
    (LiveQuery("orders", mode="streamed", limit=5), LiveQuery("orders", mode="streamed")),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), SAME)
def test_equal_queries_have_one_canonical_form(one: LiveQuery, other: LiveQuery) -> None:
    assert BoundQuery(one, ORDERS).canonical == BoundQuery(other, ORDERS).canonical


@pytest.mark.parametrize(
    "other",
    [
        LiveQuery("orders", limit=5),
        LiveQuery("orders", c.region == 7),
        LiveQuery("orders", order=(OrderBy("id", True),)),
        LiveQuery("orders", after=(1,)),
        LiveQuery("orders", columns=("price",)),
        LiveQuery("orders", mode="streamed"),
    ],
)
def test_different_queries_have_different_canonical_forms(other: LiveQuery) -> None:
    default = BoundQuery(LiveQuery("orders"), ORDERS)
    assert BoundQuery(other, ORDERS).canonical != default.canonical


def test_statements_are_bounded_and_bound() -> None:
    query = BoundQuery(LiveQuery.from_json({**WHOLE, "after": None}), ORDERS)
    question = page(query, (None, 7), 5)
    assert question.text == (
        'select "id", "region", "price", "doc" from "sales"."orders"'
        ' where "region" operator(pg_catalog.=) %s::bigint'
        ' and ((false or ("price" is null and ("id" operator(pg_catalog.>) %s::bigint'
        ' or ("id" operator(pg_catalog.=) %s::bigint and false)))))'
        ' order by "price" desc nulls last, "id" limit %s'
    )
    assert question.values == (7, 7, 7, 5)
    by_id = BoundQuery(LiveQuery("orders", order=(OrderBy("id", desc=True),)), ORDERS)
    bounded = page(by_id, (7,), 5).text
    assert 'true and ("id" operator(pg_catalog.<=) %s::bigint and ("id" operator(' in bounded
    question = by_keys(query, ((1,), (2,)), None)
    assert '"id" operator(pg_catalog.=) any (array[%s::bigint, %s::bigint])' in question.text
    assert by_keys(query, (), None).text.count("where false") == 1


@pytest.mark.parametrize(("most", "usual"), [(1, 1), (99, 99), (100, 100), (1000, 100)])
def test_a_query_without_a_limit_fits_any_table(most: int, usual: int) -> None:
    rules = Rules(limit_max=most)
    bound = BoundQuery(LiveQuery("orders"), ORDERS, rules)
    assert bound.limit == usual
    assert bound.canonical == BoundQuery(LiveQuery("orders", limit=usual), ORDERS, rules).canonical
    with pytest.raises(InvalidQuery, match=f"limit: expected 1 to {most:,}"):
        BoundQuery(LiveQuery("orders", limit=most + 1), ORDERS, rules)


def test_rules_name_a_virtual_column_as_such() -> None:
    table = msgspec.structs.replace(ORDERS, virtual=("ratio",))
    with pytest.raises(ConfigError, match=r"virtual column 'ratio' of .*orders .* as sortable"):
        Rules(sortable=frozenset({"ratio"})).check(table)


def test_a_limit_that_is_given_is_sent() -> None:
    assert "limit" not in LiveQuery("orders").to_json()
    assert LiveQuery("orders", limit=100).to_json()["limit"] == 100
