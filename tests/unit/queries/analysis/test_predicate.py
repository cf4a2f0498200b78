"""Conditions out of a statement as the database prints it: what is understood, and what is not."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from enum import StrEnum
from typing import Any
from uuid import UUID

import pytest

from headwater.live.filters.filter import EVERYTHING, And, Compare, Filter, In, Like, to_json
from headwater.model import Column, Table
from headwater.queries.analysis.predicate import StatementParameter, bind, find

ORDERS = Table(
    1,
    "public",
    "orders",
    (
        Column("id", "integer", "integer"),
        Column("region", "smallint", "smallint"),
        Column("status", "text", "text", "C"),
        Column("name", "character varying", "character varying(8)", "C"),
        Column("amount", "numeric", "numeric(12,2)"),
        Column("paid", "boolean", "boolean"),
        Column("placed", "date", "date"),
        Column("at", "timestamp with time zone", "timestamp(3) with time zone"),
        Column("mood", "public.mood", "public.mood", enum=True),
        Column("code", "character", "character(3)", "C"),
        Column("rank", "integer", "public.positive"),
        Column("title", "text", "public.short", "C"),
        Column("spot", "point", "point"),
        Column("data", "jsonb", "jsonb"),
        Column("A B", "text", "text", "C"),
        Column("u", "uuid", "uuid"),
        Column("fancy", "text", "text", "a collation somebody made"),
    ),
    ("id",),
)
LINES = Table(2, "sales", "lines", (Column("id", "integer", "integer"),), ("id",))
TABLES = {("public", "orders"): ORDERS, ("sales", "lines"): LINES}
PARAMETERS = ("integer", "text", "integer[]", "numeric", "double precision", "public.mood[]")


def found(printed: str, **options: Any) -> Any:
    understood = find(printed, TABLES, PARAMETERS, **options)
    return {name: list(map(_shown, conditions)) for (_, name), conditions in understood.items()}


def _shown(where: Filter) -> Any:
    return _plain(to_json(where) if not isinstance(where, In | Like) else _raw(where))


def _raw(where: In | Like) -> Any:
    if isinstance(where, In):
        return [where.column, "in", where.values]
    return [where.column, "ilike" if where.fold else "like", where.pattern]


def _plain(value: Any) -> Any:
    match value:
        case StatementParameter() | Decimal():
            return str(value)
        case int() if not isinstance(value, bool):
            return str(value)
        case list() | tuple():
            return [_plain(each) for each in value]
        case dict():
            return {name: _plain(each) for name, each in value.items()}
    return value


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("(orders.id = 7)", ["id", "=", "7"]),
        ("(id = 7)", ["id", "=", "7"]),
        ("(orders.id = $1)", ["id", "=", "$1"]),
        ("($1 <= orders.id)", ["id", ">=", "$1"]),
        ("(orders.id <> '-5'::integer)", ["id", "!=", "-5"]),
        ("(orders.region = $1)", ["region", "=", "$1"]),
        ("(orders.region = '5000000000'::bigint)", ["region", "=", "5000000000"]),
        ("(orders.id = ($1)::bigint)", ["id", "=", "$1"]),
        ("(orders.amount > 1.5)", ["amount", ">", "1.5"]),
        ("(orders.amount > (5)::numeric)", ["amount", ">", "5"]),
        ("(orders.amount > $4)", ["amount", ">", "$4"]),
        ("(orders.status = 'it''s'::text)", ["status", "=", "it's"]),
        ("(orders.status = $2)", ["status", "=", "$2"]),
        ("((orders.name)::text = 'x'::text)", ["name", "=", "x"]),
        ("((orders.name)::text = $2)", ["name", "=", "$2"]),
        ("((orders.name)::text = ANY ((ARRAY['a'::character varying, 'b'::character varying])"
         "::text[]))", ["name", "in", ["a", "b"]]),
        ("(orders.id = ANY (ARRAY[1, $1]))", ["id", "in", ["1", "$1"]]),
        ("(orders.id = ANY ($3))", ["id", "in", "$3"]),
        ("(orders.mood = ANY ($6))", ["mood", "in", "$6"]),
        ("(orders.mood = 'glad'::public.mood)", ["mood", "=", "glad"]),
        ("(orders.status = NULL::text)", ["status", "in", [None]]),
        ("(orders.status ~~ 'a%'::text)", ["status", "like", "a%"]),
        ("(orders.status ~~* $2)", ["status", "ilike", "$2"]),
        ("((orders.name)::text ~~ 'a%'::text)", ["name", "like", "a%"]),
        ("orders.paid", ["paid", "=", True]),
        ("(orders.placed < '2026-01-31'::date)", ["placed", "<", "2026-01-31"]),
        ("(orders.at < '2026-01-31 12:00:00+00'::timestamp with time zone)",
         ["at", "<", "2026-01-31 12:00:00+00"]),
        ("(orders.u = '00000000-0000-0000-0000-000000000001'::uuid)",
         ["u", "=", "00000000-0000-0000-0000-000000000001"]),
        ('(orders."A B" = $2)', ["A B", "=", "$2"]),
        ("(orders.amount IS NULL)", ["amount", "is null"]),
        ("(orders.amount IS NOT NULL)", ["amount", "is not null"]),
        ("(NOT orders.paid)", {"not": ["paid", "=", True]}),
        ("(orders.paid IS TRUE)", {"and": [["paid", "is not null"], ["paid", "=", True]]}),
        ("((orders.id = 1) OR ((orders.id = 2) AND orders.paid))",
         {"or": [["id", "=", "1"], {"and": [["id", "=", "2"], ["paid", "=", True]]}]}),
        ("((orders.id = 1) OR ((orders.id = 2) AND (length(orders.status) = 1)))",
         {"or": [["id", "=", "1"], {"and": [["id", "=", "2"]]}]}),
        ("(NOT ((orders.id = 1) AND orders.paid))",
         {"not": {"and": [["id", "=", "1"], ["paid", "=", True]]}}),
    ],
)  # fmt: skip
def test_understood(condition: str, expected: Any) -> None:
    printed = f"BEGIN ATOMIC\n SELECT orders.id\n   FROM public.orders\n  WHERE {condition};\nEND"
    assert found(printed) == {"orders": [expected]}


@pytest.mark.parametrize(
    "condition",
    [
        "(orders.id = orders.region)",
        "((orders.id + 1) = 2)",
        "((orders.id)::text = '7'::text)",
        "(orders.id = (7)::double precision)",
        "(orders.id = $4)",
        "(orders.id = $9)",
        "((orders.amount)::double precision = $5)",
        "(orders.amount = 1.555::numeric(12,2))",
        "(lower(orders.status) = 'x'::text)",
        "(orders.status = ('x'::text COLLATE \"C\"))",
        "(orders.status OPERATOR(public.=) 'x'::text)",
        "(orders.status ~~ like_escape('a'::text, '!'::text))",
        "(orders.status ~ 'a'::text)",
        "(orders.status = E'a\\\\b'::text)",
        "(orders.code = 'abc'::bpchar)",
        "(orders.code ~~ 'abc'::text)",
        "((orders.rank)::integer = 7)",
        "(orders.rank = 7)",
        "((orders.title)::text = 'x'::text)",
        "(orders.spot IS NULL)",
        "(orders.data IS NULL)",
        "(orders.fancy = 'x'::text)",
        "(orders.mood = 'glad'::other.mood)",
        "(orders.id IS DISTINCT FROM 7)",
        "(orders.* IS NOT NULL)",
        "(orders.id = ANY ('{1,2}'::integer[]))",
        "(orders.id > ANY (ARRAY[1, 2]))",
        "(orders.id <> ANY (ARRAY[1, 2]))",
        "(orders.id = ALL (ARRAY[1, 2]))",
        "(orders.id = ANY (ARRAY[1, NULL::numeric]))",
        "(ROW(orders.id, orders.region) = ROW(1, 2))",
        "((orders.id = 1) OR (length(orders.status) = 1))",
        "(NOT ((orders.id = 1) AND (length(orders.status) = 1)))",
        "CASE WHEN orders.paid THEN true ELSE false END",
        "(other.id = 7)",
        "(orders.nothing = 7)",
        "true",
        "(orders.id = 7",
        "",
    ],
)
def test_not_understood(condition: str) -> None:
    assert found(f"SELECT orders.id FROM public.orders WHERE {condition}") == {}


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("SELECT 1 FROM public.orders o WHERE (o.id = 7)", {"orders": [["id", "=", "7"]]}),
        ("SELECT 1 FROM ONLY public.orders WHERE (id = 7)", {"orders": [["id", "=", "7"]]}),
        ("SELECT 1 FROM (public.orders o JOIN sales.lines l ON (((l.id = o.id) AND (l.id > 2))))"
         " WHERE (o.id = 7)", {"orders": [["id", "=", "7"]], "lines": [["id", ">", "2"]]}),
        ("SELECT 1 FROM public.orders o, sales.lines l WHERE ((o.id = 7) AND (l.id = 8))",
         {"orders": [["id", "=", "7"]], "lines": [["id", "=", "8"]]}),
        ("SELECT 1 FROM (public.orders o CROSS JOIN public.a_view v) WHERE (o.id = 7)",
         {"orders": [["id", "=", "7"]]}),
        ("SELECT 1 FROM public.orders o, sales.lines l WHERE ((o.id = 7) OR (l.id = 8))", {}),
        ("SELECT 1 FROM (public.orders o LEFT JOIN sales.lines l ON ((l.id = o.id)))"
         " WHERE (o.id = 7)", {}),
        ("SELECT 1 FROM (public.orders NATURAL JOIN sales.lines) WHERE (orders.id = 7)", {}),
        ("SELECT 1 FROM public.orders a, public.orders b WHERE (a.id = 7)", {}),
        ("SELECT 1 FROM public.orders o(region, id) WHERE (o.id = 7)", {}),
        ("SELECT 1 FROM public.orders, sales.lines WHERE (id = 7)", {}),
        ("SELECT 1 FROM other.orders WHERE (orders.id = 7)", {}),
        ("SELECT 1 FROM orders WHERE (orders.id = 7)", {}),
        ("SELECT 1 FROM public.orders TABLESAMPLE bernoulli (50) WHERE (orders.id = 7)", {}),
        ("SELECT (SELECT 1) FROM public.orders WHERE (orders.id = 7)", {}),
        ("SELECT 1 FROM public.orders WHERE ((orders.id = 7) AND"
         " (EXISTS ( SELECT FROM sales.lines)))", {}),
        ("WITH x AS ( SELECT 1) SELECT 1 FROM public.orders WHERE (orders.id = 7)", {}),
        ("SELECT 1 FROM public.orders WHERE (orders.id = 7) UNION ALL SELECT 1", {}),
        ("SELECT 1 FROM public.orders, LATERAL ( SELECT 1) x WHERE (orders.id = 7)", {}),
        ("SELECT 1 FROM public.orders, generate_series(1, 2) g(g) WHERE (orders.id = 7)", {}),
        ("SELECT 1 FROM public.orders, unnest(ARRAY[1, 2]) u(u) WHERE (orders.id = 7)", {}),
        ("SELECT 1 FROM ( SELECT * FROM public.orders) orders WHERE (orders.id = 7)", {}),
        ("SELECT 1 FROM (public.orders o JOIN sales.lines l ON (true)) j WHERE (j.id = 7)", {}),
        ("UPDATE public.orders SET id = 1 WHERE (orders.id = 7)", {}),
        ("SELECT 1; SELECT 2", {}),
        ("", {}),
        ("SELECT 1", {}),
        ("VALUES (1)", {}),
        ("SELECT 1 FROM public.orders WHERE " + "(" * 5000 + "orders.id = 7" + ")" * 5000, {}),
    ],
)  # fmt: skip
def test_where_conditions_are_sound(printed: str, expected: Any) -> None:
    assert found(printed) == expected


def test_words_for_times_are_printed_as_of_now() -> None:
    printed = "SELECT 1 FROM public.orders WHERE ((placed = '2026-01-31'::date) AND (id = 7))"
    assert found(printed, moments=False) == {"orders": [["id", "=", "7"]]}


class Status(StrEnum):
    OPEN = "open"


NOON = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("column", "type_", "value", "bound"),
    [
        ("id", "integer", 7, 7),
        ("id", "integer", "7", 7),
        ("id", "integer", " 7", None),
        ("id", "integer", True, None),
        ("id", "integer", 7.0, None),
        ("amount", "numeric", Decimal("7.50"), Decimal("7.50")),
        ("amount", "numeric", Decimal("sNaN"), None),
        ("status", "text", "open", "open"),
        ("status", "text", Status.OPEN, None),
        ("status", "text", 7, None),
        ("status", "text", "x" * 20_000, None),
        ("paid", "boolean", True, True),
        ("paid", "boolean", "yes", None),
        ("placed", "date", dt.date(2026, 1, 31), dt.date(2026, 1, 31)),
        ("placed", "date", NOON, None),
        ("placed", "date", "today", None),
        ("at", "timestamp with time zone", NOON, NOON),
        ("at", "timestamp with time zone", NOON.replace(tzinfo=None), None),
        ("at", "timestamp with time zone", "2026-01-31 12:00", None),
        ("mood", "public.mood", "glad", "glad"),
        ("u", "uuid", UUID(int=1), UUID(int=1)),
        ("u", "uuid", "no uuid", None),
    ],
)
def test_values_that_memory_reads_as_the_database_does(
    column: str, type_: str, value: Any, bound: Any
) -> None:
    where = bind([Compare(column, "=", StatementParameter(1, type_))], ORDERS, [value])
    assert where == (EVERYTHING if bound is None else Compare(column, "=", bound))


def test_null_is_neither_true_nor_false() -> None:
    unknown = In("id", (None,))
    assert bind([Compare("id", "=", StatementParameter(1, "integer"))], ORDERS, [None]) == unknown
    assert bind([In("id", StatementParameter(1, "integer"))], ORDERS, [None]) == unknown  # type: ignore[arg-type]
    pattern = StatementParameter(1, "text")
    assert bind([Like("status", pattern)], ORDERS, [None]) == In("status", (None,))  # type: ignore[arg-type]


def test_conditions_that_cannot_be_bound_are_left_out() -> None:
    region = Compare("region", "=", StatementParameter(1, "smallint"))
    status = Compare("status", "=", StatementParameter(2, "text"))
    assert bind([region, status], ORDERS, [7]) == Compare("region", "=", 7)
    assert bind([region, status], ORDERS, [7, "x"]) == And(
        (Compare("region", "=", 7), Compare("status", "=", "x"))
    )
    many = In("id", StatementParameter(1, "integer"))  # type: ignore[arg-type]
    assert bind([many], ORDERS, [list(range(5_000))]) == EVERYTHING
    assert bind([many], ORDERS, [[1, [2]]]) == EVERYTHING
    assert bind([many], ORDERS, [7]) == EVERYTHING
    assert bind([region] * 300, ORDERS, [7]) == EVERYTHING
