"""A real PgBouncer in front of the database: in both pooling modes its address is refused by
name."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from headwater.database import connect, connect_blocking, translated
from headwater.embedded import EmbeddedPostgres
from headwater.embedded.account import account_for
from headwater.errors import ConfigError
from tests.integration.commands.test_cli import headwater
from tests.support.databases import passable_folder

PROGRAM = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
pytestmark = pytest.mark.skipif(
    not Path(PROGRAM).exists(), reason="PgBouncer is not installed (Debian: apt-get install)"
)

FORMS = {
    "refuses the options": "",
    "ignores the options": "ignore_startup_parameters = options",
}


@pytest.fixture(params=["transaction", "session"])
def pooled(
    request: pytest.FixtureRequest, postgres: EmbeddedPostgres, url: str
) -> Iterator[Callable[[str], str]]:
    """Starts PgBouncer with a setting; gives its URL of the database."""
    started = list[subprocess.Popen[bytes]]()
    account = account_for(postgres.data_dir, postgres.data_dir / "postgres")
    with passable_folder() as folder:
        os.chown(folder, account.uid, account.gid)

        def start(setting: str) -> str:
            sockets = conninfo_to_dict(postgres.url)["host"]
            (folder / "users").write_text('"postgres" ""\n')
            (folder / "ini").write_text(f"""
[databases]
* = host={sockets} port=5432
[pgbouncer]
listen_port = 6432
unix_socket_dir = {folder}
auth_type = trust
auth_file = {folder}/users
pool_mode = {request.param}
logfile = {folder}/log
{setting}
""")
            program = subprocess.Popen(
                [PROGRAM, str(folder / "ini")],
                user=account.uid if account.is_other else None,
                group=account.gid if account.is_other else None,
                cwd="/",
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            started.append(program)
            for _ in range(1000):
                if (folder / ".s.PGSQL.6432").exists():
                    break
                assert program.poll() is None, (folder / "log").read_text()
                time.sleep(0.01)
            name = urlsplit(url).path
            return f"postgresql://postgres@:6432{name}?host={quote(str(folder), '')}"

        yield start
        for program in started:
            program.terminate()
            program.wait(10)


@pytest.mark.parametrize("form", FORMS)
def test_a_pooled_address_is_refused_by_name(form: str, pooled: Callable[[str], str]) -> None:
    address = pooled(FORMS[form])
    with psycopg.connect(address) as plain:  # it works for other clients
        plain.execute("select 1")
    with pytest.raises(ConfigError, match="PgBouncer") as caught:
        asyncio.run(connect(address, purpose="test"))
    assert "address of PostgreSQL itself" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="PgBouncer"), translated(address):
        connect_blocking(address, purpose="test")


def test_a_command_says_so(pooled: Callable[[str], str]) -> None:
    done = headwater("status", "--url", pooled(FORMS["ignores the options"]))
    assert done.returncode == 2
    assert "PgBouncer" in done.stderr
    assert "docs/howto/pgbouncer.md" in done.stderr
