"""The page docs/explanation/who-can-do-what.md: one test for each of its lines, in one database
that was set up as the documentation says."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jwt
import psycopg
import pytest
from psycopg.errors import InsufficientPrivilege

from headwater import connect
from headwater.client.connection import Connection as Client
from headwater.embedded import EmbeddedPostgres
from headwater.errors import Forbidden, InvalidQuery, Unauthorized
from headwater.pipeline.stream.checkpoints import LakeLock
from headwater.testing.gateway_process import Served, serving
from tests.support.databases import fresh_database, passable_folder
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
SECRET = "a secret that is long enough for SHA-256 and more"
ADMIN_PAGES = ("/v1/admin/overview", "/v1/admin/log", "/v1/admin/tables")
PROGRAM = """
from headwater import Headwater

hw = Headwater()

@hw.query
async def whoami(ctx) -> str:
    return await ctx.fetch_value("select current_user::text")

@hw.mutation
async def write(ctx, note: str) -> None:
    await ctx.execute("insert into open values (default, %s)", note)
"""
TABLES = """
    create table open (id int generated always as identity primary key, note text);
    create table guarded (id int primary key, person text, note text);
    insert into guarded values (1, 'ann', 'of ann'), (2, 'bob', 'of bob');
    alter table guarded enable row level security;
    create table seen (what text);
    grant all on seen to public;
    create table stolen (what text);
    grant all on stolen to public
"""
# Resets the role of the question, and reads the log.
SPY = """
    create function spy() returns boolean language plpgsql as $$
    declare
      found text;
    begin
      begin
        perform set_config('role', 'none', true);
        select 'log: ' || count(*) into found from headwater.log;
        raise warning 'spy %', found;
        return false;
      exception when insufficient_privilege then
        return true;
      end;
    end $$
