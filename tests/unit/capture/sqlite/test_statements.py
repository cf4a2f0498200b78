"""What is read from the text of SQLite statements."""

from __future__ import annotations

import pytest

from headwater.capture.sqlite.statements import index_parts, literal, quoted, unquoted, words


def test_names_and_texts() -> None:
    assert quoted('a"b') == '"a""b"'
    assert literal("it's") == "'it''s'"
    assert [unquoted(word) for word in ('"a""b"', "'s'", "`x`", "[a b]", "plain")] == [
        'a"b', "s", "x", "a b", "plain",
    ]  # fmt: skip


def test_comments_are_left_out() -> None:
    sql = "/* one */ savepoint -- two\n  \"a -- b\" ';' /* open"
    assert words(sql) == ["savepoint", '"a -- b"', "';'"]


@pytest.mark.parametrize(
    ("sql", "expressions", "predicate"),
    [
        ("CREATE UNIQUE INDEX i ON t(a)", ["a"], None),
        ('create unique index "on (x)" on "t (a)" (lower("b,c"), d desc)',
         ['lower ( "b,c" )', "d"], None),
        ("create unique index i on t (a || b, c -> '$.x') where a <> b and c >= 1.5",
         ["a || b", "c -> '$.x'"], "a <> b and c >= 1.5"),
        ("create unique index i on t (coalesce(a, 'x,)')) -- note\n where a is not null",
         ["coalesce ( a , 'x,)' )"], "a is not null"),
    ],
)  # fmt: skip
def test_parts_of_an_index(sql: str, expressions: list[str], predicate: str | None) -> None:
    assert index_parts(sql) == (expressions, predicate)
