"""The time of the last change before a gap."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from headwater.model import Position
from headwater.pipeline.jobs import resnapshot
from headwater.pipeline.lake import delta, gaps
from headwater.pipeline.lake.events import STORED_EVENTS
from headwater.pipeline.lake.gaps import LakeGap
from headwater.pipeline.reading.lake import Lake

AT = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("seed", range(5))
def test_the_time_of_the_last_change(seed: int, tmp_path: Path) -> None:
    """Of those in the position. The numbers of transactions in the log before a restore are those
    of others in the present log, and times may have been set back."""
    chance, lake = random.Random(seed), Lake(str(tmp_path))
    delta.create(lake.events_path, STORED_EVENTS, ["day"])
    reached = Position("b", 5, 15, tuple(sorted(chance.sample(range(5, 15), 3))))
    assert resnapshot._last_time(lake, reached) == datetime(1970, 1, 1, tzinfo=UTC)
    known = []
    for seq in range(chance.randint(1, 20)):
        xid, log = chance.randrange(20), chance.choice(["b", "a", "bb"])
        at = AT + timedelta(minutes=chance.randrange(5_000))
        row = {
            "seq": seq, "xid": xid, "at": at, "committed_at": at, "position": f"{log}-{xid}:{xid}:",
            "schema_name": "public", "table_name": "t", "relation": 1, "shape": 1, "op": "insert",
            "key": "{}", "day": at.date(),
        }  # fmt: skip
        write_deltalake(lake.events_path, pa.Table.from_pylist([row], STORED_EVENTS), mode="append")
        known += [at] if log == "b" and reached.contains(xid) else []
    if chance.random() < 0.5:
        start = Position("b", 4, 4)
        gaps.add(lake.gaps_path, LakeGap(Position("a", 9, 9), start, AT, AT))
        known.append(AT)
    found = resnapshot._last_time(lake, reached)
    assert found == max(known, default=datetime(1970, 1, 1, tzinfo=UTC))
