"""The command line, as a person and as a script use it: real processes, real output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from headwater import __version__
from headwater.capture.postgres.schema import LATEST, versions
from tests.support.databases import passable_folder

HEADWATER = [sys.executable, "-m", "headwater"]


def headwater(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HEADWATER, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(**variables),
        check=False,
    )


def environment(**variables: str) -> dict[str, str]:
    others = {k: v for k, v in os.environ.items() if not k.startswith("HEADWATER_")}
    return {**others, "COLUMNS": "200", **variables}


def documents(done: subprocess.CompletedProcess[str]) -> list[Any]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def psql(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


@pytest.fixture
def database(empty_url: str) -> str:
    psql(empty_url, "create table orders (id int primary key, note text)")
    return empty_url


def test_init_status_and_uninstall(database: str) -> None:
    at = ("--url", database, "--json")
    assert documents(headwater("init", *at)) == [{"version": LATEST, "applied": len(versions())}]
    assert documents(headwater("init", *at)) == [{"version": LATEST, "applied": 0}]
    assert documents(headwater("enable", "orders", *at)) == [{"table": "orders", "enabled": True}]
    psql(database, "insert into orders values (1, 'x')")
    (status,) = documents(headwater("status", *at))
    (table,) = status["tables"]
    assert (table["name"], table["enabled"], table["changes"]) == ("orders", True, 2)
    assert status["log"]["retention"] == 30 * 86400
    assert documents(headwater("disable", "orders", *at)) == [{"table": "orders", "enabled": False}]
    assert "disabled: subscriptions get no updates" in headwater("status", "--url", database).stdout
    gone = {"removed": True, "tables_of_views": []}
    assert documents(headwater("uninstall", "--yes", *at)) == [gone]
    assert documents(headwater("uninstall", "--yes", *at)) == [gone | {"removed": False}]


def test_views_are_listed_whatever_their_schema(url: str) -> None:
    psql(
        url,
        'create schema "Reports"; create table "Reports"."by day" as select 1 as id',
        "create table sums ()",
        "insert into headwater.views (name, state, relation) values"
        """ ('a', 'live', '"Reports"."by day"'::regclass), ('b', 'live', 'sums'::regclass),"""
        " ('gone', 'live', 1), ('new', 'new', null)",
    )
    (found,) = documents(headwater("view", "list", "--url", url, "--json"))
    rows = {"a": 1, "b": 0, "gone": None, "new": None}
    assert {each["name"]: each["rows"] for each in found} == rows


def test_uninstall_names_the_tables_of_views(url: str) -> None:
    psql(
        url,
        'create schema "Reports"; create table "Reports"."by day" (id int); create table sums ()',
        "insert into headwater.views (name, state, relation) values"
        """ ('a', 'live', '"Reports"."by day"'::regclass), ('b', 'live', 'sums'::regclass),"""
        " ('gone', 'live', 1), ('new', 'new', null)",
    )
    said = headwater("uninstall", "--yes", "--url", url).stdout
    (statement,) = (line for line in said.splitlines() if "drop table" in line)
    assert 'stay unchanged: "Reports"."by day", public.sums.' in said
    psql(url, statement.partition(": ")[2])
    with pytest.raises(psycopg.errors.UndefinedTable):
        psql(url, "select from sums")


def test_output_for_people(database: str) -> None:
    assert "Installed version" in headwater("init", "--url", database).stdout
    assert headwater("enable", "orders", "--url", database).stdout == "Capturing orders.\n"
    status = headwater("status", "--url", database).stdout
    assert "retention 30 days" in status
    assert "captured" in status


ERRORS = [
    (["status"], 2, "config", "no database is given"),
    (["status", "--url", "postgresql://", "--embedded"], 2, "config", "contradict each other"),
    (["status", "--url", "postgresql://x@127.0.0.1:1/y"], 3, "database", "cannot reach"),
    (["status", "--url", "mysql://nowhere"], 2, "config", "URL is not usable"),
    (["status", "--url", "{url}"], 1, "not_installed", "not installed"),
    (["disable", "orders", "--url", "{url}"], 1, "not_installed", "not installed"),
    (["enable", "nowhere", "--url", "{url}"], 1, "capture", "there is no table nowhere"),
    (["tail", "nowhere", "--url", "{url}"], 1, "capture", "table nowhere is not enabled"),
    (["tail", "--since", "yesterday", "--url", "{url}"], 2, "config", "is not a position"),
    (["tail", "--since", "ff-3:3:", "--url", "{url}"], 4, "resync", "another log"),
    (["tail", "orders", "--where", "amount", "--url", "{url}"], 2, "invalid_query", "condition"),
    (["tail", "--where", "id = 1", "--url", "{url}"], 2, "invalid_query", "exactly one table"),
]


@pytest.mark.parametrize(("arguments", "code", "name", "message"), ERRORS)
def test_errors(arguments: list[str], code: int, name: str, message: str, database: str) -> None:
    arguments = [argument.format(url=database) for argument in arguments]
    plain, as_json = headwater(*arguments), headwater(*arguments, "--json")
    assert (plain.returncode, as_json.returncode) == (code, code), plain.stderr
    assert "Traceback" not in plain.stderr
    assert "hint: " in plain.stderr
    error = json.loads(as_json.stderr.splitlines()[-1])["error"]
    assert error["code"] == name
    assert message in error["message"]
    assert error["hint"]


def test_a_wrong_option_is_a_usage_error() -> None:
    done = headwater("tail", "--sinse", "x")
    assert done.returncode == 2
    assert "No such option" in done.stderr


PORTS = [["serve", "--port"], ["demo", "--port"], ["pipeline", "run", "--metrics-port"]]


@pytest.mark.parametrize("command", PORTS, ids=" ".join)
@pytest.mark.parametrize("port", ["-1", "65536"])
def test_a_port_that_does_not_exist(command: list[str], port: str) -> None:
    done = headwater(*command, port)
    assert done.returncode == 2
    assert command[-1] in done.stderr
    assert "Traceback" not in done.stderr


UNUSABLE = [
    "postgresql://ann:secret%zz@db/shop",
    "postgresql://ann:secret@[::1/shop",
    "mysql://ann:secret@db/shop",
]


@pytest.mark.parametrize("url", UNUSABLE)
def test_an_unusable_url_does_not_show_its_password(url: str) -> None:
    done = headwater("status", "--url", url)
    assert done.returncode == 2
    assert "the database URL is not usable" in done.stderr
    assert "secret" not in done.stdout + done.stderr


def test_the_version() -> None:
    done = headwater("--version")
    assert (done.returncode, done.stdout) == (0, f"headwater {__version__}\n")


def test_settings_from_the_environment(database: str) -> None:
    assert headwater("init", HEADWATER_URL=database).returncode == 0
    done = headwater("init", HEADWATER_URL=database, HEADWATER_LOG_RETENTION="long")
    assert done.returncode == 2
    assert "[log] retention: 'long' is not a length of time" in done.stderr


class Tail:
    """`headwater tail` in another terminal."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self.process = subprocess.Popen(
            [*HEADWATER, "tail", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**variables),
        )

    def lines(self, count: int) -> list[str]:
        assert self.process.stdout is not None
        return [self.process.stdout.readline() for _ in range(count)]

    def end(self, signal_: signal.Signals) -> int:
        self.process.send_signal(signal_)
        self.process.communicate(timeout=30)
        return self.process.returncode


