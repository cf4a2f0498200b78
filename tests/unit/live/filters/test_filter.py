"""Filters: the Python and JSON forms, what is refused and where, and the closure by itself."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pytest

from headwater import limits
from headwater.errors import InvalidQuery
from headwater.live.filters.check import check
from headwater.live.filters.compile import compile_filter
from headwater.live.filters.filter import Filter, c, canonical, from_json, to_json
from headwater.live.filters.sql import filter_sql
from headwater.live.filters.terms import terms
from headwater.live.needs import Undecided
from headwater.model import Column, Row, Table

ORDERS = Table(
    1,
    "public",
    "orders",
    (
        Column("id", "bigint", "bigint"),
        Column("region", "integer", "integer"),
        Column("price", "numeric", "numeric(12,2)"),
        Column("status", "text", "text", "C"),
        Column("name", "text", "text", "default"),
        Column("placed", "timestamp with time zone", "timestamptz"),
        Column("local", "timestamp without time zone", "timestamp"),
        Column("paid", "boolean", "boolean"),
        Column("doc", "jsonb", "jsonb"),
        Column("tags", "text[]", "text[]"),
        Column("mood", "public.mood", "mood", enum=True),
        Column("ip", "inet", "inet"),
        Column("token", "uuid", "uuid"),
    ),
    ("id",),
)
ROW: Row = {column.name: None for column in ORDERS.columns}


@pytest.mark.parametrize(
    ("python", "json"),
    [
        (c.region == 7, ["region", "=", 7]),
        (c.region != 7, ["region", "!=", 7]),
        (c.region < 7, ["region", "<", 7]),
        (c.region <= 7, ["region", "<=", 7]),
        (c.region > 7, ["region", ">", 7]),
        (c.region >= 7, ["region", ">=", 7]),
        (c.region.in_(1, None), ["region", "in", [1, None]]),
        (c.region.not_in(1, 2), ["region", "not in", [1, 2]]),
        (c.status.like("a%"), ["status", "like", "a%"]),
        (c.status.ilike("a%"), ["status", "ilike", "a%"]),
        (~c.status.like("a%"), ["status", "not like", "a%"]),
        (~c.status.ilike("a%"), ["status", "not ilike", "a%"]),
        (c.status.is_null(), ["status", "is null"]),
        (c.status.is_not_null(), ["status", "is not null"]),
        (c["an odd name"] == 1, ["an odd name", "=", 1]),
        (~((c.a == 1) | (c.b == 2)), {"not": {"or": [["a", "=", 1], ["b", "=", 2]]}}),
        ((c.a == 1) & (c.b == 2) & (c.d == 3),
         {"and": [["a", "=", 1], ["b", "=", 2], ["d", "=", 3]]}),
    ],
)  # fmt: skip
def test_python_and_json_say_the_same(python: Filter, json: Any) -> None:
    assert to_json(python) == json
    assert from_json(json) == python


def test_between_is_two_comparisons() -> None:
    assert from_json(["region", "between", [1, 5]]) == c.region.between(1, 5)
    assert c.region.between(1, 5) == (c.region >= 1) & (c.region <= 5)


def test_a_filter_is_not_a_truth_value() -> None:
    with pytest.raises(TypeError, match="combine filters with &"):
        bool(c.a == 1)


SAME_HASH = [str(k * (2**61 - 1) + 5) for k in range(1, 103)]


@pytest.mark.parametrize(
    ("json", "path", "says"),
    [
        (7, "where", "expected [column"),
        ({"and": [], "or": []}, "where", "expected [column"),
        ([["region", "=", 1], ["region"]], "where[1].operator", "unknown operator None"),
        (["region", "~", 7], "where.operator", "unknown operator '~'"),
        (["region", "in", 7], "where.value", "'in' takes a list"),
        (["region", "between", [1]], "where.value", "a list of two values"),
        (["region", "is null", 1], "where.value", "takes no value"),
        (["status", "like", 7], "where.value", "takes a pattern"),
        ([["colour", "=", 1]], "where[0].column", "has no filterable column 'colour'"),
        ({"or": [["region", "=", 1], {"not": ["region", "=", "x"]}]}, "where.or[1].not.value",
         "expected an integer, got 'x'"),
        (["region", "=", None], "where.value", "never true"),
        (["region", "=", True], "where.value", "expected an integer"),
        (["region", "in", [1, "b"]], "where.value[1]", "expected an integer, got 'b'"),
        (["region", "like", "a"], "where", "like applies to text only"),
        (["status", "like", "a\\"], "where.value", "must not end with the escape"),
        (["status", "=", "a\0b"], "where.value", "expected a text"),
        (["status", "=", "\ud800"], "where.value", "expected a text"),
        (["status", "=", "x" * 10_001], "where.value", "longer than 10,000"),
        (["placed", ">", "yesterday"], "where.value", "expected a timestamp such as"),
        (["local", ">", "2026-01-01T00:00:00Z"], "where.value", "without time zone"),
        (["paid", "=", "yes"], "where.value", "expected true or false"),
        (["price", "<", "1,5"], "where.value", "expected a number"),
        (["token", "=", "7"], "where.value", "expected a UUID"),
        (["doc", "=", {}], "where", "'doc' is jsonb, which cannot be compared"),
        (["tags", "in", []], "where", "cannot be compared"),
        (["region", "in", list(range(1_001))], "where.value", "more than 1,000 values"),
        ([["region", "in", list(range(1_000))]] * 11, "where", "more than 10,000 values"),
        ([["region", "=", 1]] * 257, "where[256]", "more than 256 conditions"),
        ([[]] * 256, "where[255]", "more than 256 groups"),
        (["status", "like", "%" * 1_001], "where.value", "a pattern of 1,001 characters"),
        ([["status", "like", "a" * 999]] * 11, "where", "more than 10,000 characters in all"),
        (["price", "in", SAME_HASH], "where.value", "numbers with the same hash"),
        (["region", "in", SAME_HASH], "where.value", "numbers with the same hash"),
    ],
)  # fmt: skip
def test_an_error_names_its_path(json: Any, path: str, says: str) -> None:
    with pytest.raises(InvalidQuery) as caught:
        check(from_json(json), ORDERS)
    assert caught.value.path == path
    assert says in str(caught.value)


def test_depth_is_bounded_from_json_and_from_python() -> None:
    json: Any = ["region", "=", 1]
    where: Filter = c.region == 1
    for _ in range(limits.FILTER_DEPTH_MAX):
        json, where = {"and": [json]}, (where | (c.region == 2)) & (c.region == 3)
    with pytest.raises(InvalidQuery, match="nested deeper than 16"):
        from_json(json)
    with pytest.raises(InvalidQuery, match="nested deeper than 16"):
        check(where, ORDERS)


def test_only_filterable_columns_may_be_used() -> None:
    with pytest.raises(InvalidQuery, match="no filterable column 'price'") as caught:
        check(c.price > 1, ORDERS, filterable={"region"})
    assert caught.value.hint == "Filterable columns are: region."


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (c.region == 7.0, 7),
        (c.region == "7", 7),
        (c.region > 7.5, Decimal("7.5")),
        (c.price == 0.1, Decimal("0.1")),
        (c.price == "1.50", Decimal("1.50")),
        (c.placed > "2026-01-01T02:00:00+02:00", dt.datetime(2026, 1, 1, tzinfo=dt.UTC)),
        (c.placed > "2026-01-01", dt.datetime(2026, 1, 1, tzinfo=dt.UTC)),
        (c.placed > "infinity", "infinity"),
        (c.local > "2026-01-01T00:00:00", dt.datetime(2026, 1, 1)),
        (c.mood == "happy", "happy"),
        (c.ip == "10.0.0.1", "10.0.0.1"),
    ],
)
def test_constants_take_the_type_of_their_column(where: Any, value: Any) -> None:
    checked: Any = check(where, ORDERS)
    assert checked.value == value
    assert type(checked.value) is type(value)


A_AND_B = [
    # NOT (a > 1 OR b = 2) for every combination of true, false and unknown
    (2, 2, False), (2, 0, False), (2, None, False),
    (0, 2, False), (0, 0, True), (0, None, False),
    (None, 2, False), (None, 0, False), (None, None, False),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b", "expected"), A_AND_B)
def test_unknown_is_not_false_under_not(a: int | None, b: int | None, expected: bool) -> None:
    where = check(~((c.region > 1) | (c.id == 2)), ORDERS)
    assert compile_filter(where, ORDERS)({**ROW, "region": a, "id": b}) is expected


@pytest.mark.parametrize(
    ("where", "row", "decided"),
    [
        (c.name.ilike("zoe%"), {"name": "Zoe"}, True),
        (c.name.ilike("zoe%"), {"name": "Zoë"}, False),
        (c.name.ilike("zoë%"), {"name": "Zoe"}, False),
        (c.name.ilike("mia"), {"name": "mia"}, True),
        (c.name.ilike("mia"), {"name": "MIA"}, False),
        (c.name > "a", {"name": "b"}, False),
        (c.name > "a", {"name": None}, True),
        (c.name == "a", {"name": "b"}, True),
        (c.status.ilike("k%"), {"status": "Zoë"}, True),
        (c.status.ilike("k%"), {"status": "\u212a"}, False),
        (c.mood == "sad", {"mood": "ok"}, True),
        (c.mood > "sad", {"mood": "ok"}, False),
        (c.ip == "10.0.0.1", {"ip": "10.0.0.1"}, False),
        ((c.ip == "10.0.0.1") & (c.region == 1), {"ip": "x", "region": 2}, True),
        ((c.ip == "10.0.0.1") | (c.region == 1), {"ip": "x", "region": 1}, True),
        ((c.ip == "10.0.0.1") | (c.region == 1), {"ip": "x", "region": 2}, False),
    ],
)
def test_memory_reports_what_it_cannot_decide(where: Filter, row: Row, decided: bool) -> None:
    matches = compile_filter(check(where, ORDERS), ORDERS)
    if decided:
        matches({**ROW, **row})
    else:
        with pytest.raises(Undecided):
            matches({**ROW, **row})


@pytest.mark.parametrize(
    ("where", "text", "values"),
    [
        (c.region == 7, '"region" operator(pg_catalog.=) %s::bigint', (7,)),
        (c.region > 7.5, '"region" operator(pg_catalog.>) %s::numeric', (Decimal("7.5"),)),
        (c.region < 10**30, '"region" operator(pg_catalog.<) %s::numeric', (10**30,)),
        (
            c.region.in_(1, None),
            '"region" operator(pg_catalog.=) any (array[%s::bigint, %s::bigint])',
            (1, None),
        ),
        (c.region.in_(), "false", ()),
        (~c.mood.in_("sad"), 'not (("mood" operator(pg_catalog.=) %s::public.mood))', ("sad",)),
        (
            c.status.ilike("50\\%"),
            '"status" operator(pg_catalog.~~*) %s::pg_catalog.text',
            ("50\\%",),
        ),
        (from_json([]), "true", ()),
    ],
)
def test_sql_binds_every_value(where: Filter, text: str, values: tuple[Any, ...]) -> None:
    written = filter_sql(check(where, ORDERS), ORDERS)
    assert (written.text, written.values) == (text, values)


def test_identifiers_are_quoted() -> None:
    odd = 'a" or 1=1; --%s'
    table = Table(1, "public", "t", (Column(odd, "integer", "integer"),), (odd,))
    written = filter_sql(check(c[odd] == 1, table), table).text
    assert written == '"a"" or 1=1; --%%s" operator(pg_catalog.=) %s::bigint'


@pytest.mark.parametrize(
    ("where", "filed"),
    [
        (c.region == 7, ["= 7"]),
        ((c.region == 7) & (c.price > 5), ["= 7"]),
        (c.region.in_(1, 2), ["= 1", "= 2"]),
        ((c.region == 1) | (c.status == "x"), ["= 1", "= x"]),
        ((c.region > 1) & (c.region < 5), ["1 … 5"]),
        (~(c.region > 5), ["… 5"]),
        (c.status.like("asset-%"), ["asset- … asset."]),
        (c.region.is_null(), ["= None"]),
        (c.region != 7, None),
        ((c.region == 1) | (c.region != 7), None),
        (c.name > "a", None),
        (c.status.ilike("a%"), None),
        (from_json({"or": []}), []),
    ],
)
def test_a_filter_is_filed_under_its_narrowest_terms(
    where: Filter, filed: list[str] | None
) -> None:
    found = terms(check(where, ORDERS), ORDERS)
    assert (None if found is None else sorted(map(_aloud, found))) == filed


def _aloud(term: Any) -> str:
    if hasattr(term, "value"):
        return f"= {term.value}"
    return " … ".join(str(end[1]) if len(end) > 1 else "" for end in (term.low, term.high)).strip()


def test_equal_filters_have_one_canonical_form() -> None:
    one = check(from_json([["region", "=", 7], {"and": [["status", "in", ["b", "a"]]]}]), ORDERS)
    other = check(c.status.in_("a", "b", "a") & ~~(c.region == "7"), ORDERS)
    assert canonical(one) == canonical(other)
    assert canonical(one) != canonical(check(c.region == 7, ORDERS))
