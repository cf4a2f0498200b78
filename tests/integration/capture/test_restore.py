"""A dump that is restored elsewhere, with the rights that the documentation asks for: the tables
belong to another role, and Headwater's role has TRIGGER on them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from headwater.testing.gateway_process import serving
from tests.integration.commands.test_cli import documents, headwater, psql
from tests.support.databases import database_url, fresh_database

DUMP = Path("/usr/lib/postgresql/15/bin/pg_dump")


@pytest.fixture
def server_url(system_postgres: str) -> str:
    if not DUMP.exists():
        pytest.skip("needs pg_dump of the machine's PostgreSQL")
    return system_postgres


@pytest.fixture
def restored(request: pytest.FixtureRequest, empty_url: str, server_url: str) -> Iterator[str]:
    """The URL, as Headwater's role, of a copy of a database with captured tables. A parameter is an
    option of the dump."""
    database = empty_url.partition("?")[0].rpartition("/")[2]
    ours, maker = f"ours_{database}", f"maker_{database}"
    psql(
        empty_url,
        f"create role {ours} login",
        f"create role {maker} login",
        f"grant create on database {database} to {ours}",
        f"grant create on schema public to {maker}",
    )
    of_maker = empty_url.replace("postgres@", f"{maker}@")
    of_ours = empty_url.replace("postgres@", f"{ours}@")
    psql(
        of_maker,
        "create table orders (id int primary key, note text)",
        "create table closed (id int primary key)",
        "create table parts (id int primary key) partition by range (id)",
        "create table parts_1 partition of parts for values from (0) to (9)",
        f"grant trigger, select on orders, closed to {ours}",
    )
    psql(empty_url, f"grant {maker} to {ours}")
    for command in (["init"], ["enable", "orders"], ["enable", "closed"], ["enable", "parts"]):
        documents(headwater(*command, "--url", of_ours, "--json"))
    psql(empty_url, f"revoke {maker} from {ours}")
    psql(
        of_maker, "insert into orders values (1, 'before')", f"revoke trigger on closed from {ours}"
    )
    command = [str(DUMP), "--dbname", empty_url, *getattr(request, "param", ())]
    dump = subprocess.run(command, capture_output=True, check=True).stdout
    with fresh_database(server_url, installed=False) as copy:
        program = str(DUMP.with_name("psql"))
        load = [program, "--quiet", "--set=ON_ERROR_STOP=1", "--dbname", copy]
        subprocess.run(load, input=dump, capture_output=True, check=True)
        yield copy.replace("postgres@", f"{ours}@")
        for url in (copy, empty_url, database_url(server_url, "postgres")):
            psql(url, f"drop owned by {ours}, {maker} cascade")
    psql(empty_url, f"drop role {ours}, {maker}")


def test_init_and_serve_work_after_a_restore(restored: str, tmp_path: Path) -> None:
    done = headwater("init", "--url", restored)
    assert done.returncode == 0, done.stderr
    for table, way_out in (("closed", "grant trigger on public.closed"), ("parts", "grant maker_")):
        assert f"{table} is not captured in this database" in done.stderr
        assert way_out in done.stderr
    maker = restored.replace("ours_", "maker_")
    psql(
        maker,
        "insert into orders values (2, 'after')",
        "truncate orders",
        "insert into parts values (1)",
    )
    with serving(restored, tmp_path) as gateway:
        assert gateway.get("/readyz").status_code == 200
    (status,) = documents(headwater("status", "--url", restored, "--json"))
    found = {table["name"]: table["enabled"] for table in status["tables"]}
    assert found == {"orders": True, "closed": False, "parts": False}
    with psycopg.connect(restored) as connection:
        ops = connection.execute("select op::text from headwater.log order by seq").fetchall()
    assert ops == [("R",), ("I",), ("T",)]


@pytest.mark.parametrize("restored", [["--no-privileges"]], indirect=True)
def test_a_dump_without_privileges_has_headwaters_own_again(restored: str) -> None:
    done = headwater("init", "--url", restored)
    assert done.returncode == 0, done.stderr
    assert "grant trigger on public.orders" in done.stderr
    rights = """
        select has_schema_privilege('headwater', 'usage'),
               has_function_privilege('headwater.signal(text, text[])', 'execute'),
               has_function_privilege('headwater.pass_row()', 'execute'),
               has_function_privilege('headwater.trim_log()', 'execute'),
               has_function_privilege('headwater.redeem_ticket(bytea)', 'execute')
    """
    with psycopg.connect(restored.replace("ours_", "maker_")) as connection:
        assert connection.execute(rights).fetchone() == (True, True, True, False, False)
    with psycopg.connect(restored) as connection:
        assert connection.execute(rights).fetchone() == (True,) * 5
