"""The past of single rows over HTTP: what users may see, how far back, and what is refused."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import jwt
import msgspec
import psycopg
import pytest

from headwater.errors import LimitExceeded, NotFound, ResyncRequired, TimedOut
from headwater.hub.subscriptions.subscriber import Access
from headwater.live.filters.filter import EVERYTHING
from headwater.model import Column, Table
from headwater.past import reads, routes
from headwater.past.access import RowGuard
from headwater.past.reads import PastReads
from headwater.pipeline.reading import changes
from headwater.testing.gateway_process import Served, serving
from tests.support.lake.truth import opened, take_in

SECRET = "a secret that is long enough for SHA-256 and more"
KEY = 'it\'s \\ "ä", 7'
PROGRAM = """
from datetime import timedelta
from headwater import Allow, Headwater, c

hw = Headwater()


@hw.authorize
def rule(identity, request):
    if request.kind != "feed" or request.since is None:
        return False
    match identity.user:
        case "ann":
            return Allow(history=timedelta.max)
        case "lately":
            return True
        case "filtered":
            return Allow(c.owner == "ann", timedelta.max)
        case "now":
            return Allow(history=timedelta(0))
    return False
"""


def token(user: str, **more: Any) -> str:
    return jwt.encode({"sub": user, "exp": time.time() + 600, **more}, SECRET, "HS256")


def get(served: Served, user: str, path: str, **parameters: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {token(user)}"}
    return served.get(f"/v1/{path}", params=parameters, headers=headers)


def make_notes(database: psycopg.Connection[Any]) -> list[datetime]:
    """A table of notes, and the times between its changes."""
    database.execute("create table notes (id text primary key, owner text, amount numeric(9,2))")
    database.execute("select headwater.enable_reactivity('notes')")
    times = []
    for statement in (
        "insert into notes values (%s, 'ann', 1)",
        "update notes set amount = 2.5 where id = %s",
        "update notes set owner = 'bob' where id = %s",
        "update notes set owner = 'zoe' where id = %s",
        "update notes set owner = 'ann' where id = %s",
        "delete from notes where id = %s",
    ):
        database.execute(statement.encode(), [KEY])
        database.execute("insert into notes values (gen_random_uuid())")  # takes a number
        times.append(database.execute("select clock_timestamp()").fetchone()[0])  # type: ignore[index]
    return times


@pytest.fixture
def past(url: str, tmp_path: Path) -> Any:
    """A gateway whose lake has the first changes; the others are in the log only."""
    (tmp_path / "app.py").write_text(PROGRAM)
    with opened(url) as database:
        database.execute("create table guarded (id int primary key)")
        database.execute("select headwater.enable_reactivity('guarded')")
        database.execute("alter table guarded enable row level security")
        times = make_notes(database)
        database.execute("create table prices (price numeric(9,2) primary key)")
        database.execute("select headwater.enable_reactivity('prices')")
        database.execute("insert into prices values (1), ('NaN')")
        take_in(str(tmp_path / "lake"), url)
        database.execute("insert into notes values (%s, 'ann', 9)", [KEY])
    settings: dict[str, Any] = {"auth_secret": SECRET, "lake_location": str(tmp_path / "lake")}
    with serving(url, tmp_path, program="app:hw", **settings) as served:
        yield served, times


def test_what_users_see(past: Any) -> None:
    served, times = past

    def row(user: str, at: datetime) -> Any:
        answer = get(served, user, "asof/notes", key=KEY, at=at.isoformat())
        return answer.json().get("row") if answer.status_code == 200 else answer.status_code

    inserted = {"id": KEY, "owner": "ann", "amount": "1.00"}
    assert [row("ann", at) for at in times] == [
        inserted,
        inserted | {"amount": "2.50"},
        inserted | {"amount": "2.50", "owner": "bob"},
        inserted | {"amount": "2.50", "owner": "zoe"},
        inserted | {"amount": "2.50"},
        None,
    ]
    now = datetime.now(UTC)
    assert row("ann", now) == inserted | {"amount": "9.00"}, "the log has it, the lake does not"
    assert [row("filtered", at) is None for at in times] == [
        False, False, True, True, False, True,
    ]  # fmt: skip
    assert row("lately", times[0]) == inserted, "a few seconds ago"
    assert row("lately", now - timedelta(hours=1)) == 410
    assert row("eve", now) == 403

    answer = get(served, "ann", "history/notes", key=KEY)
    assert answer.status_code == 200, served.log.read_text()
    whole = answer.json()
    ops = ["insert", "delete", "update", "update", "update", "update", "insert"]
    assert [version["op"] for version in whole["versions"]] == ops
    assert whole["versions"][2]["changed"] == ["owner"]
    assert whole["before"] is None
    seen = get(served, "filtered", "history/notes", key=KEY).json()["versions"]
    assert [version["op"] for version in seen] == [
        "insert", "delete", "insert", "delete", "update", "insert",
    ]  # fmt: skip
    assert "bob" not in str(seen)
    # When a row that is hidden changes again (from bob to zoe) is hidden too.
    ends = [version["valid_to"] for version in seen]
    begins = [version["valid_from"] for version in seen]
    assert ends == [None, None, begins[1], None, begins[3], begins[4]]

    pages, before = [], None
    while True:
        limits = {"limit": 2} | ({} if before is None else {"before": before})
        page = get(served, "ann", "history/notes", key=KEY, **limits).json()
        pages += page["versions"]
        before = page["before"]
        if before is None:
            break
    assert pages == whole["versions"]

    # A right that goes no further back than now shows the row as it is now, whatever the cursor.
    now_only = get(served, "now", "history/notes", key=KEY).json()["versions"]
    assert [version["after"]["amount"] for version in now_only] == ["9.00"]
    for version in whole["versions"]:
        for before in (version["seq"] - 1, version["seq"], version["seq"] + 1, 1):
            page = get(served, "now", "history/notes", key=KEY, before=before).json()
            assert page["versions"] in ([], now_only), (version["seq"], before)


def test_the_ends_of_what_can_be_asked_for(past: Any) -> None:
    """Times and numbers that no row has are answered, and no error of the gateway."""
    served, _ = past

    def row(table: str, key: str, at: str) -> Any:
        answer = get(served, "ann", f"asof/{table}", key=key, at=at)
        return answer.json()["row"] if answer.status_code == 200 else answer.status_code

    last, first = "9999-12-31T23:59:59", "0001-01-01T00:00:00"
    for at in (f"{last}Z", f"{last}-05:00", f"{last}+05:00"):
        assert row("notes", KEY, at) == {"id": KEY, "owner": "ann", "amount": "9.00"}
    for at in (f"{first}Z", f"{first}-05:00", f"{first}+05:00", f"{first}+05:00"):
        assert row("notes", KEY, at) == 410, "it was not captured yet"
    for key in ("1", "1.0000"):
        assert row("prices", key, f"{last}Z") == {"price": "1.00"}
    for key in ("1.004", "1e30", "1e2000", "Infinity", "-Infinity"):
        assert row("prices", key, f"{last}Z") == 410, "no change has it"
        versions = get(served, "ann", "history/prices", key=key)
        assert (versions.status_code, versions.json().get("versions")) == (200, [])
    assert row("prices", "NaN", f"{last}Z") == {"price": "NaN"}


@pytest.mark.parametrize(
    ("user", "path", "parameters", "status", "code"),
    [
        ("eve", "history/notes", {"key": KEY}, 403, "forbidden"),
        ("ann", "history/guarded", {"key": "1"}, 403, "forbidden"),
        ("ann", "history/nothing", {"key": "1"}, 404, "capture"),
        ("ann", "history/notes", {}, 400, "invalid_query"),
        ("ann", "history/notes", {"key": ["1", "2"]}, 400, "invalid_query"),
        ("ann", "history/notes", {"key": "x" * 10_001}, 400, "invalid_query"),
        ("ann", "history/notes", {"key": "a\0b"}, 400, "invalid_query"),
        ("ann", "history/notes", {"key": "1", "limit": "many"}, 400, "invalid_query"),
        ("ann", "asof/notes", {"key": "1"}, 400, "invalid_query"),
        ("ann", "asof/notes", {"key": "1", "at": "yesterday"}, 400, "invalid_query"),
        ("ann", "asof/notes", {"key": "1", "at": "a-5:5:"}, 410, "resync"),
        ("lately", "asof/notes", {"key": "1", "at": "a-5:5:"}, 400, "invalid_query"),
    ],
)
def test_what_is_refused(
    past: Any, user: str, path: str, parameters: dict[str, Any], status: int, code: str
) -> None:
    answer = get(past[0], user, path, **parameters)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text


def test_a_gateway_without_a_lake(url: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(PROGRAM)
    with opened(url) as database:
        make_notes(database)
    settings: dict[str, Any] = {"auth_secret": SECRET, "lake_location": str(tmp_path / "nothing")}
    with serving(url, tmp_path, program="app:hw", **settings) as served:
        answer = get(served, "ann", "history/notes", key=KEY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "past_unknown")
        assert str(tmp_path) not in answer.text
        assert served.get("/v1/history/notes", params={"key": KEY}).status_code == 401


def test_a_table_under_the_name_of_a_dropped_one(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its own past is looked at, and bounded; it is not found where the lake lacks it."""
    lake, at = str(tmp_path / "lake"), datetime.now(UTC)
    with opened(url) as database:
        make_notes(database)
        take_in(lake, url)
        database.execute("drop table notes")
        make_notes(database)
        (oid,) = database.execute("select 'notes'::regclass::int8").fetchone() or (0,)
    table = Table(1, "public", "notes", (Column("id", "text", "text"),), ("id",), oid)
    asked = routes._PastRequest(lake, url, table, (KEY,), Access(), None)
    options = routes._Options(at, None, 200)
    monkeypatch.setattr(reads, "PAST_BYTES_MAX", 0)  # the log alone has changes of it
    with pytest.raises(ResyncRequired, match="no snapshot"):
        reads._translated(partial(routes._as_of, asked, options), lambda: None, 10)
    found = reads._translated(partial(routes._history, asked, options), lambda: None, 10)
    assert len(found.versions) == 6

    without_log = msgspec.structs.replace(asked, url="postgresql://127.0.0.1:1/none")
    for read in (routes._as_of, routes._history):
        with pytest.raises(NotFound, match="the past of this table is not stored"):
            reads._translated(partial(read, without_log, options), lambda: None, 10)


