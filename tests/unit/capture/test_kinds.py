"""Which class reads a URL, and secrets from the environment."""

from __future__ import annotations

import pytest

from headwater.capture.kinds import has_references, kind_of, open_source, resolve
from headwater.capture.source import SourceDefinition
from headwater.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("postgresql://db/shop", "postgresql"),
        ("postgres://db/shop", "postgresql"),
        ("mysql://db/shop", "mysql"),
        ("mariadb://db/shop", "mysql"),
        ("mongodb://db/shop", "mongodb"),
        ("mongodb+srv://db/shop", "mongodb"),
        ("sqlite:///shop.db", "sqlite"),
    ],
)
def test_the_scheme_of_a_url_says_its_kind(url: str, kind: str) -> None:
    assert kind_of(url) == kind


@pytest.mark.parametrize("url", ["oracle://ann:secret@db/shop", "ann:secret@db", ""])
def test_a_wrong_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="begins with") as raised:
        kind_of(url)
    assert "secret" not in str(raised.value)


def test_references_are_resolved_from_the_environment() -> None:
    url = "mysql://app:${SHOP_PASSWORD}@${SHOP_HOST}/shop"
    assert has_references(url)
    assert resolve(url, {"SHOP_PASSWORD": "x", "SHOP_HOST": "db"}) == "mysql://app:x@db/shop"
    with pytest.raises(ConfigError, match="SHOP_HOST, which is not set"):
        resolve(url, {"SHOP_PASSWORD": "x"})


def test_a_url_with_half_of_an_address_is_refused_without_its_password() -> None:
    for scheme in ("mysql", "mongodb"):
        definition = SourceDefinition("shop", f"{scheme}://me:secret@[::1/shop", "shop")
        with pytest.raises(ConfigError, match="IPv6") as caught:
            open_source(definition)
        assert "secret" not in f"{caught.value} {caught.value.hint}"
