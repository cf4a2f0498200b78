"""The URL of a source, and what is remembered of the server's replies."""

from __future__ import annotations

import pytest

from headwater.capture.mongodb.connection import Server, database_name
from headwater.errors import ConfigError


@pytest.mark.parametrize(
    "url",
    [
        "mongodb://db/shop",
        "mongodb://me:secret@a:27017,b:27017/shop?replicaSet=rs0",
        "mongodb+srv://me@cluster.example.com/shop",
    ],
)
def test_the_database_of_a_url(url: str) -> None:
    assert database_name(url) == "shop"


@pytest.mark.parametrize("url", ["mongodb://me:secret@db", "mongodb://db/", "mysql://db/shop", ""])
def test_a_url_without_a_database(url: str) -> None:
    with pytest.raises(ConfigError, match="must name its database") as caught:
        database_name(url)
    assert "secret" not in str(caught.value)


def test_which_servers_split_large_events() -> None:
    assert [Server(v, True, False).splits for v in ((6, 0, 8), (6, 0, 9), (7, 0, 0))] == [
        False, True, True,
    ]  # fmt: skip
