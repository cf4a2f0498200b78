"""`[source.NAME]` in the file: what it may have, and errors that name the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.settings import load_settings
from headwater.settings.sources import SourceEntry, TableEntry

FILE = """
[sources]
run = false

[source.shop]
url = "mysql://headwater:${SHOP_PASSWORD}@db/shop"
tables = ["orders", "customers"]
into = "shop_mysql"
server_id = 7

[source.shop.table.orders]
exclude = ["card"]
where = "status = open"

[source.shop.table."Order Lines"]
columns = ["id", "price"]
types = { price = "numeric(12,2)" }

[source.crm]
url = "sqlite:///crm.db"
feed_only = true
"""


def loaded(text: str, folder: Path) -> dict[str, SourceEntry]:
    (folder / "headwater.toml").write_text(text)
    return load_settings(environment={}, folder=folder).source


def test_sources_of_the_file(tmp_path: Path) -> None:
    found = loaded(FILE, tmp_path)
    assert found == {
        "shop": SourceEntry(
            url="mysql://headwater:${SHOP_PASSWORD}@db/shop",
            into="shop_mysql",
            tables=("orders", "customers"),
            table={
                "orders": TableEntry(exclude=("card",), where="status = open"),
                "Order Lines": TableEntry(
                    columns=("id", "price"), types={"price": "numeric(12,2)"}
                ),
            },
            options={"server_id": 7},
        ),
        "crm": SourceEntry(url="sqlite:///crm.db", into="crm", feed_only=True),
    }
    assert load_settings(environment={}, folder=tmp_path).sources.run is False


def test_no_source(tmp_path: Path) -> None:
    assert load_settings(environment={}, folder=tmp_path).source == {}


URL = 'url = "sqlite:///shop.db"'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("source = 5", "[source]: expected one table for each source"),
        (f"[source]\n{URL}", "[source.url]: expected one table for each source"),
        ('[source.shop]\ninto = "shop"', "[source.shop] url: it is missing"),
        ("[source.shop]\nurl = 5", "[source.shop] url: Expected `str`, got `int`"),
        (f'[source.shop]\n{URL}\ntables = "a"', "[source.shop] tables: Expected `array`, got"),
        (f"[source.shop]\n{URL}\ntables = [5]", "[source.shop] tables: Expected `str`, got `int`"),
        (f'[source.shop]\n{URL}\nfeed_only = "y"', "[source.shop] feed_only: Expected `bool`"),
        (f"[source.shop]\n{URL}\ntable = []", "[source.shop] table: expected a table for each"),
        (
            f"[source.shop]\n{URL}\n[source.shop.table.orders]\nexlude = []",
            "[source.shop.table.orders] Object contains unknown field `exlude`",
        ),
        (
            f"[source.shop]\n{URL}\n[source.shop.table.orders]\ncolumns = 5",
            "[source.shop.table.orders] Expected `array | null`, got `int`",
        ),
        (f"[sources.shop]\n{URL}", "[sources.shop]: there is no such group"),
        ("[sources]\nrun = 5", "[sources] run: Expected `bool`"),
        ("[sources]\nrnu = true", "[sources] rnu: there is no such setting"),
    ],
)
def test_a_wrong_file(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(text, tmp_path)
    assert str(caught.value).startswith(message)
    assert caught.value.hint
