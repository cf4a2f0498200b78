"""Functions as they are registered: their arguments, and when two calls are the same."""

from __future__ import annotations

import dataclasses
import enum
import ipaddress
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pydantic
import pytest

from headwater.errors import ConfigError, InvalidQuery
from headwater.identity import Identity
from headwater.queries.arguments import key_of
from headwater.queries.functions import Mutation, Query, sql_query
from headwater.queries.registry import Functions

if TYPE_CHECKING:
    from somewhere_else import OnlyForCheckers  # type: ignore[import-not-found]


class Area(msgspec.Struct):
    north: float
    south: float = 0.0


@dataclasses.dataclass
class Page:
    size: int
    after: int | None = None


class Customer(pydantic.BaseModel):
    name: str
    age: int = 0


class Colour(enum.Enum):
    RED = "red"


class Opaque:
    pass


async def everything(  # type: ignore[no-untyped-def]
    ctx: OnlyForCheckers,
    number: int,
    flag: bool = False,
    text: str | None = None,
    when: datetime | None = None,
    day: date | None = None,
    amount: Decimal | None = None,
    id: uuid.UUID | None = None,
    area: Area | None = None,
    page: Page | None = None,
    customer: Customer | None = None,
    colour: Colour | None = None,
    address: ipaddress.IPv4Address | None = None,
    state: Literal["open", "paid"] = "open",
    tags: list[str] = [],  # noqa: B006
    anything=None,
) -> Any: ...


EVERYTHING = Query("everything", everything)
AN_ID = uuid.UUID("0b0e8a1c-6f0e-4d3a-9a63-2f5a3c1f9d11")


@pytest.mark.parametrize(
    ("name", "given", "bound"),
    [
        ("number", 5, 5),
        ("flag", True, True),
        ("text", None, None),
        ("when", "2026-01-02T03:04:05Z", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("when", datetime(2026, 1, 2, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)),
        ("day", "2026-01-02", date(2026, 1, 2)),
        ("amount", "12.50", Decimal("12.50")),
        ("amount", Decimal("12.50"), Decimal("12.50")),
        ("id", str(AN_ID), AN_ID),
        ("id", AN_ID, AN_ID),
        ("area", {"north": 1}, Area(1.0)),
        ("area", Area(2.0), Area(2.0)),
        ("page", {"size": 10}, Page(10)),
        ("customer", {"name": "Ann"}, Customer(name="Ann")),
        ("customer", Customer(name="Ann", age=3), Customer(name="Ann", age=3)),
        ("colour", "red", Colour.RED),
        ("address", "10.0.0.1", ipaddress.IPv4Address("10.0.0.1")),
        ("state", "paid", "paid"),
        ("tags", ["a"], ["a"]),
        ("tags", ("a",), ["a"]),
        ("anything", {"a": [1]}, {"a": [1]}),
    ],
)
def test_arguments(name: str, given: Any, bound: Any) -> None:
    value = EVERYTHING.bind({"number": 1, name: given}).values[name]
    assert value == bound
    assert type(value) is type(bound)


def test_a_default_equals_the_same_value_given() -> None:
    short, long = EVERYTHING.bind({"number": 1}), EVERYTHING.bind({"number": 1, "flag": False})
    assert short.values["state"] == "open"
    assert short.key == long.key


@pytest.mark.parametrize(
    ("given", "path", "reason"),
    [
        ({}, "args", "missing required field number"),
        ({"number": "5"}, "args.number", "expected int, got str"),
        ({"number": True}, "args.number", "expected int, got bool"),
        ({"number": None}, "args.number", "expected int, got null"),
        ({"number": 1, "tags": ["a", 1]}, "args.tags[1]", "expected str, got int"),
        ({"number": 1, "area": {"north": "x"}}, "args.area.north", "expected float, got str"),
        ({"number": 1, "page": {}}, "args.page", "missing required field size"),
        ({"number": 1, "customer": {"age": 1}}, "args.customer", "name: Field required"),
        ({"number": 1, "colour": "blue"}, "args.colour", "invalid enum value 'blue'"),
        ({"number": 1, "address": "ten"}, "args.address", "expected 4 octets in 'ten'"),
        ({"number": 1, "address": 10}, "args.address", "expected IPv4Address, got int"),
        ({"number": 1, "when": "soon"}, "args.when", "invalid RFC3339"),
        ({"number": 1, "more": 1}, "args", "contains unknown field more"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], path: str, reason: str) -> None:
    with pytest.raises(InvalidQuery) as caught:
        EVERYTHING.bind(given)
    assert caught.value.path == path
    assert reason in str(caught.value)
    assert "query everything takes number, flag" in (caught.value.hint or "")


def test_arguments_nested_without_end() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(InvalidQuery):
        EVERYTHING.bind({"number": 1, "anything": nested})
    while nested:  # or taking it apart would overflow the stack of a debug build
        nested = nested.pop()


DIFFERENT: list[Any] = [
    1, 1.0, True, "1", b"1", None, Decimal(1), Decimal("1.0"), [1], [1.0], [True], ["1"], (1,),
    {1}, {"a": 1}, {"a": 1.0}, {"a": "1"}, {1: "a"}, {"1": "a"}, [[1]], [[1.0]], 0, 0.0, -0.0,
    False, "", [], {}, (), float("nan"), float("inf"), Area(1), Page(1), Page(1, 1),
    Customer(name="1"), Colour.RED, "red", date(2026, 1, 1), datetime(2026, 1, 1),
    datetime(2026, 1, 1, tzinfo=UTC), AN_ID, str(AN_ID), {"a": None}, {"a": []}, {"a": {}},
]  # fmt: skip


def test_values_of_different_value_or_type_have_different_keys() -> None:
    assert len({key_of(value) for value in DIFFERENT}) == len(DIFFERENT)
    assert len({key_of([value]) for value in DIFFERENT}) == len(DIFFERENT)


@pytest.mark.parametrize("make", [lambda: [*DIFFERENT], lambda: {"b": 1, "a": [2]}])
def test_equal_values_have_one_key(make: Callable[[], Any]) -> None:
    assert key_of(make()) == key_of(make())
    assert hash(key_of(make())) == hash(key_of(make()))


def test_the_order_of_names_does_not_count() -> None:
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})