@pytest.fixture
def tails() -> Iterator[list[Tail]]:
    opened: list[Tail] = []
    yield opened
    for tail in opened:
        tail.process.kill()
        tail.process.communicate()


def test_tail_shows_what_psql_does(database: str, tails: list[Tail]) -> None:
    (position,) = _enabled(database)
    tail = Tail("orders", "--url", database, "--json", "--since", position)
    tails.append(tail)
    psql(database, "insert into orders values (1, 'a')")
    (first,) = tail.lines(1)
    psql(
        database,
        "begin; select set_config('headwater.user_id', 'ann', true);"
        " update orders set note = 'b'; commit",
        "delete from orders",
    )
    insert, update, delete = map(json.loads, [first, *tail.lines(2)])
    assert (insert["op"], insert["key"], insert["after"]) == (
        "insert",
        {"id": 1},
        {"id": 1, "note": "a"},
    )
    assert (update["op"], update["changed"], update["user_id"]) == ("update", ["note"], "ann")
    assert (delete["op"], delete["before"]["note"]) == ("delete", "b")
    again = Tail("orders", "--url", database, "--json", "--since", insert["position"])
    tails.append(again)
    assert [json.loads(line)["seq"] for line in again.lines(2)] == [update["seq"], delete["seq"]]
    assert tail.end(signal.SIGINT) == 130
    assert again.end(signal.SIGTERM) == 0


