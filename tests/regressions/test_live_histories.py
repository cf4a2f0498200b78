"""Histories whose result once differed from the database, shrunk."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headwater.testing.oracle import Connection, History, connect, operation, play

put_0, put_1, put_2 = (operation("put", row) for row in range(3))
delete_0 = operation("delete", 0)

HISTORIES: dict[str, History] = {
    # The second transaction touched no row of the window, and its outcome lost the need of the
    # first.
    "a need outlives a transaction that changes nothing": History(
        columns=("r",),
        query={"order": [], "limit": 1},
        flushes=(((put_0,),), ((put_1,),), ((delete_0,), (put_2,))),
        cushion=0,
    ),
    # Two images were compared at places where an entry keeps other columns.
    "a streamed row changes": History(
        columns=("i", "n"),
        query={"mode": "streamed"},
        flushes=(((114,),), ((486,),)),
    ),
    # `not (NULL)` is not true: the question about the order lost rows before the bound.
    "a row whose order column is NULL stands before the horizon": History(
        columns=("m",),
        query={"order": ["m desc"], "limit": 2},
        flushes=(
            ((operation("put", 0, 1), operation("put", 1, 2), operation("put", 2, 3)),),
            ((operation("put", 3, 0),),),
            ((operation("put", 4, 0), operation("put", 0, 2)),),
        ),
        cushion=0,
    ),
}


@pytest.fixture(scope="module")
def connection(postgres_url: str) -> Iterator[Connection]:
    with connect(postgres_url) as connection:
        yield connection


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES.keys())
def test_a_shrunk_history(connection: Connection, history: History) -> None:
    play(connection, history)