def test_an_image_of_a_shape_that_the_lake_lacks() -> None:
    table = Table(1, "public", "notes", (Column("id", "integer", "integer"),), ("id",), 7)
    guard = RowGuard(partial(changes.known, {1: table}), EVERYTHING)
    assert guard.seen('{"id":5}', 1) == {"id": 5}
    with pytest.raises(ResyncRequired, match="the lake lacks shape 2"):
        guard.seen('{"id":5}', 2)


async def test_a_read_keeps_its_place_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """One user cannot take more than a part of the places, also with requests that timed out."""
    monkeypatch.setattr(reads, "PAST_SECONDS_MAX", 0.2)
    started, go = Event(), Event()
    found = PastReads()

    def read(check: reads.Check, seconds: float) -> str:
        started.set()
        go.wait(30)
        check()
        return "late"

    owner = ("user", "eve")
    with pytest.raises(TimedOut):
        await found.run(owner, read)
    assert started.is_set()
    with pytest.raises(TimedOut):
        await found.run(owner, read)
    with pytest.raises(LimitExceeded, match="are running"):
        await found.run(owner, read)
    assert await found.run(("user", "ann"), lambda check, seconds: "soon") == "soon"
    go.set()
    async with asyncio.timeout(30):
        await found.ended()
    assert await found.run(owner, lambda check, seconds: "again") == "again"
