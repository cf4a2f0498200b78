"""What admins may see, and that no other user sees any of it."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import jwt
import pytest
from starlette.requests import HTTPConnection

from headwater import connect
from headwater.admin.history import from_lake
from headwater.database import Connection
from headwater.errors import Forbidden, InvalidQuery, TimedOut
from headwater.gateway.auth.admins import LOCAL_ONLY, is_admin, is_local
from headwater.gateway.auth.tokens import Credentials
from headwater.gateway.gateway import Gateway
from headwater.hub.hub import Hub
from headwater.identity import Identity
from headwater.pipeline.reading.requests import RowHistoryRequest, send_request
from headwater.pipeline.spark import shared_session
from headwater.protocol import ChangesQuery, Error, Subscribe
from headwater.settings.groups import AuthSettings, Settings
from headwater.testing.gateway_process import Served, serving
from tests.gateway.test_subscriptions import Sink
from tests.support.applications.shop import open_shop, until

SECRET = "a secret that is long enough for SHA-256 and more"
PATHS = ["overview", "tables", "log", "history/orders/1", 'explain?q={"table":"orders"}']


def bearer(**claims: Any) -> dict[str, str]:
    token = jwt.encode({"sub": "ann", "exp": time.time() + 600, **claims}, SECRET, "HS256")
    return {"authorization": f"Bearer {token}"}


def token(**claims: Any) -> str:
    return bearer(**claims)["authorization"].removeprefix("Bearer ")


@pytest.fixture
async def shop(connection: Connection) -> Connection:
    await open_shop(connection, rows=20)
    return connection


@pytest.fixture
def gateway(shop: Connection, url: str, tmp_path: Path) -> Iterator[Served]:
    with serving(url, tmp_path) as served:
        yield served


@pytest.fixture
def guarded(shop: Connection, url: str, tmp_path: Path) -> Iterator[Served]:
    """A gateway that requires tokens."""
    with serving(url, tmp_path, auth_secret=SECRET) as served:
        yield served


# Who -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [False, "true", 1, None, ["true"]])
def test_a_claim_counts_only_if_it_is_true(value: Any) -> None:
    settings = AuthSettings(secret=SECRET)
    assert not is_admin(settings, Identity("ann", claims={"headwater_admin": value}), local=True)
    assert is_admin(settings, Identity("ann", claims={"headwater_admin": True}), local=False)


def test_the_claim_has_another_name_where_the_settings_say_so() -> None:
    settings = AuthSettings(secret=SECRET, admin_claim="is_operator")
    assert is_admin(settings, Identity(claims={"is_operator": True}), local=False)
    assert not is_admin(settings, Identity(claims={"headwater_admin": True}), local=False)


def test_without_authentication_this_machine_is_an_admin(gateway: Served) -> None:
    for path in PATHS:
        response = gateway.get(f"/v1/admin/{path}")
        assert response.status_code == 200, response.text
        assert response.headers["cache-control"] == "no-store"


def test_a_token_with_the_claim_is_needed(guarded: Served) -> None:
    def status(path: str, **options: Any) -> tuple[int, Any]:
        response = guarded.get(f"/v1/admin/{path}", **options)
        return response.status_code, response.json().get("error", {}).get("code")

    for path in PATHS:
        assert status(path) == (401, "token_missing")
        assert status(path, headers=bearer()) == (403, "admin_only")
        assert status(path, headers=bearer(headwater_admin="yes")) == (403, "admin_only")
        assert status(path, headers=bearer(headwater_admin=True)) == (200, None)
    refused = guarded.get("/v1/admin/tables", headers=bearer())
    assert refused.headers["www-authenticate"] == 'Bearer error="insufficient_scope"'


PASSED_ON: list[dict[str, str]] = [
    {"x-forwarded-for": "127.0.0.1"},
    {"x-forwarded-proto": "https"},
    {"forwarded": "for=127.0.0.1"},
    {"via": "1.1 proxy"},
    {"x-real-ip": "127.0.0.1"},
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
]


def refused_as_admin(served: Served, **options: Any) -> bool:
    response = served.get("/v1/admin/tables", **options)
    assert response.status_code in (200, 403), response.text
    return response.status_code == 403 and response.json()["error"]["code"] == "admin_only"


def test_without_authentication_requests_from_elsewhere_are_refused(
    shop: Connection, url: str, tmp_path: Path
) -> None:
    with serving(url, tmp_path, gateway_origins=["*"]) as served:
        for headers in PASSED_ON:
            assert refused_as_admin(served, headers=headers), headers
        assert not refused_as_admin(served)
        own = {"origin": served.url, "sec-fetch-site": "same-origin"}
        assert not refused_as_admin(served, headers=own)
    with serving(url, tmp_path, gateway_trusted_proxies=["127.0.0.1"]) as served:
        assert refused_as_admin(served, headers={"x-forwarded-for": "127.0.0.1"})
        assert refused_as_admin(served)


async def test_with_insecure_no_user_is_an_admin(
    shop: Connection, url: str, tmp_path: Path
) -> None:
    await shop.execute("select headwater.enable_reactivity('headwater.activity')")
    with serving(url, tmp_path, options=["--insecure"]) as served:
        assert refused_as_admin(served)
        assert "www-authenticate" not in served.get("/v1/admin/tables").headers
        async with connect(served.url) as client:
            with pytest.raises(Forbidden, match="for admins only"):
                await client.live({"table": "headwater.activity"}).__aenter__()


Scoped = dict[str, Any]
HERE: Scoped = {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), LOCAL_ONLY: True}


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ({}, True),
        ({"client": ("::1", 1)}, True),
        ({"client": None, "server": ("/run/headwater.sock", None)}, True),
        ({"client": None}, False),
        ({"client": None, "server": None}, False),
        ({"client": ("192.0.2.7", 1)}, False),
        ({"client": ("testclient", 1)}, False),
        ({"http_version": "1.0"}, False),
        ({"headers": [(b"host", b"shop.example")]}, False),
        ({"headers": [(b"host", b"localhost"), (b"origin", b"http://localhost")]}, True),
        ({"headers": [(b"host", b"localhost"), (b"origin", b"http://localhost:81")]}, False),
    ],
)
def test_which_requests_are_local(scope: Scoped, expected: bool) -> None:
    default = {"type": "http", "path": "/", "query_string": b"", "scheme": "http"}
    whole = default | HERE | {"headers": [(b"host", b"localhost")], "http_version": "1.1"} | scope
    assert is_local(HTTPConnection(whole), Settings()) is expected
    del whole[LOCAL_ONLY]  # part of another app
    assert not is_local(HTTPConnection(whole), Settings())


async def test_tables_of_headwater_are_for_admins(guarded: Served) -> None:
    assert guarded.get("/v1/admin/overview", headers=bearer(headwater_admin=True)).is_success
    for table in ("headwater.activity", "headwater.pipeline", "headwater.sources"):
        async with connect(guarded.url, token=token()) as client:
            with pytest.raises(Forbidden, match=f"table {table} is for admins only") as refused:
                await client.live({"table": table}).__aenter__()
            assert refused.value.code == "admin_only"
            with pytest.raises(Forbidden, match="for admins only"):
                await client.changes(table).__aenter__()
        async with (
            connect(guarded.url, token=token(headwater_admin=True)) as client,
            client.live({"table": table, "limit": 1}) as live,
        ):
            assert isinstance(live.rows, list)


# A hook that has no rule for Headwater's own tables.
PROGRAM = """
from headwater import Headwater
hw = Headwater()

