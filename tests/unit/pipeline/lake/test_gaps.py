"""Gaps of all tables and of one table."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
from deltalake import write_deltalake

from headwater.model import Position
from headwater.pipeline.lake import gaps
from headwater.pipeline.lake.gaps import GAPS, LakeGap

NOON = datetime(2026, 11, 18, 12, tzinfo=UTC)


def gap(hour: int, relation: int | None = None, reason: str | None = None) -> LakeGap:
    at = NOON + timedelta(hours=hour)
    since, until = Position("a", hour, hour), Position("a", hour + 1, hour + 1)
    return LakeGap(since, until, at, at + timedelta(hours=1), relation, reason)


def test_a_table_has_its_own_gaps_and_those_of_the_lake(tmp_path: Path) -> None:
    path = str(tmp_path / "gaps")
    assert gaps.load(path, 7) == []
    for each in (gap(3, 7, "drift"), gap(1), gap(2, 8)):
        gaps.add(path, each)
    assert gaps.load(path) == [gap(1)]
    assert gaps.load(path, 7) == [gap(1), gap(3, 7, "drift")]
    assert gaps.every(path) == [gap(1), gap(2, 8), gap(3, 7, "drift")]
    assert str(gaps.load(path, 7)[1]).endswith("16:00:00 UTC (drift)")


def test_gaps_of_an_earlier_release_are_of_all_tables(tmp_path: Path) -> None:
    path = str(tmp_path / "gaps")
    row = {"since": "a-1:1:", "until": "a-2:2:", "since_at": NOON, "until_at": NOON}
    early = pa.schema([GAPS.field(name) for name in row])
    write_deltalake(path, pa.Table.from_pylist([row], early))
    assert [each.relation for each in gaps.load(path, 7)] == [None]
    gaps.add(path, gap(1, 7))
    assert [each.relation for each in gaps.load(path, 7)] == [None, 7]
