"""A hidden column stays hidden under another name."""

from __future__ import annotations

import pytest

from headwater.model import Column, Table
from headwater.pipeline.tables.columns import columns_of, schema_of, shows_hidden
from headwater.pipeline.tables.options import TableOptions
from headwater.pipeline.tables.renames import followed

HIDDEN = TableOptions(mask=("card",), exclude=("notes",), hash=("email",), secret="s")


def shape(text: str) -> Table:
    """`a b:int`: a column of text and one of another type."""
    pairs = (each.partition(":") for each in text.split())
    columns = (Column(name, kind or "text", kind or "text") for name, _, kind in pairs)
    return Table(hash(text), "public", "people", tuple(columns), ("id",), 7)


@pytest.mark.parametrize(
    ("shapes", "hidden"),
    [
        (["id card note", "id pan note"], "pan mask"),
        (["id card note", "id pan:int note"], "pan mask"),  # with another type
        (["id card note", "id pan note", "id number note"], "number mask, pan mask"),
        (["id card note", "id pan note tag"], "pan mask"),
        (["id note card", "id note pan"], "pan mask"),  # or dropped, and another one added
        (["id note card", "id note pan tag"], "pan mask"),  # tag cannot be it
        (["id card note", "id note"], ""),
        (["id card note", "id note tag"], ""),  # dropped: it is in front of note
        (["id card a", "id x y"], "x mask"),
        (["id a card", "id x y"], "x mask, y mask"),  # a may be dropped
        (["id a card b", "id x y b"], "y mask"),
        (["id card note", "id pan note card"], "pan mask"),  # and another card was added
        (["id note card", "id note pan card"], "pan mask"),
        (["id card note", "id note card"], "note mask"),  # they may have changed names
        (["id card note:int", "id note:int card"], ""),
        (["id card notes x", "id a b x"], "a mask, b exclude"),
        (["id a notes card", "id b c"], "b exclude, c exclude"),
        (["id email", "id mail"], "mail hash"),
        (["id note", "id text"], ""),
        (["id card", "id notes"], ""),  # hidden by its own name
        (["id card", "id card card2"], ""),
    ],
)
def test_columns_that_may_be_hidden_ones(shapes: list[str], hidden: str) -> None:
    found = followed(HIDDEN, [shape(each) for each in shapes])
    assert ", ".join(f"{name} {treatment}" for name, treatment in found.inherited) == hidden
    assert found.fingerprint() == HIDDEN.fingerprint(), "so that nothing is filled again"


def test_a_column_that_is_included_by_name_is_shown() -> None:
    options = TableOptions(include=("note", "pan"), mask=("card",))
    assert not followed(options, [shape("id note card"), shape("id note pan")]).inherited


def test_a_table_that_shows_a_hidden_column_is_found() -> None:
    before, after = shape("id card notes x"), shape("id pan remarks x")
    found = followed(HIDDEN, [before, after])

    def stored(options: TableOptions) -> bool:
        first = schema_of("history", columns_of(before, options))
        return shows_hidden(schema_of("history", columns_of(after, options, first)), found)

    assert stored(HIDDEN)
    assert stored(TableOptions(mask=("card", "pan")))
    assert not stored(found)
    both = schema_of("history", columns_of(after, found))
    later = schema_of("history", columns_of(shape("id x"), found, both))
    assert later.field("pan").metadata[b"comment"] == b"dropped, masked"
    assert not shows_hidden(later, found)


def test_a_hidden_column_of_the_key_hides_the_key() -> None:
    before, after = shape("email id"), shape("mail id")
    key = Table(1, "public", "people", after.columns, ("mail",), 7)
    assert followed(HIDDEN, [before, after]).hides_key_of(key)
