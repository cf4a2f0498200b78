"""`source list` and `source status` in a terminal of 80 columns."""

from __future__ import annotations

from io import StringIO
from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType

from headwater.capture.mirror.registry import TableState
from headwater.commands.source.show import copied_text, source_view, sources_view
from tests.unit.admin.test_sources import RUNNING

WARNING = "the table orders uses MyISAM: a copy may differ from what is written at the same time"
LONG = "a_source_with_a_long_name_that_no_column_has_room_for"


def shown(view: RenderableType) -> list[str]:
    """The lines, printed as commands print."""
    out = StringIO()
    Console(file=out, width=80, soft_wrap=True, emoji=False).print(view)
    return [line.strip() for line in out.getvalue().splitlines()]


def source(**fields: Any) -> Any:
    return msgspec.structs.replace(RUNNING, **fields)


def test_a_problem_is_one_line_below_the_table() -> None:
    refused = source(name="crm", state="refused", error="no right", hint="grant it")
    lines = shown(sources_view([source(warning=f"{WARNING}\nand another"), refused]))
    assert lines[3:] == ["", f"shop: {WARNING}", "shop: and another", "crm: no right", "grant it"]


def test_no_name_and_no_number_is_cut() -> None:
    tables = (TableState(LONG, LONG, "copying", 5, 10), TableState("b", "b", "live", 1))
    wide = source(
        name=LONG, into_schema=LONG, changes=123_456_789, lag_bytes=123_456_789, tables=tables
    )
    lines = shown(sources_view([wide]))
    assert all(len(line) <= 80 for line in lines)
    assert "…" not in "".join(lines)
    assert "123,456,789" in "".join(lines)


def test_the_status_shows_all_of_the_url() -> None:
    url = "mysql://headwater:${SHOP_PASSWORD}@a-host-with-a-long-name.example.internal:3306/shop"
    lines = shown(source_view({"url": url, "declared_by": "command"}, RUNNING))
    assert url in "".join(lines)


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (TableState("a", "a", "copying", 1000, 5000), "1,000 of about 5,000"),
        (TableState("a", "a", "recopying", 1, 2), "1 of about 2"),
        (TableState("a", "a", "copying", 1000), "1,000"),
        (TableState("a", "a", "live", 1, 630), "1"),
    ],
)
def test_the_estimate_is_shown_while_a_table_is_copied(table: TableState, text: str) -> None:
    assert copied_text(table) == text
