"""The pipeline of a change stream, applied by the stand-in's own operators.

A pushed filter must let every row pass that matches in PostgreSQL's sense. The judge here is a
plain reading of the filter over the row's texts.
"""

from __future__ import annotations

from typing import Any

import bson
import pytest
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headwater.capture.mongodb.columns import Layout
from headwater.capture.mongodb.connection import CODEC
from headwater.capture.mongodb.pipeline import places, pushed, stream_pipeline
from headwater.capture.source import TableSpec
from tests.support.mongodb.events import shaped
from tests.support.mongodb.matching import matches

PLAIN = Layout(TableSpec("plain"))
PUBLIC = Layout(TableSpec("public", exclude=("secret", "card.number")))
NARROW = Layout(TableSpec("narrow", columns=("name", "card.type", "items.sku")))
LAYOUTS = [NARROW, PLAIN, PUBLIC]
PLACES = places(LAYOUTS)

DOCUMENT = {
    "_id": 1, "name": "Zoë", "secret": "s", "card": {"number": 4, "type": "x"},
    "items": [{"sku": "a", "price": 3}, 5],
}  # fmt: skip


def through(event: dict[str, Any], layouts: list[Layout] = LAYOUTS, **options: Any) -> Any:
    """The event after all stages, or None."""
    stages = stream_pipeline(layouts, everything=False, splits=False, **options)
    return shaped(event, stages)


def event(coll: str, kind: str = "insert", **fields: Any) -> dict[str, Any]:
    return {
        "_id": {"_data": "82"}, "operationType": kind, "ns": {"db": "shop", "coll": coll},
        "documentKey": {"_id": 1, "region": "shard key"}, "clusterTime": 5,
        "updateDescription": {"updatedFields": {"secret": "s"}}, "fullDocument": DOCUMENT, **fields,
    }  # fmt: skip


def test_documents_have_only_the_fields_of_their_collection() -> None:
    found = {
        layout.name: through(event(layout.name))[PLACES[layout.name].after] for layout in LAYOUTS
    }
    assert found["plain"] == DOCUMENT
    assert found["public"] == {
        "_id": 1, "name": "Zoë", "card": {"type": "x"}, "items": DOCUMENT["items"],
    }  # fmt: skip
    assert found["narrow"] == {
        "_id": 1, "name": "Zoë", "card": {"type": "x"}, "items": [{"sku": "a"}],
    }  # fmt: skip


def test_a_field_left_out_is_nowhere_in_the_event() -> None:
    sent = through(event("public", "update", fullDocumentBeforeChange=DOCUMENT))
    assert "secret" not in str(sent)
    assert "region" not in str(sent)
    assert sent[PLACES["public"].before]["card"] == {"type": "x"}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_document_that_vanished_is_none(layout: Layout) -> None:
    sent = through(event(layout.name, "update", fullDocument=None))
    assert sent.get(PLACES[layout.name].after) is None
    assert sent["_id"] == {"_data": "82"}
    assert sent["documentKey"] == {"_id": 1}


@pytest.mark.parametrize(
    ("sent", "passes"),
    [
        (event("plain", "delete"), True),
        (event("other"), False),
        (event("plain", "drop"), True),
        (event("other", "drop"), False),
        (event("other", "rename", to={"db": "shop", "coll": "plain"}), True),
        (event("other", "rename", to={"db": "shop", "coll": "another"}), False),
        (event("plain", "createIndexes"), False),
        ({"_id": 1, "operationType": "invalidate"}, True),
        ({"_id": 1, "operationType": "dropDatabase", "ns": {"db": "shop"}}, True),
    ],
)
def test_events_that_pass(sent: dict[str, Any], passes: bool) -> None:
    assert (through(sent) is not None) is passes


def test_all_collections_but_those_of_the_server() -> None:
    stages = stream_pipeline([], everything=True, splits=True)
    assert shaped(event("any"), stages[:-1]) is not None
    assert shaped(event("system.views"), stages[:-1]) is None
    assert stages[-1] == {"$changeStreamSplitLargeEvent": {}}


def filtered(where: Any) -> Layout:
    types = {"status": "text", "total.amount": "numeric", "count": "integer", "tags": "text[]"}
    return Layout(TableSpec("orders", where=where, types=types))


