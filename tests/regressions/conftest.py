"""What once went wrong runs first, and on the same servers as the property tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location(
    "property_conftest", Path(__file__).parent.parent / "property" / "conftest.py"
)
assert _spec is not None
assert _spec.loader is not None
_servers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_servers)

postgres_url = _servers.postgres_url
icu_postgres_url = _servers.icu_postgres_url


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "regressions" not in item.path.parts)
