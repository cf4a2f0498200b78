"""What stays at a source that is removed without asking it."""

from __future__ import annotations

import pytest

from headwater.capture.declaration import define_source
from headwater.capture.running.removal import left_behind, stored_kind


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("postgresql://db/shop", {}, "pg_drop_replication_slot('headwater_shop')"),
        ("postgresql://db/shop", {}, "drop publication headwater_shop"),
        ("postgres://db/shop", {"slot": "mine"}, "pg_drop_replication_slot('mine')"),
        ("mariadb://db/shop", {}, "nothing"),
        ("mongodb+srv://db/shop", {}, "nothing"),
        ("sqlite:///shop.db", {}, "_headwater_shop_"),
        ("${NO_SUCH_URL}", {}, "what the source needed"),
    ],
)
def test_left_behind(url: str, options: dict[str, str], words: str) -> None:
    assert words in left_behind(define_source(url, into="shop", options=options))


def test_a_publication_of_somebody_else_is_not_named() -> None:
    given = define_source("postgresql://db/a", into="shop", options={"publication": "theirs"})
    assert "publication" not in left_behind(given)


def test_the_kind_is_known_without_the_environment() -> None:
    assert stored_kind(define_source("mysql://a:${NO_SUCH_VARIABLE}@b/c", into="shop")) == "mysql"
