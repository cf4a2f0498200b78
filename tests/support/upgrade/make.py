"""Makes `data/` by running a checkout of an earlier release, through its commands and SQL alone:

    git worktree add /tmp/before a46a896
    python -m tests.support.upgrade.make /tmp/before tests/support/upgrade/data

It takes a few minutes. What it makes: `database.sql.xz` (a plain dump), `lake.tar.xz` (the lake
with its checkpoints) and `facts.json`: tables as the database had them at positions and times, and
what the release itself answered. The lake ends with a batch that is written and not committed, and
the log with changes that the lake lacks.
"""

from __future__ import annotations

import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg

from headwater.embedded.account import account_for
from headwater.embedded.binaries import find_binaries
from tests.support.databases import database_url

HERE = Path(__file__).parent

TYPES_AND_TABLES = (
    # A restored table gets its oid back only if tables were made in the order of a dump, which is
    # that of their names. The view `revenue` is made last.
    "create type mood as enum ('sad', 'fine')",
    """create table kinds (
         id int primary key, small smallint, big bigint, price numeric(12, 2), free numeric,
         r real, d double precision, ok boolean, day date, at timestamptz, local timestamp,
         data bytea, doc jsonb, tags text[], who uuid, pause interval, feeling mood)""",
    """create table orders (
         id bigint primary key, region text, amount numeric(12, 2), status text, note text)""",
    """create table parcels (id int, year int, weight int, primary key (id, year))
         partition by list (year)""",
    "create table parcels_new partition of parcels for values in (2026)",
    "create table parcels_old partition of parcels for values in (2025)",
)

KINDS = """
    insert into kinds select
      i, -i, 9007199254740993 + i, i / 4.0, i + 0.000000000000000001, i / 4.0, i / 3.0, i = 1,
      date '2024-02-28' + i, timestamptz '2026-03-29 00:59:59.999999+00' + i * interval '1 second',
      timestamp '1999-12-31 23:59:59' + i * interval '1 second', '\\x00ff'::bytea,
      jsonb_build_object('i', i, 'text', 'ä"\\'), array['a', null, 'b,' || i],
      '00000000-0000-0000-0000-00000000000a', interval '1 day 2 hours', 'fine'
    from generate_series({}, {}) i
"""

FIRST = (
    KINDS.format(1, 3),
    "insert into orders select i, 'r' || i % 3, i * 10.25, 'new', 'n' || i"
    " from generate_series(1, 12) i",
    "insert into parcels values (1, 2025, 10), (2, 2025, 20), (1, 2026, 30)",
)

AFTER_THE_GAP = (
    "update orders set amount = amount * 2 where id <= 4",
    "begin; select set_config('headwater.user_id', 'ann', true),"
    " set_config('headwater.function_name', 'cancel', true),"
    " set_config('headwater.trace_id', '4bf92f3577b34da6', true);"
    " update orders set status = 'cancelled' where id = 2; delete from orders where id = 3; commit",
    "update parcels set year = 2026, weight = 21 where id = 2",
    "truncate kinds",
    KINDS.format(4, 5),
)

SCHEMA_CHANGES = (
    "alter table orders add column paid_at timestamptz",
    "update orders set paid_at = '2026-01-02 03:04:05+00', status = 'paid' where id = 5",
    "alter table orders drop column note",
    "insert into orders values (20, 'r9', 7.50, 'new', null)",
    "update orders set id = 21 where id = 20",
)

BEFORE_THE_CRASH = (
    "insert into orders values (30, 'r1', 300, 'new', null)",
    "delete from parcels where id = 1 and year = 2025",
)

LEFT_IN_THE_LOG = (
    "update orders set amount = 301 where id = 30",
    "begin; insert into orders values (31, 'r3', 1, 'new', null), (32, 'r3', 2, 'new', null);"
    " delete from orders where id = 1; commit",
    KINDS.format(6, 6),
    "insert into parcels values (9, 2026, 90)",
)

KEYS = {"kinds": "id", "orders": "id", "parcels": "id, year"}


