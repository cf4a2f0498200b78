"""`headwater source …` over a scripted source: what people and programs see and change."""

from __future__ import annotations

import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

from headwater.capture.running import check, removal
from headwater.capture.source import Problem
from headwater.commands import program
from headwater.errors import SourceUnavailable
from tests.support.databases import fresh_database
from tests.support.running_sources import ScriptedDatabase, running, supervised
from tests.support.scripted_source import ScriptedSource

SOURCE = "sqlite:////srv/scripted.db?password=secret"
"""Its option is not one of SQLite: it must not be printed."""


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def documents(self) -> list[Any]:
        assert self.code == 0, self.err
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.err.splitlines()[-1])["error"]
        return found


Run = Callable[..., Done]


@pytest.fixture
def run(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    """Runs `headwater source …` in this process. It never prints a password."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, group: tuple[str, ...] = ("source",)) -> Done:
        monkeypatch.setattr(sys, "argv", ["headwater", *group, *arguments, "--url", url])
        with pytest.raises(SystemExit) as ended:
            program.main()
        printed = capsys.readouterr()
        assert "secret" not in printed.out + printed.err
        code = ended.value.code or 0
        assert isinstance(code, int)
        return Done(code, printed.out, printed.err)

    yield run
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> ScriptedDatabase:
    """The database of every source in this process."""
    made = ScriptedDatabase()
    monkeypatch.setattr(check, "open_source", made.open)
    monkeypatch.setattr(removal, "open_source", made.open)
    return made


def stored(url: str, statement: str) -> list[Any]:
    with psycopg.connect(url) as connection:
        return [row[0] for row in connection.execute(statement.encode()).fetchall()]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


DEFINITIONS = "select definition from headwater.source_definitions order by name"


def added(run: Run, *options: str) -> Done:
    tables = ("--table", "orders", "--table", "customers")
    return run("add", SOURCE, "--into", "shop", *tables, *options)


# ------------------------------------------------------------------------ add and check


def test_add_with_every_option(run: Run, url: str, database: ScriptedDatabase) -> None:
    options = (
        "--exclude", "orders: note", "--where", "customers: amount > 5", "--name", "mine",
        "--type", "orders: name varchar(80)", "--option", "poll=0.5", "--option", "mode=hooks",
    )  # fmt: skip
    (document,) = added(run, *options, "--json").documents
    assert document == {
        "source": "mine",
        "added": True,
        "tables": ["customers", "orders"],
        "problems": [],
    }
    (definition,) = stored(url, DEFINITIONS)
    assert definition == {
        "url": SOURCE,
        "into": "shop",
        "tables": [
            {"name": "orders", "exclude": ["note"], "types": {"name": "varchar(80)"}},
            {"name": "customers", "where": {"and": [["amount", ">", "5"]]}},
        ],
        "options": {"poll": 0.5, "mode": "hooks"},
    }
    (again,) = added(run, *options, "--json").documents
    assert again["added"] is False


def test_add_waits_until_the_copy_is_done(run: Run, url: str, database: ScriptedDatabase) -> None:
    with running(url, database):
        done = added(run, "--wait", "--json")
        first, *steps = done.documents
        assert first["added"]
        assert steps[-1]["state"] == "running"
        assert (steps[-1]["live"], steps[-1]["tables"]) == (2, 2)
        rows = database.history.state(0)
        copied = stored(url, "select count(*) from shop.orders")
        assert copied == [len(rows["orders"])]
        for_people = run("resnapshot", "shop", "orders", "--wait")
        assert (for_people.code, for_people.out) == (0, "Source shop copies orders again.\n")


def test_resnapshot_of_a_lost_source_waits_for_the_copy(
    run: Run, url: str, database: ScriptedDatabase
) -> None:
    """The error from before the request is not the answer to it."""
    with running(url, database):
        added(run, "--wait")
    database.commits, database.oldest = 5, 3
    with running(url, database):
        until(lambda: stored(url, "select state from headwater.sources") == ["lost"])
        *_, last = run("resnapshot", "shop", "--wait", "--json").documents
        assert last["state"] == "running"


def test_add_of_a_corrected_definition_waits_for_the_copy(
    run: Run, url: str, database: ScriptedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the definition from before is not the answer. One that comes again is."""
    wrong = Problem("the mode is wrong", "choose another")

    async def answer(source: ScriptedSource) -> list[Problem]:
        return [wrong] if source.definition.options.get("mode") == "wrong" else []

    added(run, "--option", "mode=wrong")
    monkeypatch.setattr(ScriptedSource, "check", answer)
    with running(url, database):
        until(lambda: stored(url, "select state from headwater.sources") == ["refused"])
        done = run("resnapshot", "shop", "--wait", "--json")
        assert (done.code, done.error["message"]) == (1, "source shop: the mode is wrong")
        *_, last = added(run, "--option", "mode=right", "--wait", "--json").documents
        assert last["state"] == "running"


PROBLEMS = [
    Problem("the role may not replicate", "alter role headwater replication"),
    Problem("the table orders has no key", "alter table orders add primary key (id)"),
    Problem("the disk is almost full", "make room", warning=True),
]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, database: ScriptedDatabase) -> list[Problem]:
    """What the database refuses."""
    problems = list(PROBLEMS)

    async def answer(source: ScriptedSource) -> list[Problem]:
        return problems

    monkeypatch.setattr(ScriptedSource, "check", answer)
    return problems


