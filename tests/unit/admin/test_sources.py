"""What people see of a source: its problem with the fix, and no password."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from headwater.admin.sources import (
    SourceReport,
    copied_share,
    of_source,
    problem_of,
    shown_definition,
)
from headwater.capture.declaration import define_source
from headwater.capture.mirror.registry import DeclaredSource, TableState
from headwater.capture.source import Problem

RUNNING = SourceReport(
    name="shop", kind="mysql", into_schema="shop", feed_only=False, tables=(), position=None,
    committed_at=None, lag=None, state="running", error=None, hint=None, changes=0, transactions=0,
    lag_bytes=None, warning=None, runner="host:1", updated_at=datetime(2026, 1, 1, tzinfo=UTC),
    is_run=True,
)  # fmt: skip

NOT_RUN = "Start headwater serve, or: headwater source run"


@pytest.mark.parametrize(
    ("fields", "problem", "level"),
    [
        ({}, None, "ok"),
        ({"state": "paused"}, None, "warn"),
        ({"is_run": False}, Problem("no process runs it", NOT_RUN, warning=True), "warn"),
        (
            {"state": "refused", "error": "no right", "hint": "grant it"},
            Problem("no right", "grant it"),
            "fail",
        ),
        ({"state": "lost"}, Problem("it is lost", ""), "fail"),
        ({"warning": "disk full soon"}, Problem("disk full soon", "", warning=True), "warn"),
    ],
)
def test_problems(fields: dict[str, Any], problem: Problem | None, level: str) -> None:
    source = msgspec.structs.replace(RUNNING, **fields)
    assert problem_of(source) == problem
    assert of_source(source).level == level


@pytest.mark.parametrize(
    ("tables", "share"),
    [
        ([], None),
        ([TableState("a", "a", "copying", 5)], None),
        ([TableState("a", "a", "copying", 0, 0)], None),
        ([TableState("a", "a", "copying", 5, 10)], 0.5),
        ([TableState("a", "a", "copying", 20, 10)], 1.0),
        ([TableState("a", "a", "live", 7, 10), TableState("b", "b", "copying", 0, 10)], 0.5),
    ],
)
def test_the_share_that_is_copied(tables: list[TableState], share: float | None) -> None:
    assert copied_share(tables) == share


def test_a_definition_is_shown_without_passwords() -> None:
    url = "mysql://headwater:secret@db/shop?password=secret"
    definition = define_source(url, into="shop", tables=["a"], options={"ssl_key": "secret"})
    shown = shown_definition(DeclaredSource(definition, "application"))
    assert shown["url"] == "mysql://headwater:***@db/shop?password=***"
    assert shown["options"] == ["ssl_key"]
    assert "secret" not in str(shown)