"""


@dataclass
class Site:
    """A database with every role there is, and gateways over it."""

    superuser: str
    folder: Path
    roles: dict[str, str]
    """The URL of each, by what the page calls it."""
    gateway: Served
    """With authentication."""
    local: Served
    """Without."""

    def name(self, role: str) -> str:
        return re.sub(r".*//(.*)@.*", r"\1", self.roles[role])

    @contextmanager
    def as_(self, role: str) -> Iterator[psycopg.Connection]:
        with psycopg.connect(self.roles[role], autocommit=True) as connection:
            yield connection

    def token(self, user: str = "ann", **claims: Any) -> str:
        return jwt.encode({"sub": user, "exp": time.time() + 600, **claims}, SECRET, "HS256")

    def get(self, path: str, token: str | None = None, **params: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return self.gateway.get(path, headers=headers, params=params)


ROLES = ("owner", "headwater", "questions", "reader", "writer", "web")


def _documented(page: str, begin: str) -> str:
    """The SQL block of a page that begins so."""
    blocks = re.findall(r"```sql[^\n]*\n(.*?)```", (DOCS / page).read_text(), re.S)
    (found,) = (str(block) for block in blocks if block.lstrip().startswith(begin))
    return found


@pytest.fixture(scope="module")
def site(postgres: EmbeddedPostgres) -> Iterator[Site]:
    with passable_folder() as folder, fresh_database(postgres.url, installed=False) as url:
        database = url.rpartition("/")[2].partition("?")[0]
        names = {role: f"{role}_{database}" for role in ROLES}
        urls = {role: url.replace("postgres@", f"{name}@") for role, name in names.items()}
        urls["superuser"] = url
        _set_up(url, database, names, urls)
        (folder / "app.py").write_text(PROGRAM)
        common = {"question_url": urls["questions"], "program": "app:hw", "gateway_metrics": "auto"}
        secured = {"auth_secret": SECRET, "auth_roles": names["web"]}
        with (
            serving(urls["headwater"], folder, **common, **secured) as gateway,  # type: ignore[arg-type]
            serving(urls["headwater"], folder, **common) as local,  # type: ignore[arg-type]
        ):
            _enable(urls, names)
            yield Site(url, folder, urls, gateway, local)
        with psycopg.connect(url, autocommit=True) as connection:
            for name in names.values():
                connection.execute(f"drop owned by {name} cascade; drop role {name}".encode())


def _set_up(url: str, database: str, names: dict[str, str], urls: dict[str, str]) -> None:
    with psycopg.connect(url, autocommit=True) as connection:

        def execute(*statements: str) -> None:
            for statement in statements:
                connection.execute(statement.encode())

        execute(*(f"create role {name} login noinherit" for name in names.values()))
        execute(
            f"grant create on database {database} to {names['headwater']}",
            f"grant create on schema public to {names['owner']}",
            f"grant {names['web']} to {names['questions']}",
        )
    with psycopg.connect(urls["owner"], autocommit=True) as connection:
        connection.execute(TABLES)
        connection.execute(SPY)
        connection.execute(
            f"""
            create policy own on guarded to {names["web"]} using (
              person = current_setting('request.jwt.claims', true)::json ->> 'sub' and spy());
            grant select on open, guarded to {names["web"]};
            grant insert on open to {names["web"]};
            grant select, insert, update, delete on open to {names["writer"]};
            grant trigger, select on open, guarded to {names["headwater"]}
            """.encode()
        )


def _enable(urls: dict[str, str], names: dict[str, str]) -> None:
    with psycopg.connect(urls["headwater"], autocommit=True) as connection:
        for table in ("open", "guarded"):
            connection.execute("select headwater.enable_reactivity(%s)", (table,))
        grants = _documented("howto/existing-database.md", "grant usage on schema headwater")
        connection.execute(grants.replace(" to reader", f" to {names['reader']}").encode())
        grants = _documented("howto/queries-and-mutations.md", "grant execute on function")
        connection.execute(grants.replace("headwater_questions", names["questions"]).encode())


async def rows_of(hw: Client, table: str) -> list[dict[str, Any]]:
    async with hw.live({"table": table}) as live:
        return [dict(row) for row in live.rows]


def forbidden(connection: psycopg.Connection, *statements: str) -> None:
    for statement in statements:
        with pytest.raises(InsufficientPrivilege):
            connection.execute(statement.encode())


GATEWAYS_OWN = (
    "select headwater.issue_ticket('', 'ann', '{}', '1 hour', 10)",
    "select headwater.redeem_ticket('')",
    "select headwater.publish_once('{}', '{}', '{}', '1 hour', '{}', '{}')",
    "select headwater.set_retention('1 day')",
    "select headwater.trim_log()",
)
CLOSED = tuple(
    f"select * from headwater.{table}" for table in ("tickets", "requests", "published", "secret")
)
# A row in each, or nothing could be seen in any case; `secret` has one.
FILLED = """
    insert into headwater.tickets values ('h', 'ann', 'sealed', now() + interval '1 hour');
    insert into headwater.requests values ('s', 'k', 'd', 'r', now() + interval '1 hour');
    insert into headwater.published values ('s', 'k', 'd', now() + interval '1 hour')