# What cannot be registered ----------------------------------------------------------------------


async def plain(ctx: Any, region: int) -> Any: ...
async def no_context() -> None: ...
async def only_named(*, ctx: Any) -> None: ...
async def many(ctx: Any, *regions: int) -> None: ...
async def options(ctx: Any, **options: int) -> None: ...
async def nameless(ctx: Any, region: int, /) -> None: ...
async def unresolved(ctx: Any, region: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821
async def opaque(ctx: Any, region: Opaque) -> None: ...
async def opaque_within(ctx: Any, region: dict[str, list[Opaque]]) -> None: ...
async def yields(ctx: Any) -> Any:
    yield 1


def yields_in_thread(ctx: Any) -> Any:
    yield 1


async def returns_opaque(ctx: Any) -> list[Opaque] | None: ...


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (no_context, "query no_context takes no context"),
        (only_named, "query only_named takes no context"),
        (many, "query many: *regions cannot be checked"),
        (options, "query options: **options cannot be checked"),
        (nameless, "query nameless: argument region has no name for callers"),
        (unresolved, "query unresolved: a type hint cannot be resolved: name 'Nowhere'"),
        (opaque, "query opaque: argument region: Opaque is not a type that JSON"),
        (opaque_within, "query opaque_within: argument region: Opaque is not"),
        (yields, "query yields is a generator"),
        (yields_in_thread, "query yields_in_thread is a generator"),
        (returns_opaque, "query returns_opaque: what it returns: Opaque is not"),
    ],
)
def test_functions_that_cannot_be_registered(function: Any, reason: str) -> None:
    functions = Functions()
    with pytest.raises(ConfigError) as caught:
        functions.query(function)
    assert reason in str(caught.value)
    assert caught.value.hint
    assert not functions.queries


@pytest.mark.parametrize("name", ["", "5", "a b", "a/b", "-a", "ä", "a" * 101])
def test_names_that_cannot_be(name: str) -> None:
    functions = Functions()
    register = functions.mutation(name)
    assert not isinstance(register, Mutation)
    with pytest.raises(ConfigError, match="cannot be the name of a mutation"):
        register(plain)


def test_a_name_is_registered_once_of_each_kind() -> None:
    functions = Functions()
    functions.query(plain)
    functions.mutation(plain)
    with pytest.raises(ConfigError, match="query plain is registered twice"):
        functions.query("plain", sql="select 1")
    assert list(functions.queries) == list(functions.mutations) == ["plain"]


def test_a_value_that_is_not_a_function() -> None:
    register = Functions().query("name")
    assert not isinstance(register, Query)
    with pytest.raises(ConfigError, match="5 is not a function"):
        register(5)  # type: ignore[arg-type]


# SQL ---------------------------------------------------------------------------------------------


def test_the_arguments_of_sql_are_its_placeholders() -> None:
    query = sql_query("q", "select %(a)s, %(b)s, %(a)s")
    assert query.bind({"a": 1, "b": ["x"]}).values == {"a": 1, "b": ["x"]}
    with pytest.raises(InvalidQuery, match=r"args: missing required field b"):
        query.bind({"a": 1})
    with pytest.raises(InvalidQuery, match=r"args\.a: expected"):
        query.bind({"a": {}, "b": 1})


def test_the_arguments_of_sql_with_types() -> None:
    query = sql_query("q", "select %(a)s", args={"a": int})
    with pytest.raises(InvalidQuery, match=r"args\.a: expected int, got str"):
        query.bind({"a": "1"})


@pytest.mark.parametrize(
    ("sql", "args", "reason"),
    [
        ("select %s", None, "its arguments have no names"),
        ("select %(a)s", {"b": int}, "args are b, and its placeholders a"),
        ("select 1", {"b": int}, "args are b, and its placeholders none"),
        ("select 5 % 3", None, "'% ' is not a placeholder"),
    ],
)
def test_sql_that_cannot_be_registered(sql: str, args: Any, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Functions().query("q", sql=sql, args=args)
    assert reason in str(caught.value)


# Who shares ---------------------------------------------------------------------------------------

ANN = Identity(user="ann", tenant="acme", role="clerk", claims={"sub": "ann", "exp": 1})


@pytest.mark.parametrize(
    ("options", "known"),
    [
        ({}, Identity(user="ann", tenant="acme", role="clerk", claims={"sub": "ann"})),
        ({"share": "tenant"}, Identity(tenant="acme", role="clerk")),
        ({"share": "everyone"}, Identity(role="clerk")),
        ({"share": "everyone", "trusted": True}, Identity()),
    ],
)
def test_which_claims_a_query_sees_of_its_caller(options: dict[str, Any], known: Identity) -> None:
    assert Query("q", plain, **options).identity(ANN) == known


def test_a_way_of_sharing_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="share='everything' is unknown"):
        Query("q", plain, share="everything")  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_that_leaves_no_time(timeout: float) -> None:
    with pytest.raises(ConfigError, match="is not more than 0"):
        Query("q", plain, timeout=timeout)


async def test_calls_before_the_start() -> None:
    query = Functions().query(plain)
    assert isinstance(query, Query)
    with pytest.raises(ConfigError, match="query plain is called while Headwater is not running"):
        await query(region=5)
