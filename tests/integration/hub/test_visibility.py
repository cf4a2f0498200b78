"""Rights: row-level security, the filter of the authorize hook, privileges that come and go."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headwater.database import Connection, connect
from headwater.errors import Forbidden
from headwater.hub.feeds.view import FeedQuery
from headwater.hub.hub import Hub
from headwater.hub.subscriptions.subscriber import Access
from headwater.live.filters.filter import c
from tests.support.log_probe import enable, run
from tests.support.subscribers import Historian, Recorder, TableHistory, answer, live, logged

ROLE, BYPASSING, STRANGER = "hw_reader", "hw_auditor", "hw_stranger"


@pytest.fixture
async def notes(connection: Connection) -> AsyncIterator[Connection]:
    await run(
        connection,
        *(
            f"do $$ begin create role {role} nologin {options};"
            " exception when duplicate_object then null; end $$"
            for role, options in ((ROLE, ""), (BYPASSING, "bypassrls"), (STRANGER, ""))
        ),
        "create table notes (id int primary key, owner int, rank int)",
        "create table members (owner int primary key)",
        f"grant select on notes, members to {ROLE}, {BYPASSING}",
        "insert into members values (1), (2)",
        "insert into notes select i, 1 + i % 2, i from generate_series(1, 40) i",
        "alter table notes enable row level security",
        "create policy own on notes for select using ("
        " owner = (current_setting('request.jwt.claims')::json ->> 'sub')::int"
        " and owner in (select owner from members))",
    )
    await enable(connection, "notes")
    yield connection
    await run(connection, f"drop owned by {ROLE}, {BYPASSING}, {STRANGER}")


def user(number: int, role: str = ROLE) -> Access:
    return Access(role=role, claims=json.dumps({"sub": number}))


async def assert_true_at_every_position(
    connection: Connection,
    recorder: Historian,
    initial: list[dict[str, Any]],
    owner: int,
    limit: int | None,
) -> None:
    """Its rows at each position are those of the table then, according to the log."""
    assert recorder.fault is None
    history = TableHistory(initial, await logged(connection, "notes"))
    for position, held in recorder.history:
        mine = [row for row in history.at(position) if row["owner"] == owner]
        if limit is not None:
            mine.sort(key=lambda row: int(row["rank"]))
        assert held == mine[:limit], f"at {position}"


async def juggle(url: str, seed: int, stop: asyncio.Event) -> None:
    """Rows change owner back and forth, and their rank with it."""
    connection = await connect(url, purpose="writer", application_path=True)
    chance = random.Random(seed)
    while not stop.is_set():
        key = chance.randint(1, 60)
        await run(
            connection,
            chance.choice(
                [
                    f"update notes set owner = 3 - owner where id = {key}",
                    f"update notes set owner = 3 - owner, rank = {chance.randint(0, 50)}"
                    f" where id % 7 = {key % 7}",
                    f"update notes set rank = {chance.randint(0, 50)} where id = {key}",
                    f"delete from notes where id = {key}",
                    f"insert into notes values ({key}, {1 + key % 2}, {chance.randint(0, 50)})"
                    " on conflict (id) do update set owner = 3 - notes.owner",
                ]
            ),
        )
        await asyncio.sleep(chance.random() * 0.01)
    await connection.close()


@pytest.mark.parametrize("mode", ["maintained", "streamed"])
@pytest.mark.parametrize("guard", ["policy", "hook"])
async def test_rows_change_owner_under_load(
    url: str, notes: Connection, mode: str, guard: str
) -> None:
    if guard == "hook":
        await run(notes, "alter table notes disable row level security")
    order: dict[str, Any] = {} if mode == "streamed" else {"order": ["rank"], "limit": 8}
    initial = await answer(notes, "select * from notes")
    stop = asyncio.Event()
    async with Hub(url) as hub:
        writers = [asyncio.create_task(juggle(url, seed, stop)) for seed in range(4)]
        recorders: list[tuple[int, Historian]] = []
        for i in range(12):
            number, recorder = 1 + i % 2, Historian()
            access = user(number) if guard == "policy" else Access(where=c.owner == number)
            query = live("notes", mode=mode, **order)
            subscription = await hub.live(query, recorder, access=access)
            recorders.append((number, recorder))
            await asyncio.sleep(0.05)
            if i % 3 == 0:
                subscription.resync("overflow")
        await asyncio.sleep(0.5)
        stop.set()
        await asyncio.gather(*writers)
        await notes.execute("insert into notes values (1000, 1, -1), (1001, 2, -1)")
        for number, recorder in recorders:
            await recorder.until(lambda r=recorder, n=number: r.replica.row((999 + n,)))  # type: ignore[misc]
            assert recorder.error is None
            await assert_true_at_every_position(
                notes, recorder, initial, number, order.get("limit")
            )
        assert len(recorders[0][1].history) > 10


async def test_a_guarded_table_needs_a_role(url: str, notes: Connection) -> None:
    async with Hub(url) as hub:
        with pytest.raises(Forbidden, match="no database role") as caught:
            await hub.live(live("notes"), Recorder())
        assert "[auth] role" in (caught.value.hint or "")
        with pytest.raises(Forbidden, match="there is no database role unknown"):
            await hub.live(live("notes"), Recorder(), access=Access(role="unknown"))
        with pytest.raises(Forbidden, match="may not read notes"):
            await hub.live(live("notes"), Recorder(), access=Access(role=STRANGER))


async def test_users_share_a_view_only_within_their_scope(url: str, notes: Connection) -> None:
    async with Hub(url) as hub:
        recorders = [Recorder() for _ in range(4)]
        views = [
            (await hub.live(live("notes"), recorder, access=access)).view
            for recorder, access in zip(
                recorders, (user(1), user(1), user(2), user(1, BYPASSING)), strict=True
            )
        ]
        assert views[0] == views[1]
        assert len(set(views)) == 3
        owners = [{row["owner"] for row in recorder.rows} for recorder in recorders]
        assert owners == [{1}, {1}, {2}, {1, 2}]


async def test_feeds_of_guarded_tables(url: str, notes: Connection) -> None:
    async with Hub(url) as hub:
        for access in (Access(), user(1)):
            for tables in (("notes",), ()):
                with pytest.raises(Forbidden, match="change feed"):
                    await hub.feed(FeedQuery(tables), Recorder(), access=access)
        recorder = Recorder()
        await hub.feed(FeedQuery(("notes",)), recorder, access=user(1, BYPASSING))
        await run(notes, "insert into notes values (100, 1, 1)")
        await recorder.until(lambda: recorder.messages)


async def test_a_table_guarded_later_ends_a_feed_of_everything(
    url: str, connection: Connection
) -> None:
    async with Hub(url) as hub:
        recorder = Recorder()
        await hub.feed(FeedQuery(), recorder)
        await run(
            connection,
            "create table secrets (id int primary key)",
            "alter table secrets enable row level security",
        )
        await enable(connection, "secrets")
        await run(connection, "insert into secrets values (1)")
        await recorder.until(lambda: recorder.error)
        assert isinstance(recorder.error, Forbidden)
        assert not any("secrets" in str(message) for message in recorder.messages)


async def test_a_lost_right_without_a_log_entry_is_noticed_in_time(
    url: str, notes: Connection
) -> None:
    """The policy consults a table that is not watched."""
    async with Hub(url, recheck=0.4) as hub:
        recorder = Recorder()
        await hub.live(live("notes"), recorder, access=user(1))
        assert len(recorder.rows) == 20
        await run(notes, "delete from members where owner = 1")
        await recorder.until(lambda: recorder.rows == [])
        assert recorder.messages[-1].reason == "access"
        await run(notes, "insert into members values (1)")
        await recorder.until(lambda: len(recorder.rows) == 20)


async def test_rows_hidden_meanwhile_are_not_sent_to_new_subscribers(
    url: str, notes: Connection
) -> None:
    async with Hub(url) as hub:
        # Reconciling also finds rows that can be seen again, and would hide what a resync does.
        hub.reconciler.seconds = None
        recorder, late = Recorder(), Recorder()
        subscription = await hub.live(live("notes"), recorder, access=user(1))
        await run(notes, "delete from members where owner = 1")
        await hub.live(live("notes"), late, access=user(1))
        assert late.rows == []
        await recorder.until(lambda: recorder.rows == [])
        await run(notes, "insert into members values (1)")
        subscription.resync("overflow")
        await run(notes, "update notes set rank = -5 where id = 2")
        await recorder.until(lambda: [row["id"] for row in recorder.rows] == [2])


async def test_a_right_taken_away(url: str, notes: Connection) -> None:
    await run(
        notes,
        "create table plain (id int primary key, secret int)",
        f"grant select on plain to {ROLE}",
        f"grant select (id) on plain to {STRANGER}",
    )
    await enable(notes, "plain")
    async with Hub(url, recheck=0.4) as hub:
        guarded, plain, public, feed = Recorder(), Recorder(), Recorder(), Recorder()
        await hub.live(live("notes"), guarded, access=user(1))
        one = await hub.live(live("plain"), plain, access=user(1))
        other = await hub.live(live("plain"), public)
        await hub.feed(FeedQuery(("plain",)), feed, access=user(1))
        assert one.view == other.view
        partial = Access(role=STRANGER)
        await hub.live(live("plain", columns=["id"]), Recorder(), access=partial)
        for query in (live("plain"), live("plain", columns=["id"], where=[["secret", "=", 1]])):
            with pytest.raises(Forbidden):
                await hub.live(query, Recorder(), access=partial)
        await run(notes, f"revoke select on notes, plain from {ROLE}")
        for recorder in (guarded, plain, feed):
            await recorder.until(lambda r=recorder: r.error)  # type: ignore[misc]
            assert isinstance(recorder.error, Forbidden)
        await run(notes, "insert into plain values (1, 1)")
        await public.until_rows([{"id": 1, "secret": 1}])
        assert plain.rows == []


async def test_other_rights_on_the_open_subscription(url: str, notes: Connection) -> None:
    async with Hub(url) as hub:
        recorder = Recorder()
        subscription = await hub.live(live("notes"), recorder, access=user(1))
        await subscription.change_access(user(1))
        assert recorder.kinds() == ["snapshot"]
        await subscription.change_access(user(2))
        assert recorder.messages[-1].reason == "access"
        assert {row["owner"] for row in recorder.rows} == {2}
        await subscription.change_access(Access(role=STRANGER))
        assert isinstance(recorder.error, Forbidden)


async def test_a_policy_that_fails_does_not_affect_others(url: str, notes: Connection) -> None:
    await run(notes, "insert into notes values (500, 1, 1)")
    async with Hub(url) as hub:
        fine, broken = Recorder(), Recorder()
        await hub.live(live("notes", limit=100), fine, access=user(1))
        with pytest.raises(Forbidden, match="22P02"):
            await hub.live(
                live("notes"), broken, access=Access(role=ROLE, claims='{"sub": "unknown"}')
            )
        await run(notes, "update notes set rank = 7 where id = 500")
        await fine.until(lambda: (fine.replica.row((500,)) or {}).get("rank") == 7)
