"""The URL of a source, and what is remembered of the server's replies."""

from __future__ import annotations

import pytest

from headwater.capture.mongodb.checks import option_problems
from headwater.capture.mongodb.connection import Connection, Server, database_name
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


def test_a_url_with_half_of_an_address() -> None:
    with pytest.raises(ConfigError, match="IPv6") as caught:
        database_name("mongodb://me:secret@[::1/shop")
    assert "secret" not in str(caught.value)


async def test_an_unknown_option_is_a_warning_of_the_check(
    recwarn: pytest.WarningsRecorder,
) -> None:
    connection = Connection("mongodb://me:secret@db/shop?bogus=1")
    assert connection.client is not None
    await connection.close()
    (problem,) = option_problems(connection.warnings, connection.url)
    assert "bogus" in problem.what
    assert problem.warning
    assert not recwarn.list


def test_which_servers_split_large_events() -> None:
    assert [Server(v, True, False).splits for v in ((6, 0, 8), (6, 0, 9), (7, 0, 0))] == [
        False, True, True,
    ]  # fmt: skip
