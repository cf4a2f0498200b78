"""How values of the WAL are written in images."""

from __future__ import annotations

import pytest

from headwater.capture.postgres.wal.append.images import ImageColumn, ImageWriter, NotWritten


@pytest.mark.parametrize(
    ("kind", "text", "image"),
    [
        ("integer", "-7", "-7"),
        ("number", "1.50", "1.50"),
        ("number", "NaN", '"NaN"'),
        ("number", "-Infinity", '"-Infinity"'),
        ("number", "1e-07", "1e-07"),
        ("boolean", "t", "true"),
        ("boolean", "f", "false"),
        ("text", 'a"\\\t\x1f\x7fé', r'"a\"\\\t\u001f' + '\x7fé"'),
        ("timestamp", "0044-03-15 12:00:00.5 BC", '"0044-03-15T12:00:00.5 BC"'),
        ("timestamptz", "2026-01-02 03:04:05+00", '"2026-01-02T03:04:05+00:00"'),
        ("timestamptz", "0044-03-15 12:00:00+00 BC", '"0044-03-15T12:00:00+00:00 BC"'),
        ("timestamptz", "-infinity", '"-infinity"'),
        ("json", '{"a":\n 1}', '{"a":\n 1}'),
        ("text", None, "null"),
    ],
)
def test_a_value_is_written_as_the_server_would(kind: str, text: str | None, image: str) -> None:
    writer = ImageWriter([ImageColumn("v", kind, "")], ["v"])
    assert writer.image((text,), {}) == f'{{"v":{image}}}'


def test_columns_are_in_the_order_of_the_table_not_of_the_relation() -> None:
    columns = [ImageColumn("a", "integer", ""), ImageColumn('b "', "text", "")]
    writer = ImageWriter(columns, ["more", 'b "', "a"])
    assert writer.image(("x", "y", "1"), {}) == r'{"a":1,"b \"":"y"}'


def test_what_only_the_server_can_write_is_taken_from_its_answer() -> None:
    writer = ImageWriter([ImageColumn("v", "server", "integer[]")], ["v"])
    assert writer.server_columns == [(0, "integer[]")]
    assert writer.image(("{1,2}",), {("integer[]", "{1,2}"): "[1,2]"}) == '{"v":[1,2]}'
    assert writer.image((None,), {}) == '{"v":null}'
    with pytest.raises(NotWritten):
        writer.image(("{3}",), {})
