"""What is refused before a source is added."""

from __future__ import annotations

from headwater.capture.running.check import same_target
from headwater.capture.source import SourceColumn, SourceTable


def _table(name: str, target: str) -> SourceTable:
    return SourceTable(name, target, (SourceColumn("id", "bigint"),), ("id",))


def test_two_tables_with_the_same_mirror_are_a_problem() -> None:
    problem = same_target([_table("swap", "swap"), _table("public.swap", "swap")])
    assert problem is not None
    assert problem.what == "the tables swap and public.swap have the same mirror: swap"
    assert not problem.warning


def test_tables_with_their_own_mirrors_are_none() -> None:
    assert same_target([_table("a.swap", "a_swap"), _table("b.swap", "b_swap")]) is None
