"""The hooks for React, and the adapter for TanStack Query: in Node, against a real gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.embedded import EmbeddedPostgres
from tests.javascript.test_client import CLIENT, run
from tests.support.databases import fresh_database
from tests.support.node import INSTALL_SECONDS, packages
from tests.support.stage import staged

pytestmark = pytest.mark.timeout(INSTALL_SECONDS + 120)


def test_message_by_message() -> None:
    packages(CLIENT)
    run("hooks")


@pytest.mark.parametrize("name", ["react", "tanstack"])
def test_the_tests_that_need_a_server(
    name: str, postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    packages(CLIENT)
    with (
        fresh_database(postgres.url, installed=True) as database,
        staged(postgres, database, tmp_path) as control,
    ):
        run(name, HEADWATER_STAGE=control)