def test_only_inserts_are_filtered() -> None:
    layouts = [filtered(["status", "=", "open"]), PLAIN]
    closed = {"fullDocument": {"_id": 1, "status": "closed"}}
    assert through(event("orders", "insert", **closed), layouts) is None
    for kind in ("update", "replace", "delete"):
        assert through(event("orders", kind, **closed), layouts) is not None
    assert through(event("plain", "insert", **closed), layouts) is not None


@pytest.mark.parametrize(
    "where",
    [
        ["status", "<", "open"],
        ["status", "like", "o%"],
        ["status", "is null"],
        ["status", "=", "\ufffd"],
        ["total_amount", "=", 0.1],
        ["total_amount", "=", 2**60],
        ["tags", "is not null"],
        ["_id", "=", "1"],
        ["unknown", "=", 1],
        {"not": ["status", "=", "open"]},
        {"or": [["status", "=", "open"], ["status", "like", "o%"]]},
        {"or": []},
        [],
        None,
        "nonsense",
    ],
)
def test_what_is_not_pushed(where: Any) -> None:
    assert pushed(filtered(where)) is None


CONDITIONS: st.SearchStrategy[Any] = st.one_of(
    st.tuples(
        st.sampled_from(["total_amount", "count"]),
        st.sampled_from(["=", "!=", "<", "<=", ">", ">="]),
        st.integers(-3, 3),
    ).map(list),
    st.tuples(st.just("status"), st.sampled_from(["=", "!="]), st.sampled_from("abc")).map(list),
    st.tuples(
        st.just("status"), st.sampled_from(["in", "not in"]), st.lists(st.sampled_from("abc"))
    ).map(list),
    st.tuples(st.sampled_from(["status", "count"]), st.just("is not null")).map(list),
)
FILTERS = st.recursive(
    CONDITIONS,
    lambda parts: st.one_of(
        st.lists(parts, max_size=3).map(lambda each: {"and": each}),
        st.lists(parts, max_size=3).map(lambda each: {"or": each}),
    ),
    max_leaves=5,
)
NUMBERS = st.one_of(
    st.none(), st.integers(-4, 4), st.integers(-4, 4).map(Int64), st.integers(-4, 4).map(str),
    st.integers(-8, 8).map(lambda n: n / 2), st.integers(-4, 4).map(lambda n: Decimal128(str(n))),
    st.sampled_from(["x", [1], [], {"amount": 1}, True, float("nan"), float("inf")]),
)  # fmt: skip
DOCUMENTS = st.fixed_dictionaries(
    {"_id": st.just(1)},
    optional={
        "status": st.one_of(st.sampled_from("abcd"), st.none(), st.just(["a"]), st.integers(0, 2)),
        "count": NUMBERS,
        "total": st.one_of(NUMBERS, st.fixed_dictionaries({}, optional={"amount": NUMBERS})),
    },
)


@example(["total_amount", ">", 3], {"_id": 1, "total": {"amount": float("nan")}})
@settings(max_examples=500)
@given(FILTERS, DOCUMENTS)
def test_a_row_that_matches_is_never_held_back(where: Any, document: dict[str, Any]) -> None:
    layout = filtered(where)
    document = bson.decode(bson.encode(document), CODEC)
    row = dict(zip([c.name for c in layout.table.columns], layout.row(document), strict=True))
    condition = pushed(layout)
    if condition is not None and holds(where, row):
        assert matches(document, condition)


def holds(where: Any, row: dict[str, Any]) -> bool:
    """Whether SQL says true; with these filters, unknown and false are the same."""
    match where:
        case {"and": parts}:
            return all(holds(part, row) for part in parts)
        case {"or": parts}:
            return any(holds(part, row) for part in parts)
        case [column, "is not null"]:
            return row[column] is not None
        case [column, operator, operand]:
            return row[column] is not None and compares(column, row[column], operator, operand)
    raise AssertionError(where)


def compares(column: str, text: str, operator: str, operand: Any) -> bool:
    value: Any = text if column == "status" else float(text)
    match operator:
        case "=":
            return bool(value == operand)
        case "!=":
            return bool(value != operand)
        case "in":
            return value in operand
        case "not in":
            return value not in operand
    if value != value:  # NaN is above all numbers.
        return operator in (">", ">=")
    tests = {"<": value < operand, "<=": value <= operand, ">": value > operand}
    return bool(tests.get(operator, value >= operand))