"""


def test_every_line_of_the_page_has_a_test() -> None:
    page = (DOCS / "explanation/who-can-do-what.md").read_text()
    lines = re.findall(r"^\| ([^|]+) \|", page, re.M)
    who = {line.strip() for line in lines if line.strip() != "who"}
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {re.sub(r"\W+", "_", each).lower() for each in who} <= tested


# ------------------------------------------------------------------------ in the database


def test_superuser(site: Site) -> None:
    with site.as_("superuser") as connection:
        assert connection.execute("select count(*) > 0 from headwater.log").fetchone() == (True,)


async def test_table_owner(site: Site) -> None:
    """Its policy tries to reset the role. It cannot read the log: the row is shown, and it would
    not be shown if the attempt succeeded."""
    async with connect(site.gateway.url, token=site.token(role=site.name("web"))) as hw:
        assert (await rows_of(hw, "guarded"))[0]["note"] == "of ann"
    with site.as_("owner") as connection:
        forbidden(connection, "select * from headwater.log", *GATEWAYS_OWN, *CLOSED)
    without = {"auth_secret": SECRET, "auth_role": site.name("web")}
    with serving(site.roles["headwater"], site.folder, **without) as gateway:  # type: ignore[arg-type]
        async with connect(gateway.url, token=site.token()) as hw:
            with pytest.raises(Forbidden, match="question_url"):
                await rows_of(hw, "guarded")
    assert "spy log" not in site.gateway.log.read_text()


# PostgreSQL calls functions that are declared immutable while it plans a statement.
THIEF = """
    create function take() returns void language plpgsql as $$
    begin insert into public.stolen select format('%s rows', count(*)) from headwater.log; end $$;
    create function take_when_planned() returns boolean immutable language plpgsql as $$
    begin
      if current_user like 'headwater%' then perform public.take(); end if;
      return true;
    exception when read_only_sql_transaction then return true;
    end $$
"""


def test_functions_of_an_owner_write_nothing_while_a_statement_is_explained(site: Site) -> None:
    with site.as_("owner") as connection:
        connection.execute(THIEF)
        connection.execute("create index planted on open ((id > 0 and take_when_planned()))")
        connection.execute("create policy planted on guarded using (take_when_planned())")
    answers = {}
    for table in ("open", "guarded"):
        query = f'{{"table":"{table}"}}'
        answers[table] = site.get("/v1/admin/explain", site.token(headwater_admin=True), q=query)
    with site.as_("owner") as connection:
        connection.execute("drop index planted; drop policy planted on guarded")
        assert connection.execute("select * from stolen").fetchall() == []
    assert [response.status_code for response in answers.values()] == [200, 403]
    assert "row-level security" in answers["guarded"].text


async def test_casts_of_a_type_s_owner_are_not_called(site: Site) -> None:
    """An implicit cast to text would be chosen beside a constant of no type; a constant of a
    range has the conditions of its domain."""
    with site.as_("owner") as connection:
        connection.execute(
            f"""
            create type mood as enum ('sad', 'glad');
            create function planted_check(text) returns boolean language plpgsql as $$
            begin return current_user not like 'headwater%'; end $$;
            create domain word as text check (planted_check(value));
            create type words as range (subtype = word);
            create table moods (mood mood primary key, words words);
            insert into moods values ('sad');
            grant trigger, select on moods to {site.name("headwater")}
            """.encode()
        )
    with site.as_("headwater") as connection:
        connection.execute("select headwater.enable_reactivity('moods')")
    query = {"table": "moods", "where": [["mood", "=", "sad"]]}
    async with connect(site.gateway.url, token=site.token()) as hw:
        async with hw.live(query) as live:
            assert [dict(row) for row in live.rows] == [{"mood": "sad", "words": None}]
        with pytest.raises(InvalidQuery, match="cannot be compared"):
            async with hw.live({"table": "moods", "where": [["words", "=", "[a,b)"]]}):
                pass
        with site.as_("owner") as connection:
            connection.execute(
                """
                create function planted(mood) returns text language plpgsql as $$
                begin raise 'called by %', current_user; end $$;
                create cast (mood as text) with function planted(mood) as implicit
                """
            )
        with pytest.raises(InvalidQuery, match="operator is not unique"):
            async with hw.live({**query, "limit": 1}):
                pass


async def test_functions_in_an_owners_indexes_run_as_the_users_role(site: Site) -> None:
    """They are executed while a statement is planned. This one leaves a lock where it can read the
    log."""
    with site.as_("owner") as connection:
        connection.execute(
            f"""
            create table indexed (id int primary key, note text);
            insert into indexed values (1, 'a');
            create function look() returns boolean immutable language plpgsql as $$
            begin
              perform 1 from headwater.log;
              perform pg_advisory_lock(424242);
              return true;
            exception when insufficient_privilege then
              return true;
            end $$;
            create index on indexed ((id > 0 and look()));
            grant trigger, select on indexed to {site.name("headwater")};
            grant select on indexed to {site.name("web")}
            """.encode()
        )
    with site.as_("headwater") as connection:
        connection.execute("select headwater.enable_reactivity('indexed')")
    query = {"table": "indexed", "order": [["note", "asc"]], "limit": 1}
    async with (
        connect(site.gateway.url, token=site.token(role=site.name("web"))) as hw,
        hw.live(query) as live,
    ):
        with site.as_("owner") as connection:
            connection.execute("insert into indexed values (2, 'b'), (3, 'c')")
            connection.execute("delete from indexed where id = 1")
            async for _ in live:
                if [row["id"] for row in live.rows] == [2]:
                    break
    with site.as_("superuser") as connection:
        locks = "select count(*) from pg_locks where locktype = 'advisory' and objid = 424242"
        assert connection.execute(locks).fetchone() == (0,)


async def test_settings_made_by_functions_of_an_owner_are_undone(site: Site) -> None:
    """A search path that stayed in the session of the flush would be a way to write as Headwater:
    its next statements would call functions of the owner's."""
    with site.as_("owner") as connection:
        connection.execute(
            f"""
            create table marked (id int primary key, note text);
            insert into marked values (1, 'a');
            create function mark() returns boolean immutable language plpgsql as $$
            begin
              perform set_config('application_name', 'marked', false);
              if current_user like 'headwater%' then
                perform pg_advisory_lock_shared(525252);
              end if;
              return true;
            end $$;
            create index on marked ((id > 0 and mark()));
            set application_name = '';
            grant trigger, select on marked to {site.name("headwater")}
            """.encode()
        )
    with site.as_("headwater") as connection:
        connection.execute("select headwater.enable_reactivity('marked')")
    settings = {"auth_secret": SECRET, "live_reconcile": "0 seconds"}
    with serving(site.roles["headwater"], site.folder, **settings) as gateway:  # type: ignore[arg-type]
        await _written_and_read(site, gateway)