def test_problems_are_shown_and_nothing_is_added(
    run: Run, url: str, refused: list[Problem]
) -> None:
    done = added(run)
    assert done.code == 1
    for problem in PROBLEMS:
        assert problem.what in done.out
        assert problem.fix in done.out
    assert "Nothing was changed" in done.out
    as_json = added(run, "--json")
    (document,) = [json.loads(line) for line in as_json.out.splitlines()]
    assert as_json.code == 1
    assert document["ok"] is False
    assert document["problems"][0] == {
        "what": "the role may not replicate",
        "fix": "alter role headwater replication",
        "warning": False,
        "missing": None,
    }
    assert stored(url, DEFINITIONS) == []
    del refused[:2]  # A warning does not prevent it.
    with_warning = added(run)
    assert with_warning.code == 0
    assert "the disk is almost full" in with_warning.out
    assert len(stored(url, DEFINITIONS)) == 1


@pytest.mark.parametrize("where", ["orders: nope = 1", "orders: amount > many"])
def test_a_predicate_that_does_not_fit(
    run: Run, url: str, database: ScriptedDatabase, where: str
) -> None:
    done = added(run, "--where", where, "--json")
    assert done.code == 1
    (problem,) = json.loads(done.out)["problems"]
    assert "the predicate of table orders is wrong" in problem["what"]


def test_check(run: Run, refused: list[Problem]) -> None:
    del refused[:]
    assert added(run).code == 0
    assert "2 tables can be mirrored" in run("check").out
    refused.extend(PROBLEMS)
    found = run("check", "shop", "--json")
    assert found.code == 1
    assert json.loads(found.out)["ok"] is False
    missing = run("check", "nothing", "--json")
    assert missing.error["message"] == "there is no source nothing"
    assert missing.error["hint"] == "There are: shop."
    doctor = run(group=("doctor",))
    assert doctor.code == 1
    assert "the role may not replicate" in doctor.out


def test_a_source_that_does_not_answer(
    run: Run, url: str, database: ScriptedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(source: ScriptedSource) -> list[Problem]:
        raise SourceUnavailable("db:3306 cannot be reached", hint="Is the server running?")

    monkeypatch.setattr(ScriptedSource, "check", away)
    done = added(run)
    assert done.code == 1
    assert "db:3306 cannot be reached" in done.out
    assert "Is the server running?" in done.out
    assert stored(url, DEFINITIONS) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--exclude", "note"), "--exclude 'note' names no table"),
        (("--where", "lines: a = 1"), "'lines: a = 1' is about table lines, which is not mirrored"),
        (("--where", "orders: a ~ 1"), "source shop, table orders: 'a ~ 1' is not a condition"),
        (("--option", "secret"), "--option needs a name and a value"),
        (("--into", "public"), "into='public': mirrors cannot be in this schema"),
    ],
)
def test_wrong_options(
    run: Run, url: str, database: ScriptedDatabase, options: tuple[str, ...], message: str
) -> None:
    done = added(run, *options, "--json")
    assert done.code == 2
    assert message in done.error["message"]
    assert stored(url, DEFINITIONS) == []


# ------------------------------------------------------------------------ show and request


def test_list_and_status(run: Run, url: str, database: ScriptedDatabase) -> None:
    assert "There is no source. Add one" in run("list").out
    added(run)
    listed = run("list").out
    assert "no process runs it" in listed
    assert "headwater source run" in listed
    with running(url, database):
        added(run, "--wait", "--json")
        (sources,) = run("list", "--json").documents
        (shop,) = sources
        assert (shop["name"], shop["state"], shop["is_run"]) == ("shop", "running", True)
        (document,) = run("status", "shop", "--json").documents
        assert document["definition"]["url"] == "sqlite:////srv/scripted.db?password=***"
        assert document["definition"]["declared_by"] == "command"
        assert {table["state"] for table in document["tables"]} == {"live"}
        text = run("status", "shop").out
        assert "sqlite:////srv/scripted.db?password=***" in text
        assert "orders" in text
        (status,) = run("--json", group=("status",)).documents
        assert status["sources"][0]["name"] == "shop"
        assert "shop" in run(group=("status",)).out
        assert "source shop" in run(group=("doctor",)).out
    killed = run("list").out
    assert "no process runs it" in killed


@pytest.mark.parametrize("command", ["status", "pause", "resume", "resnapshot", "remove"])
def test_no_such_source(run: Run, command: str) -> None:
    confirmed = ("--yes",) if command == "remove" else ()
    done = run(command, "nothing", "--json", *confirmed)
    assert (done.code, done.error["code"]) == (1, "not_found")
    assert done.error["message"] == "there is no source nothing"


