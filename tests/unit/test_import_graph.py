"""Imports point one way: model ← live ← hub ← gateway ← commands, and nowhere in a circle.

Imports are read from the sources, so those for types only and those inside functions count, too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
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
    "child_process": {"tasks"},
    "client/state": {"client", "model", "errors", "limits", "protocol"},
    "client": {
        "model", "errors", "limits", "protocol", "live", "client", "tasks", "idempotency",
    },
    "pipeline": {
        "model", "errors", "limits", "settings", "database", "metrics", "capture", "log", "live",
        "pipeline", "tasks", "child_process",
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
        "live", "queries", "topics", "channels", "hub", "gateway", "idempotency", "memory",
        "tasks",
    },
    "settings": {"errors", "limits", "settings"},
    "metrics": {"protocol"},
    "logs": set(),
    "views": {"pipeline"},
    "capture": {
        "model", "errors", "limits", "settings", "database", "live", "capture", "child_process",
        "logs",
    },
    "embedded": {"errors", "limits", "database", "embedded"},
    "admin": {
        "model", "errors", "limits", "database", "metrics", "capture", "log", "live", "hub",
        "gateway", "pipeline", "admin",
    },
    "past": {
        "model", "errors", "limits", "protocol", "log", "live", "hub", "gateway", "pipeline",
        "past",
    },
    "app": {
        "model", "errors", "limits", "settings", "identity", "database", "metrics", "tasks",
        "capture", "log", "live", "queries", "topics", "channels", "hub", "gateway", "pipeline",
        "admin", "past", "embedded",
    },
    "demo": {
        "errors", "settings", "database", "capture", "live", "queries", "gateway", "pipeline",
        "views", "embedded", "app", "demo", "child_process",
    },
    "testing": {
        "model", "errors", "limits", "database", "log", "live", "hub", "client", "embedded",
        "testing",
    },
}  # fmt: skip
"""What of ours each package may import. Commands import anything."""

PURE = (
    "model", "errors", "limits", "fair_queue", "live", "memory", "protocol", "client/arguments",
    "client/backoff", "client/errors", "client/requests", "client/session", "client/sse",
    "client/state", "channels/bus_messages", "channels/presence", "topics/patterns",
)  # fmt: skip
"""What may use nothing but these beside us, and neither waits nor looks at a clock."""

PURE_LIBRARIES = {
    "__future__", "bisect", "collections", "dataclasses", "datetime", "decimal", "functools",
    "heapq", "hmac", "itertools", "math", "msgspec", "operator", "re", "struct", "typing", "uuid",
    "zlib",
}  # fmt: skip


def modules(package: str) -> Iterator[Path]:
    single = ROOT / f"{package}.py"
    found = [single] if single.exists() else sorted((ROOT / package).rglob("*.py"))
    assert found, f"there is no module {package}"
    yield from found


def name_of(module: Path) -> str:
    parts = module.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


@cache
def tree(module: Path) -> ast.Module:
    return ast.parse(module.read_text())


@cache
def imported(module: Path) -> set[str]:
    """The modules that it imports; of `from a import b` it is `a.b`, where that is a module."""
    names = set[str]()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            source = node.module or ""
            inner = {f"{source}.{alias.name}" for alias in node.names} & every_module().keys()
            names |= inner or {source}
    return names


@cache
def every_module() -> dict[str, Path]:
    return {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The largest groups of modules that import each other, directly or through others."""
    order, lowest = dict[str, int](), dict[str, int]()
    open_, found = list[str](), list[set[str]]()

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        open_.append(name)
        for other in graph[name]:
            if other not in order:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in open_:
                lowest[name] = min(lowest[name], order[other])
        if lowest[name] == order[name]:
            start = open_.index(name)
            found.append(set(open_[start:]))
            del open_[start:]

    for name in graph:
        if name not in order:
            visit(name)
    return [group for group in found if len(group) > 1]


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set[str](), "f": {"a"}}
    assert circles(graph) == [{"a", "b", "c"}]


def test_no_modules_import_each_other() -> None:
    names = every_module()
    assert circles({name: imported(path) & names.keys() for name, path in names.items()}) == []


HUB_PARTS = ("live_views", "reactive", "topics", "feeds")


@pytest.mark.parametrize("part", HUB_PARTS)
def test_a_part_of_the_hub_knows_neither_the_others_nor_the_hub(part: str) -> None:
    above = {"hub", "flush", *HUB_PARTS} - {part}
    for module in modules(f"hub/{part}"):
        for name in imported(module):
            if name.startswith("headwater.hub."):
                assert name.split(".")[2] not in above, f"{module.name} imports {name}"


def test_the_commands_are_on_top() -> None:
    for name, module in every_module().items():
        if not name.startswith("headwater.commands") and name != "headwater.__main__":
            commands = {i for i in imported(module) if i.startswith("headwater.commands")}
            assert not commands, f"{name} imports {commands}"


def test_the_place_of_every_package_is_fixed() -> None:
    packages = {name.split(".")[1] for name in every_module() if "." in name}
    assert packages - {"__main__", "commands"} <= ALLOWED.keys()


FOLDERS = sorted(path.parent for path in ROOT.rglob("__init__.py"))
MODULES_MAX = 13
"""Modules of one folder beside its `__init__.py`. More are two ideas, and two folders."""
LARGER = {"headwater": "what several folders use; a folder more would hold one module each"}


def name_of_folder(folder: Path) -> str:
    return name_of(folder / "__init__.py")


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of_folder)
def test_a_folder_says_what_belongs_in_it(folder: Path) -> None:
    text = ast.get_docstring(tree(folder / "__init__.py")) or ""
    assert 2 <= len(re.findall(r"\.(?=\s|$)", text)) <= 5, "two to five sentences"


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of_folder)
def test_a_folder_has_one_idea(folder: Path) -> None:
    found = sorted(path.name for path in folder.glob("*.py") if path.name != "__init__.py")
    assert len(found) <= MODULES_MAX or name_of_folder(folder) in LARGER, found


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    for module in modules(package):
        for name in imported(module):
            if name.startswith("headwater."):
                assert name.split(".")[1] in ALLOWED[package], f"{module.name} imports {name}"


@pytest.mark.parametrize("package", PURE)
def test_the_core_does_no_io(package: str) -> None:
    for module in modules(package):
        nodes = list(ast.walk(tree(module)))
        assert not any(isinstance(n, ast.AsyncFunctionDef | ast.Await) for n in nodes)
        foreign = {name.split(".")[0] for name in imported(module)} - {"headwater"}
        assert foreign <= PURE_LIBRARIES, f"{module.name} imports {foreign - PURE_LIBRARIES}"
        assert foreign - {"msgspec"} <= sys.stdlib_module_names
        called = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
        assert not called & {"now", "today", "utcnow"}, f"{module.name} looks at a clock"


PIPELINE = (
    "stream", "spark", "lake", "compaction", "reading", "replay", "views", "tables", "reconcile",
    "jobs",
)  # fmt: skip
"""The folders of the pipeline: each imports only those before it."""


@pytest.mark.parametrize("folder", PIPELINE)
def test_folders_of_the_pipeline_import_one_way(folder: str) -> None:
    above = {*PIPELINE[PIPELINE.index(folder) + 1 :], "application"}
    for module in modules(f"pipeline/{folder}"):
        for name in imported(module):
            if name.startswith("headwater.pipeline."):
                assert name.split(".")[2] not in above, f"{module.name} imports {name}"
