"""Definitions of sources: what people may write, and errors that name the source and the table."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from headwater.capture.declaration import define_source, from_settings
from headwater.capture.source import SourceDefinition, TableSpec
from headwater.capture.sqlite.connection import path_of
from headwater.errors import ConfigError
from headwater.live.filters.filter import c
from headwater.settings import load_settings
from headwater.settings.sources import SourceEntry, TableEntry

URL = "mysql://headwater@db/shop"


def test_names_of_tables() -> None:
    assert define_source(URL, tables=["orders", "customers"], into="shop") == SourceDefinition(
        name="shop",
        url=URL,
        into="shop",
        tables=(TableSpec("orders"), TableSpec("customers")),
    )
    assert define_source(URL, into="shop").tables == ()


def test_a_url_may_be_in_the_environment() -> None:
    assert define_source("${SHOP_URL}", into="shop").url == "${SHOP_URL}"
    url = "mysql://headwater:${SHOP_PASSWORD}@db/shop"
    assert define_source(url, into="shop").url == url


@pytest.mark.parametrize("scheme", ["mysql", "mariadb", "postgresql", "mongodb"])
@pytest.mark.parametrize("password", ["hunt/er2", "12/hunter2", "hun@t/er2"])
def test_a_slash_in_a_password_must_be_encoded(scheme: str, password: str) -> None:
    with pytest.raises(ConfigError, match="a / before its last @") as raised:
        define_source(f"{scheme}://me:{password}@db/shop", into="shop")
    assert "/ is %2F, @ is %40" in (raised.value.hint or "")
    assert "er2" not in f"{raised.value} {raised.value.hint}"
    encoded = f"{scheme}://me:hunt%2Fer2@db/shop?note=a@b"
    assert define_source(encoded, into="shop").url == encoded


def test_a_relative_path_is_relative_to_the_folder_of_the_declaration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "headwater.toml").write_text('[source.shop]\nurl = "sqlite:///data/a%20shop.db"\n')
    monkeypatch.chdir(folder)
    given = define_source("sqlite:///data/a%20shop.db", into="shop")
    assert from_settings("shop", load_settings(environment={}).source["shop"]) == given
    monkeypatch.chdir(tmp_path)
    assert path_of(given.url) == folder / "data" / "a shop.db"
    for url in ("sqlite:////var/lib/shop.db", "sqlite:///${DATA}/shop.db", "sqlite:///:memory:"):
        assert define_source(url, into="shop").url == url


def test_options_of_tables() -> None:
    found = define_source(
        URL,
        into="shop_mysql",
        name="shop",
        tables={
            "orders": {"exclude": ["card"], "where": (c.status == "open") & (c.total > 5)},
            "sales.lines": {
                "columns": ["id", "price"],
                "target": "lines",
                "types": {"price": "text"},
            },
            "customers": {},
        },
        feed_only=True,
        options={"server_id": 7},
    )
    assert found == SourceDefinition(
        name="shop",
        url=URL,
        into="shop_mysql",
        tables=(
            TableSpec(
                "orders",
                exclude=("card",),
                where={"and": [["status", "=", "open"], ["total", ">", 5]]},
            ),
            TableSpec("sales.lines", "lines", columns=("id", "price"), types={"price": "text"}),
            TableSpec("customers"),
        ),
        feed_only=True,
        options={"server_id": 7},
    )


@pytest.mark.parametrize(
    ("where", "form"),
    [
        (c.status == "open", ["status", "=", "open"]),
        ("status = open", {"and": [["status", "=", "open"]]}),
        (["total", ">", 5], ["total", ">", 5]),
        (c.day == date(2026, 1, 2), ["day", "=", "2026-01-02"]),
        (c.total >= Decimal("1.50"), ["total", ">=", "1.50"]),
    ],
)
def test_a_filter_is_stored_as_json(where: Any, form: Any) -> None:
    (table,) = define_source(URL, into="shop", tables={"orders": {"where": where}}).tables
    assert table.where == form


def test_a_source_of_the_file() -> None:
    entry = SourceEntry(
        url=URL,
        into="shop",
        tables=("orders", "customers"),
        table={"orders": TableEntry(exclude=("card",)), "lines": TableEntry()},
        options={"server_id": 7},
    )
    assert from_settings("mine", entry) == SourceDefinition(
        name="mine",
        url=URL,
        into="shop",
        tables=(TableSpec("orders", exclude=("card",)), TableSpec("customers"), TableSpec("lines")),
        options={"server_id": 7},
    )


def test_an_error_in_the_file_names_the_place() -> None:
    with pytest.raises(ConfigError) as caught:
        from_settings("shop", SourceEntry(url="shop.db", into="shop"))
    assert str(caught.value).startswith("headwater.toml: [source.shop]: source shop: the URL of")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"into": ""}, "into='' is not the name of a schema"),
    ({"into": "x" * 64}, "is not the name of a schema"),
    ({"into": "public"}, "into='public': mirrors cannot be in this schema"),
    ({"into": "headwater"}, "into='headwater': mirrors cannot be in this schema"),
    ({"into": "pg_shop"}, "into='pg_shop': mirrors cannot be in this schema"),
    ({"into": "Shop Data"}, "source 'Shop Data': this is not a name of a source"),
    ({"name": "a b"}, "source 'a b': this is not a name of a source"),
    ({"name": "x" * 51}, "this is not a name of a source"),
    ({"url": ""}, "source shop: the URL is missing"),
    ({"url": None}, "source shop: the URL is missing"),
    ({"url": "oracle://db/shop"}, "source shop: the URL of a source begins with"),
    ({"url": "headwater:secret@db"}, "source shop: the URL of a source begins with"),
    ({"feed_only": "yes"}, "source shop: feed_only='yes' is neither True nor False"),
    ({"tables": "orders"}, "source shop: tables='orders' is a text, not a list"),
    ({"tables": ["a", "a"]}, "source shop: there are two tables 'a'"),
    ({"tables": [5]}, "source shop: 5 in its tables is not a name"),
    ({"tables": [""]}, "source shop: '' is not the name of a table"),
    ({"tables": {"a": {"target": "b"}, "b": {}}}, "source shop: there are two mirrors 'b'"),
    ({"tables": {"a": None}}, "source shop, table a: None are no options"),
    ({"tables": {"a": {"exlude": []}}}, "source shop, table a: there is no option 'exlude'"),
    ({"tables": {"a": {"columns": "id"}}}, "source shop, table a: columns='id' is not a list"),
    ({"tables": {"a": {"columns": []}}}, "source shop, table a: columns is empty"),
    ({"tables": {"a": {"exclude": [""]}}}, "source shop, table a: '' in exclude is not the name"),
    ({"tables": {"a": {"columns": ["b"], "exclude": ["d"]}}}, "both columns and exclude are given"),
    ({"tables": {"a": {"where": ["b", "~", 1]}}}, "source shop, table a: where.operator: unknown"),
    ({"tables": {"a": {"where": "b ~ 1"}}}, "source shop, table a: 'b ~ 1' is not a condition"),
    ({"tables": {"a": {"where": True}}}, "source shop, table a: where: expected [column,"),
    ({"tables": {"a": {"where": c.b == object()}}}, "source shop, table a: where="),
    (
        {"tables": {"a": {"where": c.b == 1, "exclude": ["b"]}}},
        "source shop, table a: where needs the column b, which is not mirrored",
    ),
    (
        {"tables": {"a": {"where": c.b == 1, "columns": ["id"]}}},
        "source shop, table a: where needs the column b, which is not mirrored",
    ),
    ({"tables": {"a": {"target": ""}}}, "source shop, table a: target='' is not the name"),
    ({"tables": {"a": {"types": ["b"]}}}, "source shop, table a: types=['b'] are not columns"),
    ({"options": {"password": object()}}, "source shop: an option of password has a value"),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_wrong_definitions(given: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"url": URL, "into": "shop", **given}
    with pytest.raises(ConfigError) as caught:
        define_source(fields.pop("url"), **fields)
    assert message in str(caught.value)
    assert "secret" not in str(caught.value) + str(caught.value.hint)