def _enabled(url: str) -> tuple[str]:
    assert headwater("enable", "orders", "--url", url).returncode == 0
    (status,) = documents(headwater("status", "--url", url, "--json"))
    return (status["log"]["position"],)


def test_tail_output_for_people(database: str, tails: list[Tail]) -> None:
    (position,) = _enabled(database)
    tail = Tail("orders", "--url", database, "--since", position, "--where", "id < 5")
    tails.append(tail)
    psql(
        database,
        "insert into orders values (1, E'two\\nlines and an escape \\x1b[31m')",
        "insert into orders values (7, 'not shown')",
        "update orders set note = null",
        "truncate orders",
    )
    insert, update, truncate = tail.lines(3)
    assert "insert   orders 1  note=two⏎lines and an escape ·[31m\n" in insert
    assert "→∅" in update
    assert "truncate orders" in truncate


def test_tail_into_head(database: str) -> None:
    (position,) = _enabled(database)
    psql(database, "insert into orders select i, 'x' from generate_series(1, 5000) i")
    command = f"{sys.executable} -m headwater tail --url '{database}' --since {position} | head -1"
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "insert" in done.stdout
    assert "Traceback" not in done.stderr
    assert done.returncode == 141


def test_doctor(database: str) -> None:
    (before,) = documents(headwater("doctor", "--url", database, "--json"))
    levels = {finding["topic"]: finding["level"] for finding in before}
    assert levels == {
        "server": "ok",
        "encoding": "ok",
        "log identity": "ok",
        "WAL source": "ok",
        "commit times": "ok",
        "tables": "ok",
        "notifications": "ok",
        "schema": "warn",
        "clients": "ok",
        "question role": "ok",
        "Java": "ok",
        "Spark": "ok",
        "Spark Connect": "ok",
        "lake": "ok",
        "lock": "ok",
    }
    headwater("enable", "orders", "--url", database)
    psql(database, "alter table orders add column more int")
    (after,) = documents(headwater("doctor", "--url", database, "--json"))
    assert [f["level"] for f in after if f["topic"] in ("schema", "table orders")] == ["ok", "warn"]
    tokens = {"HEADWATER_AUTH_SECRET": "x" * 32}
    for setting, level in (({}, "warn"), ({"HEADWATER_GATEWAY_TABLES": "closed"}, "ok")):
        (found,) = documents(headwater("doctor", "--url", database, "--json", **tokens, **setting))
        assert [f["level"] for f in found if f["topic"] == "clients"] == [level]


def test_doctor_for_a_role_without_rights(database: str) -> None:
    name = "doctor_patient"
    psql(database, f"drop role if exists {name}", f"create role {name} login")
    try:
        headwater("init", "--url", database)
        done = headwater("doctor", "--url", database.replace("postgres@", f"{name}@"), "--json")
        assert done.returncode == 1
        found = {finding["topic"]: finding for finding in json.loads(done.stdout)}
        assert found["schema"]["level"] == "fail"
        assert "grant usage on schema headwater" in found["schema"]["hint"]
        assert found["WAL source"]["level"] == "warn"
        assert "may not enable orders" in found["tables"]["detail"]
    finally:
        psql(database, f"drop role {name}")


