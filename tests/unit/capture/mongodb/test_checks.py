"""What a check says about a server and about a definition."""

from __future__ import annotations

import pytest

from headwater.capture.mongodb.checks import collection_problems, server_problems
from headwater.capture.mongodb.collections import Collection
from headwater.capture.mongodb.connection import Server
from headwater.capture.source import SourceDefinition, TableSpec


@pytest.mark.parametrize(
    ("server", "what"),
    [
        (Server((8, 0, 4), True, False), []),
        (Server((6, 0, 0), False, True), []),
        (Server((8, 0, 4), False, False), ["not a member of a replica set"]),
        (Server((4, 4, 29), True, False), ["MongoDB 4.4.29, which is too old"]),
    ],
)
def test_servers(server: Server, what: list[str]) -> None:
    found = server_problems(server)
    assert len(found) == len(what)
    assert all(text in problem.what for text, problem in zip(what, found, strict=True))
    assert all(problem.fix and not problem.warning for problem in found)


FOUND = {
    "orders": Collection("orders", "collection", False),
    "paid": Collection("paid", "view", False),
    "log": Collection("log", "capped collection", False),
    "heat": Collection("heat", "timeseries", False),
}


@pytest.mark.parametrize(
    ("tables", "what", "warning"),
    [
        ([TableSpec("orders")], None, False),
        ([TableSpec("ordres")], "ordres does not exist", True),
        ([TableSpec("paid")], "paid is a view", False),
        ([TableSpec("log")], "log is a capped collection, whose oldest", False),
        ([TableSpec("heat")], "heat is a timeseries, which has no change stream", False),
        ([TableSpec("system.views")], "not the name of a collection", False),
        ([TableSpec("orders", types={"a": "inet"})], "cannot have the type", False),
        ([TableSpec("orders", types={"a": "text"}, exclude=("a",))], "and left out", True),
        ([TableSpec("orders"), TableSpec("orders")], "same mirror", False),
        ([], None, False),
    ],
)
def test_collections(tables: list[TableSpec], what: str | None, warning: bool) -> None:
    definition = SourceDefinition("shop", "mongodb://db/shop", "shop", tuple(tables))
    problems = collection_problems(definition, FOUND)
    if what is None:
        assert problems == []
    else:
        (problem,) = problems
        assert what in problem.what
        assert problem.warning is warning
        assert problem.fix
