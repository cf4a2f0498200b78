"""Rights: no user ever gets a row that their own select would not return."""

from __future__ import annotations

import asyncio
import random
import textwrap
import time
from pathlib import Path
from typing import Any

import jwt
import pytest

from headwater import connect
from headwater.client.connection import Connection as Client
from headwater.client.subscriptions.subscription import Live
from headwater.database import Connection
from headwater.database import connect as connect_database
from headwater.errors import Forbidden
from headwater.testing.gateway_process import serving
from tests.gateway.test_oracle import LENIENT, quick
from tests.support.applications.shop import until

SECRET = "a secret that is long enough for SHA-256 and more"
USERS = ("ann", "bob")
NOTES = {"table": "notes", "order": [["id", "asc"]], "limit": 30}


def token(user: str, **more: Any) -> str:
    return jwt.encode({"sub": user, "exp": time.time() + 600, **more}, SECRET, "HS256")


@pytest.fixture
async def notes(connection: Connection) -> Any:
    """Notes under row-level security: the role `reader` sees only the user's own notes."""
    role = f"reader_{random.randrange(10**9)}"
    await connection.execute(
        "create table notes (id int primary key, owner text, text text, turn int default 0)"
    )
    await connection.execute(f"create role {role} nologin")
    await connection.execute(f"grant select on notes to {role}")
    await connection.execute("alter table notes enable row level security")
    await connection.execute(
        f"create policy own on notes for select to {role} using"
        " (owner = current_setting('request.jwt.claims', true)::json ->> 'sub')"
    )
    await connection.execute(
        "insert into notes select i, (array['ann', 'bob'])[1 + i % 2], 'secret ' || i"
        " from generate_series(1, 40) i"
    )
    await connection.execute("select headwater.enable_reactivity('notes')")
    yield role
    await connection.execute(f"drop owned by {role}; drop role {role}")


class Reader:
    """A user who looks at every row of every batch."""

    def __init__(self, client: Client, user: str) -> None:
        self.user = user
        self.live = client.live(NOTES, verify=True)
        self.seen = 0

    async def follow(self) -> None:
        async with self.live:
            async for batch in self.live.deltas():
                for row in _rows(batch):
                    assert row["owner"] == self.user, f"{self.user} got {row}"
                    self.seen += 1


def _rows(batch: Any) -> list[Any]:
    found = []
    for delta in batch.deltas:
        if hasattr(delta, "rows"):
            found += [enter.row for enter in delta.rows]
        elif hasattr(delta, "row"):
            found.append(delta.row)
    return found


async def _swap_owners(url: str, seed: int, until_: asyncio.Event) -> None:
    chance = random.Random(seed)
    connection = await connect_database(url, purpose="writer", application_path=True)
    while not until_.is_set():
        count = chance.choice((1, 1, 1, 10))
        ids = chance.sample(range(1, 41), count)
        await connection.execute(
            "update notes set owner = (array['ann', 'bob'])[1 + (random() * 0.99)::int],"
            " turn = turn + 1 where id = any(%s)",
            (sorted(ids),),
        )
    await connection.close()


async def _own(connection: Connection, user: str) -> list[int]:
    cursor = await connection.execute(
        "select id from notes where owner = %s order by id limit 30", (user,)
    )
    return [row[0] for row in await cursor.fetchall()]


async def test_rows_that_change_owner(
    url: str, connection: Connection, notes: str, tmp_path: Path
) -> None:
    with serving(url, tmp_path, auth_secret=SECRET, auth_role=notes, **LENIENT) as gateway:
        clients = [
            connect(gateway.url, token=token("ann"), transport="ws", backoff=quick),
            connect(gateway.url, token=token("bob"), transport="sse", backoff=quick),
        ]
        async with clients[0], clients[1]:
            readers = [Reader(client, user) for client, user in zip(clients, USERS, strict=True)]
            following = [asyncio.create_task(reader.follow()) for reader in readers]
            done = asyncio.Event()
            writing = [asyncio.create_task(_swap_owners(url, seed, done)) for seed in range(4)]
            await until(
                lambda: all(r.seen > 300 for r in readers) or any(t.done() for t in following)
            )
            done.set()
            await asyncio.gather(*writing)
            for reader in readers:
                own = await _own(connection, reader.user)
                await until(lambda r=reader, o=own: [row["id"] for row in r.live.rows] == o)
            for task in following:
                task.cancel()
            ended = await asyncio.gather(*following, return_exceptions=True)
            assert all(isinstance(e, asyncio.CancelledError) for e in ended), ended
            assert [client.diverged for client in clients] == [0, 0]


