"""The tests follow the tree: a module's unit test is found by the module's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.paths import ROOT

TESTS, SOURCES = ROOT / "tests", ROOT / "src" / "headwater"

ABOUT_MANY_MODULES = {
    "test_bounds.py": "inputs that would keep the event loop busy, in any module",
    "test_import_graph.py": "which module may import which",
    "test_public_names.py": "what a program may import from headwater",
    "test_query_reference.py": "the examples of docs/reference/live-query.md",
    "test_tree.py": "where tests are",
    "test_walk.py": "the functions that docs/design names exist",
}
"""Unit tests that are not about one module, and what they are about."""


def unit_tests() -> list[str]:
    unit = TESTS / "unit"
    return [str(path.relative_to(unit)) for path in sorted(unit.rglob("test_*.py"))]


@pytest.mark.parametrize("test", unit_tests())
def test_a_unit_test_is_named_after_a_module(test: str) -> None:
    module = SOURCES / Path(test).with_name(Path(test).name.removeprefix("test_"))
    assert test in ABOUT_MANY_MODULES or module.exists(), f"there is no module {module}"


def test_the_exceptions_exist() -> None:
    assert set(ABOUT_MANY_MODULES) <= set(unit_tests())


def test_folders_of_integration_tests_are_those_of_the_sources() -> None:
    folders = {path.parent.name for path in (TESTS / "integration").glob("*/__init__.py")}
    assert folders <= {path.parent.name for path in SOURCES.glob("*/__init__.py")}


def test_helpers_are_in_one_folder() -> None:
    others = [
        str(path.relative_to(TESTS))
        for path in TESTS.rglob("*.py")
        if not path.name.startswith("test_") and path.name not in ("__init__.py", "conftest.py")
        if path.relative_to(TESTS).parts[0] != "support"
        # The drivers are what the contract is: each says what its database can do.
        if path.relative_to(TESTS).parts[:2] != ("contract", "sources")
    ]
    assert others == []


def test_regressions_are_in_one_folder() -> None:
    assert [
        path for path in TESTS.rglob("*regression*.py") if "regressions" not in path.parts
    ] == []