class Release:
    """The release in a checkout, with a database and a lake."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self._source = checkout / "src"
        self.commit = _output("git", "-C", str(checkout), "rev-parse", "HEAD")
        later = (self._source / "headwater" / "commands").is_dir()
        self.as_json = ("--json",) if later else ("--format", "json")
        self._folder = folder
        self.lake = folder / "lake"
        self._server = ("--embedded", "--data-dir", str(folder / "data"))
        self.url = ""
        self.url = self.run("url", *self._server).stdout.strip()
        self.execute("create database shop")
        self.url = database_url(self.url, "shop")

    def run(
        self, *arguments: str, exit_code: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the release to its end."""
        done = subprocess.run(
            self._command(*arguments), capture_output=True, text=True, check=False, timeout=600,
            env=self._environment(**environment),
        )  # fmt: skip
        print("headwater", *arguments, "->", done.returncode, flush=True)
        assert done.returncode == exit_code, done.stderr
        return done

    def documents(self, *arguments: str) -> list[Any]:
        return [json.loads(line) for line in self.run(*arguments).stdout.splitlines()]

    def pipeline(self, *options: str, exit_code: int = 0, **environment: str) -> None:
        arguments = ("pipeline", *options, "--lake", str(self.lake))
        self.run(*arguments, exit_code=exit_code, **environment)

    @contextmanager
    def running(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            self._command(*arguments), stdout=subprocess.PIPE, text=True,
            env=self._environment(),
            # A shell starts background jobs with SIGINT ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)

    def stop(self) -> None:
        self.url = ""
        self.run("stop", *self._server)

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements, each in a transaction of its own; the rows of the last one."""
        with psycopg.connect(self.url, autocommit=True, options="-c timezone=UTC") as connection:
            for statement in statements:
                cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "headwater", *arguments]

    def _environment(self, **variables: str) -> dict[str, str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADWATER_")}
        if self.url:
            environment["HEADWATER_URL"] = self.url
        return {**environment, "PYTHONPATH": f"{self._source}:{HERE}", **variables}


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


# ------------------------------------------------------------------------ the facts


def copies(release: Release, name: str) -> list[dict[str, Any]]:
    """The tables as they are now: position, time, columns with their types, rows as JSON. Types
    that are text in Spark are text here, too."""
    found = []
    options = "-c timezone=UTC -c intervalstyle=iso_8601"
    with psycopg.connect(release.url, options=options) as database:
        database.execute("set transaction isolation level repeatable read")
        position = _one(database, "select headwater.log_id() || '-' || pg_current_snapshot()")
        for table, key in KEYS.items():
            columns = _one(database, _COLUMNS.format(table))
            rows = _one(database, f"select json_agg(t order by {key})::text from {table} t")
            found.append({"name": name, "table": table, "columns": columns, "rows": rows or "[]"})
        at = _one(database, "select clock_timestamp()::text")
    return [{"position": position, "at": at, **each} for each in found]


_COLUMNS = """
    select string_agg(format('%I %s', attname, case
        when atttypid in ('jsonb'::regtype, 'uuid'::regtype, 'interval'::regtype, 'mood'::regtype)
        then 'text' else format_type(atttypid, atttypmod) end), ', ' order by attnum)
    from pg_attribute where attnum > 0 and not attisdropped and attrelid = '{}'::regclass
"""


def _one(database: psycopg.Connection, statement: str) -> Any:
    row = database.execute(statement.encode()).fetchone()
    assert row is not None
    return row[0]


def subscribed_position(release: Release, facts: dict[str, Any]) -> None:
    """What clients of a gateway have: positions, and the answer of a mutation."""
    with release.running("serve", "shop:hw", "--port", "0", "--json") as gateway:
        assert gateway.stdout is not None
        url = json.loads(gateway.stdout.readline())["url"]
        live = {"table": "orders", "order": [["id", "asc"]], "limit": 5}
        facts["live"] = {"query": live, "message": _first_snapshot(url, live)}
        request = {"name": "pay", "key": "upgrade-1", "arguments": {"id": 6}}
        answer = httpx.post(
            f"{url}/v1/mutation/pay", json=request["arguments"], trust_env=False, timeout=60,
            headers={"Idempotency-Key": "upgrade-1"},
        )  # fmt: skip
        facts["mutation"] = request | {"answer": answer.raise_for_status().json()}


def _first_snapshot(url: str, live: dict[str, Any]) -> Any:
    with httpx.stream("POST", f"{url}/v1/live", json=live, trust_env=False, timeout=60) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: ") and '"snapshot"' in line:
                return json.loads(line.removeprefix("data: "))
    raise AssertionError("no snapshot")


def saved_cursor(release: Release, facts: dict[str, Any]) -> None:
    """A named consumer that has seen every change so far."""
    ((since,),) = release.execute("select headwater.log_id() || '-' || pg_current_snapshot()")
    release.execute("update orders set amount = amount + 1 where id = 7")
    arguments = ("tail", "orders", "--since", since, "--cursor", "mail", "--json")
    with release.running(*arguments) as tail:
        assert tail.stdout is not None
        assert json.loads(tail.stdout.readline())["key"] == {"id": 7}
        for _ in range(300):
            ((saved,),) = release.execute("select position from headwater.cursors")
            if saved != since:
                break
            time.sleep(0.1)
    assert saved != since
    facts["cursor"] = {"name": "mail", "position": saved}


# ------------------------------------------------------------------------ the steps


def make(release: Release) -> dict[str, Any]:
    facts: dict[str, Any] = {"commit": release.commit, "copies": []}
    lake = ("--lake", str(release.lake))
    _use_oids(release, 5_000)
    release.run("init")
    release.execute("select headwater.set_retention('36500 days')")
    release.execute(*TYPES_AND_TABLES)
    release.run("enable", "kinds", "orders", "parcels")
    release.execute(*FIRST)
    release.pipeline("run", "--once", "--app", "shop:hw")
    facts["copies"] += copies(release, "first")
    release.execute("update orders set status = 'seen' where id = 12")
    release.pipeline("run", "--once", "--app", "shop:hw")
    _lose_changes(release)
    facts["copies"] += copies(release, "lost")
    release.pipeline("run", "--once", "--app", "shop:hw", exit_code=4)
    release.pipeline("resnapshot")
    facts["copies"] += copies(release, "after the gap")
    release.execute(*AFTER_THE_GAP)
    facts["copies"] += copies(release, "changed")
    release.execute(*SCHEMA_CHANGES)
    release.pipeline("run", "--once", "--app", "shop:hw")
    facts["copies"] += copies(release, "altered")
    saved_cursor(release, facts)
    subscribed_position(release, facts)
    release.pipeline("run", "--once", "--app", "shop:hw")
    since = next(each["position"] for each in facts["copies"] if each["name"] == "after the gap")
    cursor = release.lake.parent / "replay"
    facts["answers"] = {
        "history": release.documents("history", "orders", "2", *lake, *release.as_json),
        "audit": release.documents("audit", *lake, *release.as_json),
        "replay": release.documents(
            "replay", "orders", "--emit", "--since", since, "--cursor", str(cursor), *lake, "--json"
        ),
    }
    facts["replay"] = {"since": since, "cursor": cursor.read_text()}
    release.execute(*BEFORE_THE_CRASH)
    # The variable has one name or the other, depending on the release.
    crash = {"HEADWATER_CRASH_AT": "written:1", "HEADWATER_FAILPOINT": "written:1"}
    release.pipeline("run", "--once", exit_code=-9, **crash)
    release.execute(*LEFT_IN_THE_LOG)
    facts["copies"] += copies(release, "left")
    facts["log"] = release.execute(
        "select json_agg(json_build_array(seq, table_name, op) order by seq) from headwater.changes"
        " where schema_name = 'public'"
    )[0][0]
    return facts


def _use_oids(release: Release, count: int) -> None:
    """Leave room for what a restored dump creates before the tables."""
    release.execute(
        f"do $$ begin for i in 1..{count} loop perform lo_unlink(lo_creat(-1)); end loop; end $$"
    )


def _lose_changes(release: Release) -> None:
    """Write a change and trim the log past it, before the pipeline has read it."""
    release.execute("insert into orders values (13, 'r1', 130, 'new', 'lost')")
    for _ in range(20):
        release.execute("select headwater.set_retention('1 second')")
        time.sleep(1.2)
        release.execute("select headwater.trim_log()")
        release.execute("select headwater.set_retention('36500 days')")
        if not release.execute("select from headwater.log limit 1"):
            return
    raise AssertionError("the log was not trimmed")


def main() -> None:
    checkout, target = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    target.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="headwater-"))
    folder.chmod(0o711)
    release = Release(checkout, folder)
    try:
        facts = make(release)
        dump = subprocess.run(
            [find_binaries(account_for(folder / "data", folder / "data")) / "pg_dump",
             "--no-owner", "--no-comments", "--inserts", "--rows-per-insert=100", release.url],
            capture_output=True, check=True,
        ).stdout  # fmt: skip
        facts["oids"] = dict(
            release.execute(
                "select format('%I.%I', n.nspname, c.relname), c.oid::bigint"
                " from headwater.captures join pg_class c on c.oid = member"
                " join pg_namespace n on n.oid = c.relnamespace order by c.oid"
            )
        )
        facts["xid"] = int(release.execute("select pg_current_xact_id()::text")[0][0])
    finally:
        release.stop()
    (target / "database.sql.xz").write_bytes(lzma.compress(dump, preset=9 | lzma.PRESET_EXTREME))
    (target / "facts.json").write_text(json.dumps(facts, ensure_ascii=False) + "\n")
    with tarfile.open(target / "lake.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted(release.lake.rglob("*")):
            if path.is_file() and not path.name.startswith("_spark.log"):
                archive.add(path, str(path.relative_to(release.lake)), filter=_anonymous)
    if "--keep" in sys.argv:
        print(folder)
    else:
        shutil.rmtree(folder)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o600
    return entry


if __name__ == "__main__":
    main()
