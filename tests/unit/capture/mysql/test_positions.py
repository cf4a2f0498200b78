"""Positions print and parse, and compare by GTID or by place."""

from __future__ import annotations

import random

import pytest

from headwater.capture.mysql.positions import GtidSet, Position, contains_gtids, mariadb_gtids
from headwater.errors import PositionLost

A, B = "3e11fa47-71ca-11e1-9e33-c80aa9429562", "aaaaaaaa-71ca-11e1-9e33-c80aa9429562"


@pytest.mark.parametrize(
    "text",
    [
        "mariadb 1 binlog.000003:4711 0-1-55",
        "mariadb 1 binlog.000003:4711 -",
        "mariadb 1 a name with: spaces.000003:4711 0-1-55,1-2-3",
        f"mysql {A} mysql-bin.1000000:5000000000 {A}:1-5:7,{B}:1",
    ],
)
def test_text(text: str) -> None:
    assert str(Position.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "x", "oracle 1 b.1:4 -", "mysql 1 b.1 -", "mysql 1 b.1:x -", "1"]
)
def test_nonsense(text: str) -> None:
    with pytest.raises(PositionLost) as lost:
        Position.parse(text)
    assert "resnapshot" in str(lost.value.hint)


@pytest.mark.parametrize(
    ("position", "mark", "contained"),
    [
        ("mariadb 1 b.000009:900 -", "mariadb 1 b.000010:4 -", False),
        ("mariadb 1 b.000010:4 -", "mariadb 1 b.000009:900 -", True),
        ("mariadb 1 b.000010:4 -", "mariadb 1 b.000010:4 -", True),
        # The same server: its places decide, since one transaction may have no GTID of ours yet.
        ("mariadb 1 b.000001:90 0-1-5", "mariadb 1 b.000001:80 0-1-5", True),
        ("mariadb 1 b.000001:80 0-1-5", "mariadb 1 b.000001:90 0-1-5", False),
        # Another server: GTIDs decide.
        ("mariadb 2 x.000001:4 0-2-6", "mariadb 1 b.000009:900 0-1-5", True),
        ("mariadb 2 x.000099:4 0-1-4", "mariadb 1 b.000009:900 0-1-5", False),
        ("mariadb 2 x.000001:4 0-2-6", "mariadb 1 b.000009:900 0-1-5,1-1-1", False),
        ("mariadb 2 x.000001:4 -", "mariadb 1 b.000001:4 -", False),
        (f"mysql {A} b.000001:4 {A}:1-5", f"mysql {A} b.000001:900 {A}:1-5", True),
        (f"mysql {A} b.000001:900 {A}:1-4", f"mysql {A} b.000001:4 {A}:1-5", False),
        (f"mysql {B} b.000001:4 {A}:1-5,{B}:1", f"mysql {A} b.000009:900 {A}:2-5", True),
        (f"mysql {A} b.000001:4 -", f"mariadb {A} b.000001:4 -", False),
    ],
)
def test_contains(position: str, mark: str, contained: bool) -> None:
    assert (Position.parse(position) >= Position.parse(mark)) is contained


def test_mariadb_gtids() -> None:
    assert mariadb_gtids("") == {}
    assert contains_gtids("mariadb", "0-1-5", "")
    assert not contains_gtids("mariadb", "", "0-1-5")


@pytest.mark.parametrize("seed", range(20))
def test_gtid_sets_are_sets(seed: int) -> None:
    rng = random.Random(seed)
    one, other = GtidSet.parse(""), GtidSet.parse("")
    first, second = set[tuple[str, int]](), set[tuple[str, int]]()
    for _ in range(60):
        gtid = rng.choice([A, B]), rng.randint(1, 30)
        for gtids, plain in ((one, first), (other, second)):
            if rng.random() < 0.7:
                gtids.add(*gtid)
                plain.add(gtid)
        assert one.contains(other) == (second <= first)
    assert str(GtidSet.parse(str(one))) == str(one)
    assert _numbers(str(one)) == first


def _numbers(text: str) -> set[tuple[str, int]]:
    found = set[tuple[str, int]]()
    for each in filter(None, text.split(",")):
        server, *ranges = each.split(":")
        for piece in ranges:
            start, _, end = piece.partition("-")
            found |= {(server, n) for n in range(int(start), int(end or start) + 1)}
    return found


def test_gtids_as_a_replica_sends_them() -> None:
    encoded = GtidSet.parse(f"{A.upper()}:1-3:7").encoded()
    assert encoded == bytes.fromhex(
        "0100000000000000" + A.replace("-", "") + "0200000000000000"
        "0100000000000000" + "0400000000000000" + "0700000000000000" + "0800000000000000"
    )  # fmt: skip