async def test_a_table_under_row_security_needs_a_role(
    url: str, connection: Connection, notes: str, tmp_path: Path
) -> None:
    with serving(url, tmp_path, auth_secret=SECRET, **LENIENT) as gateway:
        async with connect(gateway.url, token=token("ann"), backoff=quick) as hw:
            with pytest.raises(Forbidden, match="row-level security"):
                async with hw.live(NOTES):
                    pass
            with pytest.raises(Forbidden, match="row-level security"):
                async with hw.changes("notes"):
                    pass


async def test_a_revoked_right_ends_the_subscription(
    url: str, connection: Connection, notes: str, tmp_path: Path
) -> None:
    with serving(
        url, tmp_path, auth_secret=SECRET, auth_role=notes, gateway_recheck="1 second", **LENIENT
    ) as gateway:
        async with (
            connect(gateway.url, token=token("ann"), backoff=quick) as hw,
            hw.live(NOTES) as live,
        ):
            assert live.rows
            await connection.execute(f"revoke select on notes from {notes}")
            with pytest.raises(Forbidden):
                await _until_it_ends(live)


async def _until_it_ends(live: Live) -> None:
    async for _ in live.deltas():
        pass


RULE = """
from headwater import AccessRequest, Headwater, Identity, c

hw = Headwater()

@hw.authorize
def rule(identity: Identity, request: AccessRequest):
    if identity.user == "eve":
        return False
    if request.table == "papers":
        return c.tenant == identity.tenant
    return request.table == "open_papers"
"""


async def test_the_filter_of_the_hook_holds_under_load(
    url: str, connection: Connection, tmp_path: Path
) -> None:
    await connection.execute("create table papers (id int primary key, tenant text, turn int)")
    await connection.execute(
        "insert into papers select i, (array['acme', 'umbrella'])[1 + i % 2], 0"
        " from generate_series(1, 40) i"
    )
    await connection.execute("select headwater.enable_reactivity('papers')")
    (tmp_path / "rules.py").write_text(textwrap.dedent(RULE))
    with serving(url, tmp_path, program="rules:hw", auth_secret=SECRET, **LENIENT) as gateway:
        bad: list[Any] = []
        counted = {"live": 0, "changes": 0}

        async def follow_live(hw: Client) -> None:
            # The rule is for the table itself, in every spelling of its name.
            live = hw.live({"table": "public.papers", "limit": 30})
            async with live:
                async for batch in live.deltas():
                    rows = _rows(batch)
                    counted["live"] += len(rows)
                    bad.extend(row for row in rows if row["tenant"] != "acme")

        async def follow_changes(hw: Client) -> None:
            async for transaction in hw.changes("papers"):
                for change in transaction.changes:
                    images = [image for image in (change.before, change.after) if image]
                    counted["changes"] += 1
                    bad.extend(image for image in images if image["tenant"] != "acme")

        client = connect(gateway.url, token=token("ann", tenant="acme"), backoff=quick)
        async with client as hw:
            following = [
                asyncio.create_task(follow_live(hw)),
                asyncio.create_task(follow_changes(hw)),
            ]
            chance = random.Random(3)

            async def swap() -> bool:
                await connection.execute(
                    "update papers set tenant = (array['acme', 'umbrella'])[%s], turn = turn + 1"
                    " where id = any(%s)",
                    (chance.choice((1, 2)), chance.sample(range(1, 41), 5)),
                )
                ended = any(task.done() for task in following)
                return ended or (counted["live"] > 200 and counted["changes"] > 200)

            await until(swap, every=0)
            for task in following:
                task.cancel()
            ended = await asyncio.gather(*following, return_exceptions=True)
            assert all(isinstance(e, asyncio.CancelledError) for e in ended), ended
            assert bad == []
            for table in ("orders", "headwater.log"):
                with pytest.raises(Exception, match=r"not enabled|may not|not found"):
                    async with hw.live({"table": table}):
                        pass
        async with connect(gateway.url, token=token("eve"), backoff=quick) as hw:
            with pytest.raises(Forbidden):
                async with hw.live({"table": "papers"}):
                    pass
