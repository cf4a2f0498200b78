"""The servers to compare with: the embedded PostgreSQL, and the system's, built with ICU."""

from __future__ import annotations

import pytest

from headwater.embedded import EmbeddedPostgres


@pytest.fixture(scope="session")
def postgres_url(postgres: EmbeddedPostgres) -> str:
    return postgres.url


@pytest.fixture(scope="session")
def icu_postgres_url(system_postgres: str) -> str:
    return system_postgres
