"""Brings back the database and the lake in `data/`, such that they belong together as they did.

A dump in another cluster is another log: its oids and transaction ids mean something else. So this
needs a server of its own, and restores what Headwater knows a log by: the captured tables get the
oids they had, transaction ids continue after those of the dump, `headwater.home` says what it said,
and no table counts as altered. The functions that capture changes are made again by the schema of
the dump. Not covered: the data folder of an embedded PostgreSQL, whose files are PostgreSQL's own.
"""

from __future__ import annotations

import json
import lzma
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from headwater.embedded import EmbeddedPostgres
from tests.support.databases import FAST, passable_folder

DATA = Path(__file__).parent / "data"


@cache
def facts() -> Any:
    return json.loads((DATA / "facts.json").read_text())


def copies(*names: str) -> list[dict[str, Any]]:
    """The tables as the database had them at these moments."""
    return [each for each in facts()["copies"] if each["name"] in names]


def rows_of_copy(url: str, copy: dict[str, Any]) -> list[dict[str, Any]]:
    """Its rows, read by PostgreSQL."""
    query = f"select * from json_to_recordset(%s) as t ({copy['columns']})"
    with psycopg.connect(url, options="-c timezone=UTC") as connection:
        cursor = connection.cursor(row_factory=psycopg.rows.dict_row)
        return cursor.execute(query.encode(), (copy["rows"],)).fetchall()


def extract_lake(folder: Path) -> Path:
    """A lake as the release left it."""
    lake = folder / "lake"
    with tarfile.open(DATA / "lake.tar.xz") as archive:
        archive.extractall(lake, filter="data")
    return lake


@contextmanager
def restored_database() -> Iterator[str]:
    """The URL of the database as the release left it, on a server of its own."""
    # The times of commits here are not those of the dump.
    settings = FAST | {"track_commit_timestamp": "off"}
    with (
        passable_folder() as folder,
        EmbeddedPostgres(folder / "data", settings=settings) as server,
    ):
        with psycopg.connect(server.url, autocommit=True) as connection:
            _restore(connection)
        yield server.url


def _restore(connection: psycopg.Connection) -> None:
    dump = lzma.decompress((DATA / "database.sql.xz").read_bytes()).decode()
    # The dump was made for psql.
    dump = re.sub(r"^\\(un)?restrict .*$", "", dump, flags=re.MULTILINE)
    dump = re.sub(r"^CREATE TABLE (\w+\.\w+)", _with_oid, dump, flags=re.MULTILINE)
    connection.execute(dump.encode())
    oids = {
        name: _one(connection, "select %s::regclass::oid::int", name) for name in facts()["oids"]
    }
    assert oids == facts()["oids"]
    _reach_xid(connection, facts()["xid"])
    home = _one(connection, "select home from headwater.installation")
    statement = sql.SQL(
        "create or replace function headwater.home() returns text language sql stable"
        " set search_path = pg_catalog, pg_temp as {}"
    )
    connection.execute(statement.format(sql.Literal(f"select '{home}'")))
    # The catalog was written by other transactions, which looks like a schema change.
    connection.execute(
        "select headwater.remember(headwater.observe(member, root)) from headwater.captures"
    )
    connection.execute("select headwater.sync_tables()")
    # Stored results of mutations have not expired since.
    connection.execute("update headwater.requests set expires_at = clock_timestamp() + '1 hour'")
    log = facts()["cursor"]["position"].partition("-")[0]
    assert _one(connection, "select headwater.log_id()") == log


def _with_oid(found: re.Match[str]) -> str:
    """The statement, after all oids below that of the table are used up."""
    oid = facts()["oids"].get(found[1])
    return found[0] if oid is None else f"{_USE_OIDS.format(oid)}{found[0]}"


_USE_OIDS = """
    do $$ declare last bigint := 0; begin
      while last < {0} - 1 loop
        last := lo_creat(-1);
        perform lo_unlink(last::oid);
      end loop;
    end $$;
"""


def _reach_xid(connection: psycopg.Connection, xid: int) -> None:
    while _one(connection, "select pg_current_xact_id()::text::bigint") < xid:
        pass


def _one(connection: psycopg.Connection, query: str, *values: object) -> Any:
    row = connection.execute(query.encode(), values).fetchone()
    assert row is not None
    return row[0]