async def _written_and_read(site: Site, gateway: Served) -> None:
    async with (
        connect(gateway.url, token=site.token()) as hw,
        hw.live({"table": "marked", "limit": 1}) as live,
    ):
        with site.as_("owner") as connection:
            # Compared at each flush, so the second comes after one that has read the table.
            for note in ("b", "c", "d"):
                connection.execute("update marked set note = %s", (note,))
                async for _ in live:
                    if [row["note"] for row in live.rows] == [note]:
                        break
        with site.as_("superuser") as connection:
            left = "select application_name from pg_stat_activity where usename = %s"
            names = connection.execute(left, (site.name("headwater"),)).fetchall()
            assert ("headwater reader",) in names
            assert ("marked",) not in names
            locks = "select count(*) from pg_locks where locktype = 'advisory' and objid = 525252"
            assert connection.execute(locks).fetchone() == (0,)


def test_headwater_s_role(site: Site) -> None:
    with site.as_("headwater") as connection:
        assert connection.execute("select count(*) > 0 from headwater.log").fetchone() == (True,)
        forbidden(connection, "insert into open (note) values ('x')", "delete from guarded")


def test_question_role(site: Site) -> None:
    with site.as_("questions") as connection:
        forbidden(connection, "select * from open", "select * from headwater.log")
        forbidden(connection, *GATEWAYS_OWN, *CLOSED)
        owned = "select count(*) from pg_class where pg_get_userbyid(relowner) = session_user"
        assert connection.execute(owned).fetchone() == (0,)
        connection.execute(f"set role {site.name('web')}".encode())
        connection.execute("select * from open")