@hw.authorize
def rule(identity, request):
    return request.table == "orders"
"""


async def test_the_authorize_hook_is_not_called_for_headwaters_tables(
    shop: Connection, url: str, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    with serving(url, tmp_path, program="program:hw", auth_secret=SECRET) as served:
        assert served.get("/v1/admin/overview", headers=bearer(headwater_admin=True)).is_success
        async with connect(served.url, token=token(headwater_admin=True)) as client:
            async with client.live({"table": "headwater.pipeline"}) as live:
                assert live.rows == []
            async with client.changes() as feed:  # everything: an admin's tail of the log
                await shop.execute("update orders set note = 'seen' where id = 1")
                transaction = await anext(feed.__aiter__())
                assert transaction.changes[0].table == "orders"
        async with connect(served.url, token=token()) as client:
            with pytest.raises(InvalidQuery, match="a feed of every table is for admins only"):
                await client.changes().__aenter__()


SECURED = """
    create table notes (id int primary key, owner text);
    alter table notes enable row level security;
    insert into notes values (1, 'bob');
    select headwater.enable_reactivity('notes')
"""


@pytest.mark.parametrize("program", [None, PROGRAM])
async def test_row_level_security_hides_nothing_from_admins(
    shop: Connection, url: str, tmp_path: Path, program: str | None
) -> None:
    await shop.execute(SECURED)
    (tmp_path / "program.py").write_text(program or "")
    name = program and "program:hw"
    with serving(url, tmp_path, program=name, auth_secret=SECRET) as served:
        asked = served.get(
            '/v1/admin/explain?q={"table":"notes"}', headers=bearer(headwater_admin=True)
        )
        assert asked.status_code == 200, asked.text
        admins = token(headwater_admin=True)
        async with connect(served.url, token=admins) as client, client.changes() as feed:
            await shop.execute("update notes set owner = 'eve'")
            transaction = await anext(feed.__aiter__())
            assert transaction.changes[0].after == {"id": 1, "owner": "eve"}
            async with connect(served.url, token=token()) as other:
                with pytest.raises((Forbidden, InvalidQuery)):
                    await other.changes().__aenter__()


@pytest.mark.parametrize("authorize", [None, lambda identity, request: True])
async def test_a_user_that_is_no_longer_an_admin_loses_the_feed(
    shop: Connection, url: str, authorize: Any
) -> None:
    settings = Settings(auth=AuthSettings(secret=SECRET))
    async with Hub(url) as hub, Gateway(hub, settings, url=url, authorize=authorize) as gateway:
        ann = await gateway.identify(Credentials(token(headwater_admin=True)))
        it = gateway.open(ann, address="192.0.2.1", transport="sse")
        it.attach(sink := Sink())
        await gateway.subscribe(it, Subscribe("all", changes=ChangesQuery()))
        await gateway.authenticate(it, token(headwater_admin=True))
        await gateway.authenticate(it, token())
        await until(lambda: any(isinstance(message, Error) for message in sink.got))
        assert sink.got[-1].code == "access_changed"
        assert not hub.feeds
        gateway.release(it)


# What they see ---------------------------------------------------------------------------------


def test_overview(gateway: Served) -> None:
    answer = gateway.get("/v1/admin/overview").json()
    assert answer["authentication"] is False
    assert answer["activity_seconds"] == 2
    assert answer["log"]["position"].startswith(answer["log"]["id"] or "")
    assert {finding["level"] for finding in answer["findings"]} <= {"warn", "fail"}
    tables = {table["name"]: table for table in gateway.get("/v1/admin/tables").json()["tables"]}
    assert {"headwater.activity", "headwater.pipeline"} <= tables.keys()


async def test_a_disabled_table_stays_disabled(gateway: Served, shop: Connection) -> None:
    gateway.get("/v1/admin/overview")
    await shop.execute("select headwater.disable_reactivity('headwater.activity')")
    gateway.get("/v1/admin/overview")
    cursor = await shop.execute("select table_name from headwater.tables where not enabled")
    assert await cursor.fetchall() == [("activity",)]


async def test_tables(gateway: Served, shop: Connection) -> None:
    await shop.execute("create table plain (id int primary key)")
    await shop.execute("create table keyless (id int)")
    await shop.execute("create table altered (id int primary key)")
    await shop.execute("select headwater.enable_reactivity('altered')")
    await shop.execute("alter table altered add column more text")
    await shop.execute("update orders set note = 'y' where id <= 7")
    await shop.execute("analyze orders")
    answer = gateway.get("/v1/admin/tables").json()
    assert not answer["busy"]
    assert not answer["more"]
    tables = {table["name"]: table for table in answer["tables"]}
    orders = tables["orders"]
    assert (orders["capture"], orders["key"], orders["rows"]) == ("trigger", ["id"], 20)
    assert orders["columns"][:2] == ["id", "region"]
    assert orders["minute"] >= 7
    assert orders["problems"] == []
    assert (tables["plain"]["capture"], tables["plain"]["problems"]) == (None, [])
    assert "no primary key" in tables["keyless"]["problems"][0]["detail"]
    assert "was altered" in tables["altered"]["problems"][0]["detail"]


async def test_names_as_they_are_shown(gateway: Served, shop: Connection) -> None:
    """A table is found by the name that it is listed under, and what is proposed can be run."""
    await shop.execute("create schema sales")
    await shop.execute('create table sales."Keyless" ("Id" int)')
    await shop.execute(
        'create table sales."Orders" ("Id" int primary key, "order" int, "sent at" timestamptz)'
    )
    await shop.execute("""select headwater.enable_reactivity('sales."Orders"')""")
    answer = gateway.get("/v1/admin/tables").json()
    tables = {table["name"]: table for table in answer["tables"]}
    assert tables["sales.Orders"]["capture"] == "trigger"
    hint = tables["sales.Keyless"]["problems"][0]["hint"]
    await shop.execute(hint.replace("…", '"Id"').encode())

    where = [["order", "=", 7], ["Id", ">", 3]]
    order = [["sent at", "desc", "nulls last"]]
    query = {"table": "sales.Orders", "where": where, "order": order}
    suggestion = explained(gateway, query)["suggestion"]
    names = '("order", "sent at" desc nulls last, "Id")'
    assert suggestion == f'create index on sales."Orders" {names}'
    await shop.execute(suggestion.encode())
    assert explained(gateway, query)["suggestion"] is None
    async with connect(gateway.url) as client, client.changes("sales.Orders") as feed:
        await shop.execute('insert into sales."Orders" values (1)')
        transaction = await anext(aiter(feed))
        assert [change.table for change in transaction.changes] == ["sales.Orders"]


@pytest.fixture
async def log(gateway: Served, shop: Connection) -> Any:
    """A search: which ids, in which operations, were found."""
    await shop.execute("set headwater.user_id = 'ann'")
    await shop.execute("insert into orders values (100, 1, 'new', 1.50, 1, 'A 100% Thing')")
    await shop.execute("update orders set status = 'paid' where id = 100")
    await shop.execute("set headwater.user_id = 'bob'")
    await shop.execute("update orders set id = 101 where id = 100")
    await shop.execute("delete from orders where id = 5")

    def found(**search: Any) -> list[tuple[str, Any]]:
        response = gateway.get("/v1/admin/log", params=search)
        assert response.status_code == 200, response.text
        return [
            (each["op"], (each.get("key") or {}).get("id")) for each in response.json()["changes"]
        ]

    return found


def test_search(log: Any) -> None:
    assert log(table="orders", limit=2) == [("delete", 5), ("insert", 101)]
    assert log(op="delete") == [("delete", 5), ("delete", 100)]
    assert log(key="5") == [("delete", 5)]
    assert log(key="100") == [("delete", 100), ("update", 100), ("insert", 100)]
    assert log(user="ann") == [("update", 100), ("insert", 100)]
    assert log(text="a 100% thing", user="ann") == [("update", 100), ("insert", 100)]
    assert log(text="no such thing") == []


async def test_a_key_may_be_a_time(gateway: Served, shop: Connection) -> None:
    """In any notation: of the log, of a change feed, of a browser."""
    await shop.execute("create table readings (at timestamptz primary key, place text)")
    await shop.execute("create table stamps (at text, line int, primary key (at, line))")
    for table in ("readings", "stamps"):
        await shop.execute("select headwater.enable_reactivity(%s)", (table,))
    await shop.execute("insert into readings values ('2026-11-15 10:00:00.1200+00')")
    await shop.execute("insert into stamps values ('2026-11-15T10:00:00.120Z', 1)")
    for table, key in [
        ("readings", "2026-11-15T10:00:00.12+00:00"),
        ("readings", "2026-11-15T10:00:00.12Z"),
        ("readings", "2026-11-15T10:00:00.120000Z"),
        ("stamps", "2026-11-15T10:00:00.120Z,1"),
    ]:
        answer = gateway.get(f"/v1/admin/history/{table}/{key}").json()
        assert [each["op"] for each in answer["log"]["changes"]] == ["insert"], key


async def test_search_in_parts(gateway: Served, shop: Connection) -> None:
    """Every change once, for every size of the parts."""
    await shop.execute("update orders set note = 'a'")
    whole = gateway.get("/v1/admin/log?limit=500").json()
    assert whole["before"] is None
    parts, before = [], ""
    for _ in range(20):
        part = gateway.get(f"/v1/admin/log?limit=7&before={before}").json()
        parts += part["changes"]
        before = part["before"]
        if before is None:
            break
    assert parts == whole["changes"]


async def test_a_search_shows_rows_exactly(gateway: Served, shop: Connection) -> None:
    await shop.execute("create table large (id bigint primary key, n numeric, t text)")
    await shop.execute("select headwater.enable_reactivity('large')")
    await shop.execute("insert into large values (9007199254740993, 1.10, repeat('x', 60000))")
    text = gateway.get("/v1/admin/log?table=large&op=insert").text
    assert '"id":9007199254740993' in text.replace(" ", "")
    assert json.loads(text)["changes"][0]["cut"] is True
    await shop.execute("update large set t = ''")
    text = gateway.get("/v1/admin/log?table=large&op=update").text
    assert '"n":1.10' in text.replace(" ", "")


WRONG = [
    ("op=other", 400, "op"),
    ("before=7", 400, "before"),
    ("limit=0", 400, "limit"),
    ("limit=501", 400, "limit"),
    ("limit=many", 400, "limit"),
    ("text=%00", 400, "text"),
    ("table=nothing", 404, "nothing"),
]


def test_wrong_searches(gateway: Served) -> None:
    for search, status, path in WRONG:
        response = gateway.get(f"/v1/admin/log?{search}")
        assert response.status_code == status, search
        assert path in response.json()["error"]["message"]


def test_history(gateway: Served, log: Any) -> None:
    answer = gateway.get("/v1/admin/history/orders/100").json()
    assert [each["op"] for each in answer["log"]["changes"]] == ["delete", "update", "insert"]
    assert answer["log"]["changes"][1]["changed"] == ["status"]
    assert answer["log"]["changes"][1]["user"] == "ann"
    assert (answer["lake"], answer["lake_error"]) == (None, None)
    assert answer["command"] == "headwater history orders 100"
    asked = gateway.get("/v1/admin/history/orders/100?lake=true").json()
    assert asked["lake"] is None
    assert "there is no lake" in asked["lake_error"]
    alone = gateway.get("/v1/admin/history/orders/100?lake=true&log=false").json()
    assert alone == asked | {"log": None}


def test_a_history_with_an_invalid_key(gateway: Served) -> None:
    assert gateway.get("/v1/admin/history/orders/%00").status_code == 400
    assert gateway.get("/v1/admin/history/or%00ders/1").status_code == 400


async def test_a_row_with_a_nul_in_json_is_found(gateway: Served, shop: Connection) -> None:
    await shop.execute("create table papers (id bigint primary key, body json, t text)")
    await shop.execute("select headwater.enable_reactivity('papers')")
    await shop.execute(
        r"""insert into papers select n, '{"a": "x\u0000y"}' from generate_series(1, 2) n"""
    )
    await shop.execute("update papers set t = 'new'")
    for path in ("log?table=papers&key=2", "history/papers/2"):
        response = gateway.get(f"/v1/admin/{path}")
        assert response.status_code == 200, response.text
        answer = response.json()
        update, insert = answer.get("log", answer)["changes"]
        assert (update["key"], update["changed"]) == ({"id": 2}, ["t"])
        assert insert["after"]["body"] == {"a": "x\0y"}


async def test_an_answer_is_of_bounded_size(gateway: Served, shop: Connection) -> None:
    await shop.execute("create table heavy (id bigint primary key, t text)")
    await shop.execute("select headwater.enable_reactivity('heavy')")
    await shop.execute(
        "insert into heavy select n, repeat('x', 49000) from generate_series(1, 100) n"
    )
    first = gateway.get("/v1/admin/log?table=heavy&op=insert").json()
    assert 0 < len(first["changes"]) < 100
    rest = gateway.get(f"/v1/admin/log?table=heavy&op=insert&before={first['before']}").json()
    found = [each["key"]["id"] for each in first["changes"] + rest["changes"]]
    assert sorted(found) == list(range(1, 101))


async def test_a_lake_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headwater.admin.history.ADMIN_LAKE_SECONDS_MAX", 0.2)
    with shared_session.private_socket() as path, socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen()
        service = shared_session.PipelineService(1, path)
        with pytest.raises(TimeoutError):
            send_request(service, RowHistoryRequest("orders", ("1",)), patience=0.05)
    go = Event()
    monkeypatch.setattr("headwater.admin.history._read", lambda *_: go.wait(30))
    with pytest.raises(TimedOut, match="lake"):
        await from_lake("lake", "url", "orders", ("1",), asyncio.Semaphore(1))
    go.set()


def explained(gateway: Served, query: dict[str, Any]) -> Any:
    response = gateway.get("/v1/admin/explain", params={"q": json.dumps(query)})
    assert response.status_code == 200, response.text
    return response.json()


async def test_explain(gateway: Served, shop: Connection) -> None:
    query = {"table": "orders", "where": [["region", "=", 3]], "order": [["amount", "desc"]]}
    answer = explained(gateway, query)
    assert answer["filed"] == [{"index": "equality", "column": "region", "text": "region = 3"}]
    assert '"region" = $1' in answer["sql"]
    assert answer["values"][0] == "3"
    assert not (answer["serves_filter"] and answer["serves_order"])
    assert answer["suggestion"].startswith("create index on orders (region, amount desc")
    await shop.execute(answer["suggestion"].encode())
    answer = explained(gateway, query)
    assert (answer["serves_filter"], answer["serves_order"], answer["suggestion"]) == (
        True,
        True,
        None,
    )
    assert answer["index"].startswith("orders_region_amount")


def test_explain_other_filters(gateway: Served) -> None:
    between = [["amount", ">=", 1], ["amount", "<", 5]]
    answer = explained(gateway, {"table": "orders", "where": between})
    assert answer["filed"] == [{"index": "range", "column": "amount", "text": "1 ≤ amount ≤ 5"}]
    answer = explained(gateway, {"table": "orders", "where": [["note", "ilike", "%a%"]]})
    assert answer["filed"] is None
    wrong = gateway.get("/v1/admin/explain", params={"q": '{"table": "orders", "limit": 0}'})
    assert wrong.status_code == 400
