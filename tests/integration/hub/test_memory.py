"""The memory of live queries: what the hub counts equals a recount after any history."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from headwater import limits
from headwater.database import Connection
from headwater.errors import LimitExceeded, ResultError
from headwater.hub.hub import Hub
from headwater.hub.live_views.view import LiveSubscription
from headwater.live.state.sizes import key_sizes
from headwater.live.state.window import Window
from headwater.settings.groups import LimitSettings, Settings
from tests.support.generators.sizes import first_seed, size
from tests.support.log_probe import enable, run
from tests.support.subscribers import Recorder, live

STEPS = size("memory_steps", 60, large=5_000)
MIB = 1024 * 1024


@pytest.fixture
async def notes(connection: Connection) -> Connection:
    await run(
        connection,
        'create table notes (id text collate "C" primary key, n int, body text, doc jsonb,'
        " price numeric)",
        "insert into notes select 'k' || i, i % 7, repeat('x', i), jsonb_build_object('i', i), i"
        " from generate_series(1, 60) i",
    )
    await enable(connection, "notes")
    return connection


def recount(hub: Hub, open_: list[tuple[tuple[str, str], LiveSubscription]]) -> None:
    """Each row of each view once more; and each view for each user who follows it."""
    for view in hub.live_views:
        state = view.state
        rows = (
            sum(map(view.query.layout.size, state._entries))
            if isinstance(state, Window)
            else sum(map(key_sizes(view.query.table), state.members))
        )
        assert state.bytes == rows, view.query
        assert view.holding is not None
        assert view.holding.bytes == view.bytes
    memory = hub.memory
    assert memory.total == sum(view.bytes for view in hub.live_views)
    held: Counter[Any] = Counter()
    for owner, target in {(owner, each.target) for owner, each in open_ if not each.closed}:
        assert target is not None
        held[owner] += target.bytes
    for lingering in hub.live_views._lingering:
        assert lingering.holding is not None
        (last,) = lingering.holding.owners
        held[last] += lingering.bytes
    assert dict(memory.owners) == held


def random_query(chance: random.Random) -> Any:
    where = chance.choice([[], [["n", "=", chance.randrange(7)]], [["body", "like", "%x%"]]])
    if chance.random() < 0.2:
        return live("notes", where=where, mode="streamed")
    order = chance.choice([[], ["body desc"], ["n asc", "price desc"], ["doc"]])
    columns = chance.choice([None, ["n"]])
    order = [] if order == ["doc"] else order
    return live("notes", where=where, order=order, columns=columns, limit=chance.choice([1, 5, 9]))


def random_change(chance: random.Random) -> str:
    key = f"'k{chance.randint(1, 80)}'"
    body = chance.choice(["x", "ä" * 50, "😀", "x" * 3_000])
    return chance.choice(
        [
            f"insert into notes values ({key}, {chance.randrange(7)}, '{body}', '[1, 2]', 1.50)"
            " on conflict do nothing",
            f"update notes set body = '{body}' where id = {key}",
            f"update notes set n = {chance.randrange(7)}, price = 1e{chance.randrange(50)}"
            f" where id = {key}",
            f"update notes set doc = jsonb_build_object('a', repeat('y', {chance.randrange(99)}))"
            f" where n = {chance.randrange(7)}",
            f"update notes set id = id || 'ö' where id = {key}",
            f"delete from notes where id = {key}",
            f"delete from notes where n = {chance.randrange(7)}",
        ]
    )


async def test_the_counted_bytes_equal_a_recount(url: str, notes: Connection) -> None:
    seed = first_seed(11)
    chance = random.Random(seed)
    open_: list[tuple[tuple[str, str], LiveSubscription]] = []
    async with Hub(url, settings=Settings(limits=LimitSettings(bytes_per_user=MIB))) as hub:
        for step in range(STEPS):
            match chance.randrange(8):
                case 0 | 1 | 2:
                    owner = ("user", chance.choice(["ann", "bob", "cid"]))
                    query = random_query(chance)
                    open_.append((owner, await hub.live(query, Recorder(), owner=owner)))
                case 3 if open_:
                    open_.pop(chance.randrange(len(open_)))[1].close()
                case 4 if open_:
                    moving = chance.choice(open_)[1]
                    if moving.query.mode != "streamed" and not moving.query.order:
                        await moving.reanchor([f"k{chance.randint(1, 60)}"])
                case 5 if step % 20 == 5:
                    await run(notes, "truncate notes", *[random_change(chance) for _ in range(9)])
                case 6 if open_ and step % 10 == 6:
                    view = chance.choice(open_)[1].target
                    assert view is not None
                    hub.live_views.read_again(view, "resync")
                case _:
                    await run(notes, random_change(chance))
                    continue
            await hub.flushes.next_flush()
            for _, each in open_:
                await each.arrived()
            recount(hub, open_)
        for _, each in open_:
            each.close()
        recount(hub, open_)
        for view in list(hub.live_views._lingering):
            hub.live_views._remove(view)
        assert hub.memory.total == 0, f"seed {seed}"
        assert dict(hub.memory.owners) == {}


async def filled(connection: Connection, *, rows: int, bytes: int) -> None:
    await run(
        connection,
        "create table pages (id int primary key, text text)",
        f"insert into pages select i, repeat('x', {bytes}) from generate_series(1, {rows}) i",
    )
    await enable(connection, "pages")


def pages(limit: int) -> Any:
    return live("pages", order=["id"], limit=limit)


async def test_one_user_is_refused_and_others_are_not(url: str, connection: Connection) -> None:
    await filled(connection, rows=200, bytes=10_000)
    async with Hub(url, settings=Settings(limits=LimitSettings(bytes_per_user=MIB))) as hub:
        # 30 rows of 10 kB and seven behind them: more than a third of a mebibyte each.
        mine = [
            await hub.live(pages(30 + number), Recorder(), owner=("user", "ann"))
            for number in range(2)
        ]
        with pytest.raises(LimitExceeded, match="more than 1,048,576 bytes") as caught:
            await hub.live(pages(50), Recorder(), owner=("user", "ann"))
        assert caught.value.code == "bytes_per_user"
        assert len(hub.live_views.views) == 2
        assert hub.memory.of(("user", "ann")) <= MIB
        # A result that another user follows counts for that user alone, also if it is shared.
        await hub.live(pages(50), Recorder(), owner=("user", "bob"))
        with pytest.raises(LimitExceeded):
            await hub.live(pages(50), Recorder(), owner=("user", "ann"))
        mine[0].close()
        await hub.live(pages(30), Recorder(), owner=("user", "ann"))
        # One result that is larger than all that a user may have.
        with pytest.raises(LimitExceeded):
            await hub.live(pages(200), Recorder(), owner=("user", "cid"))
        assert hub.memory.of(("user", "cid")) == 0
        members = live("pages", mode="streamed")
        await hub.live(members, Recorder(), owner=("user", "cid"))


async def test_a_live_query_that_grew_ends(url: str, connection: Connection) -> None:
    await filled(connection, rows=20, bytes=100)
    async with Hub(url, settings=Settings(limits=LimitSettings(bytes_per_user=MIB))) as hub:
        grown, small, other = Recorder(), Recorder(), Recorder()
        await hub.live(pages(20), grown, owner=("user", "ann"))
        await hub.live(live("pages", columns=["id"], limit=20), small, owner=("user", "ann"))
        await hub.live(live("pages", columns=["id"], limit=20), other, owner=("user", "bob"))
        await run(connection, "update pages set text = repeat('y', 100000)")
        await grown.until(lambda: grown.error is not None)
        assert isinstance(grown.error, LimitExceeded)
        assert grown.error.code == "bytes_per_user"
        assert hub.memory.of(("user", "ann")) < MIB / 8
        await run(connection, "insert into pages values (0, '')")
        await small.until(lambda: small.rows[0]["id"] == 0)
        await other.until(lambda: other.rows[0]["id"] == 0)
        assert (small.error, other.error) == (None, None)


async def test_the_largest_user_is_closed_above_the_total(url: str, connection: Connection) -> None:
    await filled(connection, rows=100, bytes=10_000)
    async with Hub(url, settings=Settings(limits=LimitSettings(bytes_total=2 * MIB))) as hub:
        hostile = [Recorder() for _ in range(4)]
        for number, each in enumerate(hostile):
            await hub.live(pages(30 + number), each, owner=("user", "eve"))
        good = [Recorder() for _ in range(3)]
        for number, each in enumerate(good):
            await hub.live(pages(10 + number), each, owner=("user", number))
        for each in good:
            assert len(each.rows) >= 10
            assert each.error is None
        ended = [each.error.code for each in hostile if each.error is not None]
        assert ended
        assert set(ended) == {"bytes_total"}
        assert hub.memory.total <= 2 * MIB


async def test_queries_without_subscribers_are_closed_first(
    url: str, connection: Connection
) -> None:
    await filled(connection, rows=60, bytes=10_000)
    async with Hub(url, settings=Settings(limits=LimitSettings(bytes_per_user=MIB))) as hub:
        for number in range(10):  # each for a moment, and each is still there for a while after
            (await hub.live(pages(30 + number), Recorder(), owner=("user", "ann"))).close()
        assert 0 < hub.memory.of(("user", "ann")) <= MIB
        assert 1 <= len(hub.live_views._lingering) < 4
        await hub.live(pages(50), Recorder(), owner=("user", "ann"))


async def test_a_large_filter_counts(url: str, connection: Connection) -> None:
    await filled(connection, rows=1, bytes=10)
    async with Hub(url, settings=Settings(limits=LimitSettings(bytes_per_user=MIB))) as hub:
        values = [f"{number:0>200}" for number in range(limits.FILTER_VALUES_MAX)]
        query = live("pages", where=[["text", "in", values]])
        with pytest.raises(LimitExceeded):
            await hub.live(query, Recorder(), owner=("user", "ann"))
        assert len(hub.live_views.views) == 0


async def test_a_first_result_that_is_too_large_is_not_sent(
    url: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(connection, rows=60, bytes=10_000)
    monkeypatch.setattr(limits, "OPENING_BYTES_MAX", 300_000)
    async with Hub(url) as hub:
        for query in (pages(40), live("pages", mode="streamed")):
            with pytest.raises(ResultError, match="more than 300,000 bytes") as caught:
                await hub.live(query, Recorder())
            assert caught.value.code == "result_too_large"
            assert not caught.value.retryable
        enough = Recorder()
        await hub.live(pages(20), enough)
        assert [row["id"] for row in enough.rows] == list(range(1, 21))
        assert len(hub.live_views.views) == 1
