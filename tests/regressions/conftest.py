"""Regression tests run first, and on the same servers as the property tests."""

from __future__ import annotations

import pytest

from tests.property.conftest import icu_postgres_url, postgres_url

__all__ = ["icu_postgres_url", "postgres_url"]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "regressions" not in item.path.parts)
