"""Which tables get typed tables, and with which options."""

from __future__ import annotations

import pytest

from headwater.model import Table
from headwater.pipeline.tables.choice import Choice
from headwater.pipeline.tables.options import TableOptions
from headwater.settings import make_settings
from headwater.settings.tables import TableEntry


def table(name: str, schema: str = "public") -> Table:
    return Table(1, schema, name, (), ("id",))


ORDERS, LINES = table("orders"), table("order_lines")
SALES, AUDIT = table("orders", "sales"), table("orders", "audit")
OWN = table("pipeline", "headwater")


@pytest.mark.parametrize(
    ("include", "exclude", "chosen"),
    [
        ([], [], [ORDERS, LINES, SALES, AUDIT]),
        (["orders"], [], [ORDERS]),
        (["public.*"], [], [ORDERS, LINES]),
        (["order*", "sales.*"], [], [ORDERS, LINES, SALES]),
        (["*"], ["audit.*", "order_lines"], [ORDERS, SALES]),
        (["orders", "sales.orders"], ["orders"], [SALES]),
        ([], ["sales.*"], [ORDERS, LINES, AUDIT]),
        (["headwater.*"], [], []),
        (["customers"], [], []),
    ],
)
def test_included_and_excluded_tables(
    include: list[str], exclude: list[str], chosen: list[Table]
) -> None:
    settings = make_settings({"lake_tables_include": include, "lake_tables_exclude": exclude})
    choice = Choice.of(settings.lake)
    assert choice is not None
    tables = [ORDERS, LINES, SALES, AUDIT, OWN]
    assert [each for each in tables if choice.includes(each)] == chosen


def test_no_typed_tables() -> None:
    assert Choice.of(make_settings({"lake_tables": "off"}).lake) is None


def test_the_options_of_a_table() -> None:
    entry = TableEntry(("a",), (), ("b",), ("c",), ("d",))
    choice = Choice(entries={"orders": entry, "sales.orders": TableEntry()}, secret="s")
    expected = TableOptions(include=("a",), mask=("b",), hash=("c",), as_text=("d",), secret="s")
    assert choice.options([ORDERS]) == expected
    assert choice.options([SALES]) == choice.options([LINES]) == TableOptions()
    named = Choice(entries={"public.orders": entry})
    assert named.options([ORDERS]).include == ("a",)


def test_the_options_of_all_names_of_a_table_hold() -> None:
    entries = {
        "orders": TableEntry(mask=("card",), exclude=("notes",)),
        "order_lines": TableEntry(hash=("card",), mask=("email",)),
        "sales.orders": TableEntry(include=("email",)),
    }
    choice = Choice(entries=entries, secret="s")
    found = choice.options([ORDERS, LINES])
    names = ("card", "notes", "email", "total")
    assert [found.treatment(name) for name in names] == ["mask", "exclude", "mask", "value"]
    assert found.secret == "s"
    assert choice.options([SALES, ORDERS]).include == ("email",)
    both = Choice(entries=entries | {"orders": TableEntry(include=("total",))})
    found = both.options([SALES, ORDERS])
    assert [name for name in ("id", *names) if found.includes(name, ORDERS)] == ["id"]
