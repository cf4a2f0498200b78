"""Keys of requests that may be repeated."""

from __future__ import annotations

import pytest

from headwater.errors import InvalidQuery
from headwater.idempotency import check_key, new_key


@pytest.mark.parametrize("key", ["", "x" * 129, "a b", "\u00e4", 5, None, b"key"])
def test_a_key_that_cannot_be_stored(key: object) -> None:
    with pytest.raises(InvalidQuery, match="visible ASCII"):
        check_key(key)


def test_a_key_that_was_made_can_be_stored() -> None:
    assert check_key(made := new_key()) == made
