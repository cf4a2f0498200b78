"""Imports point one way: model ← live ← hub ← gateway (DESIGN §11)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import headwater

ROOT = Path(headwater.__file__).parent

ALLOWED: dict[str, set[str]] = {
    "model": set(),
    "errors": set(),
    "limits": set(),
    "fair_queue": set(),
    "live": {"model", "errors", "limits", "live"},
    "protocol": {"model"},
    "tasks": set(),
    "client/replica": {"model", "errors", "limits", "protocol"},
    "client": {
        "model", "errors", "limits", "protocol", "live", "client", "tasks", "idempotency",
    },
    "pipeline": {
        "model", "errors", "limits", "settings", "database", "metrics", "capture", "log", "live",
        "pipeline",
    },
    "memory": {"errors", "limits"},
    "database": {"errors", "limits"},
    "log": {"model", "errors", "limits", "settings", "database", "log"},
    "identity": {"settings"},
    "idempotency": {"errors", "identity", "limits"},
    "queries": {
        "model", "errors", "limits", "settings", "identity", "idempotency", "database", "protocol",
        "live", "log", "queries", "tasks", "fair_queue",
    },
    "topics/patterns": {"errors", "limits"},
    "topics": {"model", "errors", "limits", "identity", "queries", "topics"},
    "channels": {
        "model", "errors", "limits", "identity", "idempotency", "database", "metrics", "protocol",
        "log", "queries", "topics", "channels", "memory",
    },
    "hub": {
        "model", "errors", "limits", "settings", "identity", "database", "metrics", "protocol",
        "capture", "log", "live", "queries", "topics", "hub", "fair_queue", "memory",
    },
    "gateway": {
        "model", "errors", "limits", "settings", "identity", "database", "metrics", "protocol",
        "live", "queries", "topics", "channels", "hub", "gateway", "idempotency",
        "memory",
    },
}  # fmt: skip
"""What of ours a package may import, for the packages whose place is fixed."""

PURE = (
    "model", "errors", "limits", "fair_queue", "live", "memory", "protocol",
    "client/arguments", "client/backoff", "client/feed_state", "client/query_state",
    "client/refusals", "client/replica", "client/requests", "client/rows_state", "client/session",
    "client/sse", "client/topic_state", "client/channel_state", "channels/notes",
    "channels/presence", "topics/patterns",
)  # fmt: skip
"""What may use nothing but these beside us, and neither waits nor looks at a clock."""

PURE_LIBRARIES = {
    "__future__", "bisect", "collections", "dataclasses", "datetime", "decimal", "functools",
    "heapq", "math", "msgspec", "operator", "re", "struct", "typing", "uuid", "zlib",
}  # fmt: skip


def modules(package: str) -> Iterator[Path]:
    single = ROOT / f"{package}.py"
    yield from [single] if single.exists() else sorted((ROOT / package).rglob("*.py"))


def imported(module: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            source = node.module or ""
            yield from (
                [f"headwater.{a.name}" for a in node.names] if source == "headwater" else [source]
            )


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    for module in modules(package):
        for name in imported(module):
            if name.startswith("headwater."):
                assert name.split(".")[1] in ALLOWED[package], f"{module.name} imports {name}"


@pytest.mark.parametrize("package", PURE)
def test_the_core_does_no_io(package: str) -> None:
    for module in modules(package):
        tree = ast.parse(module.read_text())
        assert not any(isinstance(n, ast.AsyncFunctionDef | ast.Await) for n in ast.walk(tree))
        foreign = {name.split(".")[0] for name in imported(module)} - {"headwater"}
        assert foreign <= PURE_LIBRARIES, f"{module.name} imports {foreign - PURE_LIBRARIES}"
        assert foreign - {"msgspec"} <= sys.stdlib_module_names
        called = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        assert not called & {"now", "today", "utcnow"}, f"{module.name} looks at a clock"
