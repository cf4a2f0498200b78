"""Taking the steps one after the other leads from the old list to the new one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headwater.live.state.steps import Enters, Leaves, Moves, Stays, steps
from headwater.model import Key

keys = st.lists(st.integers(0, 12).map(lambda n: (n,)), unique=True, max_size=10)


@given(old=keys, new=keys, extra=st.sets(st.integers(0, 12).map(lambda n: (n,))))
def test_steps_lead_from_old_to_new(old: list[Key], new: list[Key], extra: set[Key]) -> None:
    staying = [key for key in old if key in new]
    order = {key: index for index, key in enumerate(new)}
    out_of_place = {k for k in staying for other in staying
                    if (staying.index(k) < staying.index(other)) != (order[k] < order[other])
                    and k != other}  # fmt: skip
    touched = out_of_place | extra
    found = steps(old, new, touched)
    assert found is not None
    now, longest = list(old), max(len(old), len(new))
    for step in found:
        match step:
            case Leaves(key, at):
                assert now.pop(at) == key
            case Moves(key, source, at):
                assert key in touched
                assert now.pop(source) == key
                now.insert(at, key)
            case Enters(key, at):
                now.insert(at, key)
            case Stays(key, at):
                assert now[at] == key
                assert key in touched
        assert len(now) <= longest
    assert now == new


def test_untouched_rows_do_not_move() -> None:
    assert steps([(1,), (2,)], [(2,), (1,)], set()) is None
