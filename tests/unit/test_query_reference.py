"""The examples in the reference run, and its table of errors is true."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from headwater import connect
from headwater.errors import InvalidQuery
from headwater.live.filters.filter import _OPERANDS
from headwater.live.query import BoundQuery, LiveQuery
from headwater.model import Column, Table
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
REFERENCE = (DOCS / "reference" / "live-query.md").read_text()
EXPLANATION = (DOCS / "explanation" / "live-queries.md").read_text()

ORDERS = Table(
    1,
    "public",
    "orders",
    (
        Column("id", "bigint", "bigint"),
        Column("region", "integer", "integer"),
        Column("status", "text", "text", "C"),
        Column("price", "numeric", "numeric(12,2)"),
        Column("note", "text", "text", "default"),
        Column("placed", "timestamp with time zone", "timestamptz"),
        Column("shipped", "timestamp with time zone", "timestamptz"),
    ),
    ("id",),
)


@pytest.mark.parametrize("example", re.findall(r"```json\n(.*?)```", REFERENCE, re.DOTALL))
def test_json_examples_are_valid(example: str) -> None:
    query = LiveQuery.from_json(json.loads(example))
    BoundQuery(query, ORDERS)
    assert LiveQuery.from_json(query.to_json()) == query


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", REFERENCE, re.DOTALL))
def test_python_examples_run(example: str) -> None:
    names: dict[str, Any] = {"hw": connect("http://localhost:8484")}
    exec(example, names)
    BoundQuery(LiveQuery.from_json(names["orders"]._query), ORDERS)


@pytest.mark.parametrize(("query", "error"), re.findall(r"\| `(\{.*\})` \| `(.*)` \|", REFERENCE))
def test_errors_read_as_printed(query: str, error: str) -> None:
    with pytest.raises(InvalidQuery) as caught:
        BoundQuery(LiveQuery.from_json(json.loads(query)), ORDERS)
    assert str(caught.value) == error


@pytest.mark.parametrize("operator", _OPERANDS)
def test_every_operator_is_documented(operator: str) -> None:
    assert f"`{operator}`" in REFERENCE
    assert f"`{operator.removeprefix('not ')}`" in EXPLANATION