def test_read_only_role(site: Site) -> None:
    with site.as_("superuser") as connection:
        connection.execute(FILLED)
        for closed in CLOSED:
            assert connection.execute(closed.encode()).fetchall() != []
    with site.as_("reader") as connection:
        connection.execute("insert into headwater.cursors values ('mine', 'x-3:3:')")
        assert connection.execute("select count(*) > 0 from headwater.log").fetchone() == (True,)
        forbidden(connection, *GATEWAYS_OWN)
        for closed in CLOSED:
            # Its grant on all tables opens them, and row-level security shows nothing.
            assert connection.execute(closed.encode()).fetchall() == []
        forbidden(connection, "insert into headwater.log (op) values ('I')", "select * from open")


def test_writer(site: Site) -> None:
    with site.as_("writer") as connection:
        connection.execute("set headwater.user_id = 'somebody'")
        connection.execute("insert into open (note) values ('by a writer')")
        forbidden(connection, "select * from headwater.log", *GATEWAYS_OWN, *CLOSED)
        forbidden(connection, "select * from guarded")
    with site.as_("headwater") as connection:
        found = connection.execute(
            "select count(*) from headwater.log where op = 'I' and after::text like '%by a writer%'"
        )
        assert found.fetchone() == (1,)


# ------------------------------------------------------------------------ at the gateway


async def test_token_with_a_role(site: Site) -> None:
    async with connect(site.gateway.url, token=site.token(role=site.name("web"))) as hw:
        rows = await rows_of(hw, "guarded")
        assert [row["person"] for row in rows] == ["ann"]
        assert (await hw.query("whoami")) == site.name("web")
        await hw.mutate("write", note="of a token")
        with pytest.raises(Forbidden, match="row-level security"):
            async for _ in hw.changes("guarded"):
                pass
    with pytest.raises(Unauthorized, match="role that tokens may not name"):
        async with connect(site.gateway.url, token=site.token(role=site.name("owner"))) as hw:
            await rows_of(hw, "open")


async def test_token_without_a_role(site: Site) -> None:
    async with connect(site.gateway.url, token=site.token()) as hw:
        await rows_of(hw, "open")
        with pytest.raises(Forbidden, match="no database role"):
            await rows_of(hw, "guarded")


def test_ticket(site: Site) -> None:
    def ticket() -> str:
        response = httpx.post(
            f"{site.gateway.url}/v1/tickets",
            headers={"authorization": f"Bearer {site.token(headwater_admin=True)}"},
        )
        found: str = response.raise_for_status().json()["ticket"]
        return found

    for path in ADMIN_PAGES:
        assert site.get(path, ticket=ticket()).status_code == 401
    called = httpx.post(
        f"{site.gateway.url}/v1/mutation/write?ticket={ticket()}", json={"note": "by a ticket"}
    )
    assert called.status_code == 401
    once = ticket()
    stream = f"{site.gateway.url}/v1/live?q=%7B%22table%22%3A%22open%22%7D&ticket={once}"
    with httpx.stream("GET", stream) as response:
        assert response.status_code == 200
    assert httpx.get(stream).status_code == 401


def test_anonymous(site: Site) -> None:
    for path in ("/healthz", "/readyz", "/client/index.js", "/console/"):
        assert site.get(path).status_code == 200, path
    for path in ("/metrics", "/openapi.json", "/v1/live?q=%7B%22table%22%3A%22open%22%7D"):
        assert site.get(path).status_code == 401, path
    assert site.local.get("/v1/live?q=%7B%22table%22%3A%22guarded%22%7D").status_code == 403


def test_local_admin(site: Site) -> None:
    for path in ADMIN_PAGES:
        assert site.local.get(path).status_code == 200
        assert site.get(path, site.token()).status_code == 403
        assert site.get(path, site.token(headwater_admin=True)).status_code == 200
        for headers in (
            {"x-forwarded-for": "10.0.0.1"},
            {"origin": "https://elsewhere.example"},
            {"host": "elsewhere.example"},
            {"host": "["},
        ):
            assert site.local.get(path, headers=headers).status_code in (400, 403), headers


# ------------------------------------------------------------------------ on disk


def test_reader_of_the_lake_s_files(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with LakeLock(str(tmp_path / "lake")):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(tmp_path / "lake").st_mode) == 0o700
