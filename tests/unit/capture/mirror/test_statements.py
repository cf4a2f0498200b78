"""Statements for one row and for many. That they do what they say is tested with a database, in
`tests/property/test_mirror_histories.py`."""

from __future__ import annotations

from headwater.capture.mirror.statements import MirrorColumn, TableStatements, quoted

TABLE = TableStatements(
    '"shop"."orders"',
    16400,
    [
        MirrorColumn("id", "pg_catalog.int8"),
        MirrorColumn('na"me', "pg_catalog.text"),
        MirrorColumn("tags", "pg_catalog._text", direct=False),
    ],
    ["id"],
)


def test_names_are_quoted() -> None:
    assert quoted('a"b') == '"a""b"'
    assert '"na""me"' in TABLE.insert([("1", "x", None)]).text


def test_one_row_travels_as_values_and_many_as_arrays() -> None:
    one = TABLE.insert([("1", "x", None)])
    assert "values ($1, $2, $3)" in one.text
    assert one.parameters == ["1", "x", None]
    many = TABLE.insert([("1", "x", None), ("2", "y", "{a}")])
    assert (
        "unnest($1::pg_catalog.int8[], $2::pg_catalog.text[], $3::pg_catalog.text[])" in many.text
    )
    assert "v.c2::pg_catalog._text" in many.text
    assert many.parameters == ['{"1","2"}', '{"x","y"}', '{NULL,"{a}"}']


def test_exact_statements_count_their_rows() -> None:
    for statement in (
        TABLE.update([("1", "x", None)], (1,), exact=True),
        TABLE.delete([("1",)], exact=True),
        TABLE.rekey(("1",), ("2", "x", None), (0, 1)),
    ):
        assert statement is not None
        assert "headwater.expect_rows(count(*)" in statement.text
        assert statement.parameters[-1] == 1
    tolerant = TABLE.delete([("1",), ("2",)], exact=False)
    assert "expect_rows" not in tolerant.text


def test_an_update_of_nothing_is_no_statement() -> None:
    assert TABLE.update([("1", "x", None)], (), exact=True) is None


def test_a_table_of_keys_only_can_be_upserted() -> None:
    keys = TableStatements("t", 1, [MirrorColumn("id", "pg_catalog.int8")], ["id"])
    assert keys.insert([("1",)], upsert=True).text.endswith("do nothing")
