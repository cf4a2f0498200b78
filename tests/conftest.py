"""One real PostgreSQL for the whole run, and a fresh database with Headwater for each test."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from headwater.database import Connection, connect
from headwater.embedded import EmbeddedPostgres
from headwater.hub.hub import Hub
from headwater.metrics import Metrics, total
from headwater.testing import gateway_process
from tests.support.databases import FAST, fresh_database, passable_folder


def pytest_configure() -> None:
    """Put temporary files in memory, if there is room. Databases and lakes are hundreds of files
    each, and making them on disk takes longer than most tests."""
    place = "/dev/shm"
    if os.access(place, os.W_OK) and shutil.disk_usage(place).free > 8 * 2**30:
        os.environ.setdefault("TMPDIR", place)
        tempfile.tempdir = None
    # A shell starts background jobs with SIGINT ignored, which their children inherit; some tests
    # interrupt theirs.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Each Spark ends before the most expensive level of compilation pays off.
    os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start Spark many times go first, or the others would wait for them at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith(_LONG))


_LONG = (
    "tests/simulation/test_pipeline", "tests/integration/pipeline/test_process",
    "tests/spark/test_howto",
)  # fmt: skip

_WITHOUT_SPARK = "tests/spark/test_howto"
"""It starts a Spark of its own."""

_FIRST_SPARK = ("tests/spark/test_events", "tests/spark/test_maintenance", "tests/spark/test_views")
"""About half of the tests of the pipeline. They share one Spark, the others share a second one."""


_SERVERS = tuple(f"tests/integration/capture/{kind}/" for kind in ("mongodb", "mysql", "wal"))
"""They start servers of their own."""


class Together(LoadScopeScheduling):  # type: ignore[misc]
    """Distributes tests one by one, but gives one process all tests that share something slow to
    start: a Spark, or the gateways, browsers and shops of a file. xdist begins with the largest."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("tests/spark/") and not nodeid.startswith(_WITHOUT_SPARK):
            return "first Spark" if nodeid.startswith(_FIRST_SPARK) else "second Spark"
        if nodeid.startswith(_SERVERS):
            return nodeid.rpartition("/")[0]
        if nodeid.startswith("tests/contract/sources/"):
            return f"source {nodeid.partition('[')[2].partition('-')[0]}"
        if nodeid.startswith(
            ("tests/gateway/", "tests/browser/", "tests/regressions/test_gateway.py")
        ):
            return nodeid.partition("::")[0]
        return nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together:
    return Together(config, log)


@pytest.fixture(autouse=True)
def reconciled(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Metrics]]:
    """Every hub and gateway of a test compares its views with the database at every flush, and a
    difference fails the test."""
    begun, metrics = Hub.__init__, list[Metrics]()

    def init(hub: Hub, *args: Any, **options: Any) -> None:
        begun(hub, *args, **options)
        hub.reconciler.seconds = 0.0
        metrics.append(hub.metrics)

    monkeypatch.setattr(Hub, "__init__", init)
    monkeypatch.setitem(gateway_process.SETTINGS, "live_reconcile", "0 seconds")
    yield metrics
    if request.node.get_closest_marker("drifts") is None:
        assert [total(each.reconcile_drift) for each in metrics] == [0] * len(metrics)


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    with passable_folder() as folder, EmbeddedPostgres(folder / "data", settings=FAST) as server:
        yield server


@pytest.fixture(scope="session")
def system_postgres() -> Iterator[str]:
    """The URL of a server of the machine's own PostgreSQL: another version, built with ICU."""
    binaries = max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)
    if binaries is None:
        pytest.skip(
            "this machine has no PostgreSQL of its own (Debian: apt-get install postgresql)"
        )
    with passable_folder() as folder:
        data, user = folder / "data", pwd.getpwnam("postgres") if os.geteuid() == 0 else None
        data.mkdir(0o700)
        if user:
            shutil.chown(data, user.pw_uid)
            shutil.chown(folder, user.pw_uid)

        def run(program: str, *arguments: str) -> None:
            command = [str(binaries / program), "-D", str(data), *arguments]
            subprocess.run(
                command,
                check=True,
                stdout=subprocess.DEVNULL,
                user=user.pw_uid if user else None,
                group=user.pw_gid if user else None,
                cwd="/",
            )

        run("initdb", "-U", "postgres", "--auth=trust", "-E", "UTF8", "--locale=C.UTF-8", "-N")
        settings = [
            f"-c {name}={value}"
            for name, value in (FAST | {"listen_addresses": "", "wal_level": "logical"}).items()
        ]
        options = " ".join([f"-k {folder}", *settings])
        run("pg_ctl", "-w", "-l", str(data / "log"), "-o", options, "start")
        try:
            yield f"postgresql://postgres@:5432/postgres?host={folder}"
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "stop")


@pytest.fixture
def server_url(postgres: EmbeddedPostgres) -> str:
    return postgres.url


@pytest.fixture
def empty_url(server_url: str) -> Iterator[str]:
    """The URL of a database in which Headwater is not installed."""
    with fresh_database(server_url, installed=False) as url:
        yield url


@pytest.fixture
def url(server_url: str) -> Iterator[str]:
    """The URL of a database with Headwater's schema."""
    with fresh_database(server_url, installed=True) as url:
        yield url


@pytest.fixture
async def connection(url: str) -> AsyncIterator[Connection]:
    connection = await connect(url, purpose="test", application_path=True)
    yield connection
    await connection.close()


@pytest.fixture
async def other(url: str) -> AsyncIterator[Connection]:
    """A second session in the same database."""
    connection = await connect(url, purpose="test", application_path=True)
    yield connection
    await connection.close()