def test_the_embedded_server_and_the_demo() -> None:
    """One data folder: `url` leaves the server running, the demo uses it, `status` finds it, and
    neither stops it."""
    with passable_folder() as folder:
        data = {"HEADWATER_DATA_DIR": str(folder / "data")}
        found = headwater("url", "--embedded", **data)
        url = found.stdout.strip()
        assert found.stderr == "The server runs until: headwater stop --embedded\n"
        psql(url, "create table orders (id int primary key)")
        assert documents(headwater("enable", "orders", "--embedded", "--json", **data))
        demo = headwater("demo", "--seconds", "3", "--no-pipeline", "--json", **data)
        assert demo.returncode == 0, demo.stderr
        changes = [json.loads(line) for line in demo.stdout.splitlines()]
        assert {change["table"] for change in changes} == {"orders"}
        assert "The shop is open" in demo.stderr
        # HEADWATER_URL does not overrule --embedded.
        status = headwater("status", "--embedded", "--json", HEADWATER_URL="postgresql://x", **data)
        assert documents(status)[0]["tables"][0]["name"] == "orders"
        stopped = [{"stopped": True, "data_dir": str(folder / "data")}]
        assert documents(headwater("stop", "--embedded", "--json", **data)) == stopped
        with pytest.raises(psycopg.OperationalError):
            psql(url, "select 1")


def test_explain(database: str) -> None:
    at = ("--url", database)
    psql(database, "create view noted as select id from orders where note is not null")
    assert "headwater init" in headwater("explain", "select 1 ", "--json", *at).stderr
    headwater("enable", "orders", *at)
    assert documents(headwater("explain", "select * from orders where id = $1", "--json", *at)) == [
        {
            "sql": "select * from orders where id = $1",
            "everything": False,
            "tables": [
                {"table": "orders", "columns": ["id", "note"], "where": "id = $1", "through": []}
            ],
            "uncaptured": [],
            "notes": [],
        }
    ]
    psql(database, "create table other (id int primary key)")
    shown = headwater("explain", "select count(*) from noted, other", *at).stdout.splitlines()
    assert shown[0] == "select count(*) from noted, other"
    assert shown[2].split() == ["orders", "id,", "note", "any", "noted"]
    assert shown[3] == "Changes of other are not captured."
    assert "headwater enable other" in shown[4]
    assert (
        'relation "nowhere" does not exist'
        in headwater("explain", "select * from nowhere", *at).stderr
    )
    psql(database, "create function f() returns int language plpgsql as 'begin return 1; end'")
    assert "Every change" in headwater("explain", "select f()", *at).stdout
    assert "no change makes it run again" in headwater("explain", "select 1 ", *at).stdout
    for wrong in (("explain", "noted"), ("explain", "select 1 ", "a=1"), ("explain", "selec 1")):
        assert headwater(*wrong, *at).returncode == 2


def test_explain_a_query_of_the_application(database: str, tmp_path: Path) -> None:
    headwater("enable", "orders", "--url", database)
    (tmp_path / "shop.py").write_text(PROGRAM)

    def explain(*arguments: str) -> subprocess.CompletedProcess[str]:
        variables = {"HEADWATER_URL": database, "PYTHONPATH": str(tmp_path)}
        return headwater("explain", *arguments, "--json", **variables)

    (found,) = documents(explain("noted", "note=x", "--app", "shop:hw"))
    assert found["tables"][0]["where"] == "note = 'x'"
    assert documents(explain("constant", "--app", "shop:hw")) == []
    for arguments, said in (
        (("noted",), "no application is given"),
        (("nowhere", "--app", "shop:hw"), "has no query 'nowhere'"),
        (("noted", "--app", "shop:hw"), "note"),
        (("noted", "note", "--app", "shop:hw"), "is not an argument"),
        (("noted", "note=1", "--app", "shop:hw"), "args.note"),
    ):
        done = explain(*arguments)
        assert done.returncode == 2
        assert said in done.stderr


PROGRAM = """
from headwater import Headwater

hw = Headwater()

@hw.query
async def noted(ctx, note: str):
    return await ctx.fetch("select * from orders where note = %s", note)

@hw.query
async def constant(ctx):
    return 1
"""


def test_a_mistake_in_the_application_is_reported_with_its_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop.py").write_text(
        "from headwater import Headwater\n"
        "hw = Headwater('postgresql://nowhere')\n"
        "@hw.query\n"
        "async def prices(): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    done = headwater("serve", "shop:hw")
    assert done.returncode == 2
    assert "error: shop:hw: query prices takes no context\n" in done.stderr
    assert "hint: Its first argument is the context: def prices(ctx, …)\n" in done.stderr
