"""Any chain of batches covers every number of a pair exactly once."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.model import Position
from headwater.pipeline.stream.offsets import Offset, range_between
from headwater.pipeline.stream.planning import _split

ONE, TWO, THREE = (Position("a", xid, xid) for xid in (5, 9, 12))


@given(st.lists(st.integers(1, 500), unique=True, max_size=8))
def test_batches_of_a_pair_cover_every_number_once(cuts: list[int]) -> None:
    chain = [Offset(ONE), *(Offset(ONE, TWO, seq) for seq in sorted(cuts)), Offset(TWO)]
    taken: list[int] = []
    for start, end in pairwise(chain):
        found = range_between(start, end)
        assert found is not None
        assert (found.since, found.until) == (ONE, TWO)
        upto = 500 if found.upto is None else found.upto
        taken += range(found.after + 1, upto + 1)
    assert taken == list(range(1, 501))


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_parts_cover_every_number_once(first: int, count: int) -> None:
    parts = _split(first, first + count)
    edges = [first, *(upto for _, upto in parts)]
    assert parts == list(pairwise(edges))
    assert edges[-1] == first + count
    assert len(parts) <= 1_000


@pytest.mark.parametrize("offset", [Offset(ONE), Offset(ONE, TWO, 70)])
def test_an_offset_survives_a_checkpoint(offset: Offset) -> None:
    assert Offset.from_dict(json.loads(json.dumps(offset.to_dict()))) == offset


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (Offset(ONE, TWO, 70), Offset(THREE)),
        (Offset(ONE, TWO, 70), Offset(ONE, TWO, 60)),
        (Offset(ONE, TWO, 70), Offset(ONE, THREE, 80)),
        (Offset(TWO), Offset(ONE, TWO, 70)),
    ],
)
def test_offsets_that_do_not_follow_each_other(start: Offset, end: Offset) -> None:
    with pytest.raises(ValueError, match="does not follow"):
        range_between(start, end)


@pytest.mark.parametrize(
    "fields", [{}, {"snap": "a-5:5:", "open": "", "seq": None}, {"snap": "x", "open": "", "seq": 0}]
)
def test_an_invalid_offset(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="is not"):
        Offset.from_dict(fields)