def test_pause_resume_and_resnapshot(run: Run, url: str, database: ScriptedDatabase) -> None:
    added(run)
    paused = "select paused from headwater.source_definitions"
    assert run("pause", "shop", "--json").documents == [{"source": "shop", "paused": True}]
    assert stored(url, paused) == [True]
    assert run("resume", "shop", "--json").documents == [{"source": "shop", "paused": False}]
    assert stored(url, paused) == [False]
    assert run("resnapshot", "shop", "--json").documents == [{"source": "shop", "tables": ["*"]}]
    assert stored(url, "select resnapshot from headwater.source_definitions") == [["*"]]
    wrong = run("resnapshot", "shop", "nothing", "--json")
    assert wrong.error["message"] == "source shop has no table nothing"


# ------------------------------------------------------------------------ remove

ROWS = "select count(*) from shop.orders"
EXISTS = "select to_regclass('shop.orders') is not null"


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_remove(
    run: Run, url: str, database: ScriptedDatabase, drop: bool, elsewhere: bool
) -> None:
    """By the process that runs it, or by the command itself if none does."""
    with running(url, database):
        added(run, "--wait", "--json")
        if elsewhere:
            done = run("remove", "shop", "--yes", *(["--drop-tables"] if drop else []))
    if not elsewhere:
        done = run("remove", "shop", "--yes", *(["--drop-tables"] if drop else []))
    assert done.code == 0, done.err
    assert f"The mirrors in shop are {'dropped' if drop else 'ordinary tables now'}." in done.out
    assert database.opened[-1].removed
    assert stored(url, DEFINITIONS) == []
    assert stored(url, EXISTS) == [not drop]
    if not drop:
        with psycopg.connect(url) as connection:
            connection.execute("delete from shop.orders")  # it is no longer read-only


def test_remove_a_source_that_does_not_answer(
    run: Run, url: str, database: ScriptedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(url, database):
        added(run, "--wait", "--json")

    async def away(source: ScriptedSource) -> None:
        raise SourceUnavailable("db:3306 cannot be reached")

    monkeypatch.setattr(ScriptedSource, "remove", away)
    done = run("remove", "shop", "--yes", "--json")
    assert (done.code, done.error["code"]) == (1, "source_unavailable")
    assert done.error["message"] == "source shop is not removed: db:3306 cannot be reached"
    assert "headwater source remove shop --force" in done.error["hint"]
    assert len(stored(url, DEFINITIONS)) == 1
    (document,) = run("remove", "shop", "--yes", "--force", "--json").documents
    assert document["removed"]
    assert "names begin with _headwater_shop_" in document["left_behind"]
    assert stored(url, DEFINITIONS) == []
    assert stored(url, EXISTS) == [True]


def test_run_a_source_that_does_not_exist(run: Run) -> None:
    assert run("run", "nothing", "--json").error["message"] == "there is no source nothing"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_until_it_is_stopped(url: str, tmp_path: Path, number: signal.Signals) -> None:
    """It copies a source, and Ctrl-C is its usual end."""
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as made:
        made.execute("create table orders (id integer primary key, name text)")
        made.execute("insert into orders values (1, 'a'), (2, 'b')")
    environment = {"HEADWATER_URL": url, **os.environ}
    headwater = [sys.executable, "-m", "headwater", "source"]
    runner = subprocess.Popen(
        [*headwater, "run"], env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    try:
        adding = [*headwater, "add", "sqlite:///shop.db", "--into", "shop", "--wait", "--json"]
        done = subprocess.run(
            adding, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["state"] == "running"
        assert stored(url, "select id from shop.orders order by 1") == [1, 2]
        assert stored(url, "select estimate from headwater.source_tables") == [2]
        runner.send_signal(number)
        assert runner.wait(30) == 0
        assert stored(url, "select state from headwater.sources") == ["stopped"]
    finally:
        runner.kill()
        runner.communicate()


SLOTS = "select slot_name from pg_replication_slots where slot_name = 'headwater_removed'"
PUBLICATIONS = "select pubname from pg_publication"


def test_remove_leaves_no_slot_behind(run: Run, url: str, server_url: str) -> None:
    """Of a PostgreSQL: a slot that stays would fill its disk."""
    with fresh_database(server_url, installed=False) as elsewhere:
        with psycopg.connect(elsewhere) as connection:
            connection.execute("create table orders (id int primary key, name text)")
            connection.execute("insert into orders values (1, 'a')")
        with supervised(url):
            done = run("add", elsewhere, "--into", "removed", "--wait", "--json")
            assert done.documents[-1]["state"] == "running"
            assert stored(url, "select name from removed.orders") == ["a"]
            assert stored(url, "select estimate > 0 from headwater.source_tables") == [True]
            assert stored(elsewhere, SLOTS) == ["headwater_removed"]
            assert run("remove", "removed", "--yes").code == 0
        assert stored(elsewhere, SLOTS) == []
        assert stored(elsewhere, PUBLICATIONS) == []
