"""Streams as clients get them, with what a client must show after each step.

A vector is what one subscription goes through: messages, lost connections, slides of its window.
Those of live queries come from the views that the server uses, over random histories of a table;
what must be shown is the database's own answer. Those of feeds come from a log of numbered changes,
each of which must be delivered once and in order. `$` stands for the id that the client chose last.

    {"live": {…}, "verify": true, "steps": [
      {"receive": {"type": "subscribed", …}, "since": null},   # and how it was asked for
      {"receive": {…}, "rows": [[key, row], …]},               # the rows shown from here on
      {"lost": true},
      {"move": cursor}],
     "diverged": 1}
    {"changes": {…}, "steps": [{"receive": {…}, "seqs": [1, 2]}]}
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import count
from typing import Any

import msgspec

from headwater.live.needs import Outcome
from headwater.live.query import BoundQuery, LiveQuery
from headwater.live.state.streamed import Streamed
from headwater.live.state.window import Window
from headwater.live.statements import page, statement
from headwater.log.images import ImageDecoder
from headwater.model import Delta, Enter, Key, Leave, Match, Reset, Row, Unmatch
from headwater.protocol import (
    Changes,
    Deltas,
    Frame,
    Gap,
    ResetMessage,
    ServerMessage,
    Snapshot,
    Subscribed,
    Wire,
    WireTransaction,
    result_hash,
)
from headwater.testing.oracle import SAMPLES, Connection, History, Player, ask

AT = datetime(2026, 1, 31, 12, tzinfo=UTC)
STEPS = 8


def record(connection: Connection, seed: int, streams: int) -> Iterator[bytes]:
    """`streams` vectors, a fifth of them feeds, each as a line of JSON."""
    for number in range(streams):
        chance = random.Random(f"{seed}:{number}")
        vector = _Feed(chance).run() if number % 5 == 4 else _Live(connection, chance).run()
        yield msgspec.json.encode(vector) + b"\n"


class _Steps:
    """The steps of a vector."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []
        self._views = count(1)
        self.view = 0

    def receive(self, message: ServerMessage, **expected: Any) -> None:
        self.taken.append({"receive": msgspec.Raw(Frame(message).json), **expected})

    def subscribed(self, since: str | None, *, resumed: bool, key: tuple[str, ...] = ()) -> None:
        self.view = next(self._views)
        self.receive(Subscribed("$", self.view, resumed, key), since=since)

    def lose(self) -> None:
        self.taken.append({"lost": True})

    def move(self, after: Sequence[Any] | None) -> None:
        self.taken.append({"move": after})


# ------------------------------------------------------------------------ live queries


class _Live:
    """One live query over one random history."""

    def __init__(self, connection: Connection, chance: random.Random) -> None:
        self._connection = connection
        self._chance = chance
        self._steps = _Steps()
        columns = tuple(chance.sample(sorted(SAMPLES), chance.randint(1, 3)))
        composite = chance.random() < 0.2
        self._json = _query(chance, columns)
        self._player = Player(connection, History(columns, self._json, (), composite=composite))
        self._player.play([self._operations(12)])
        self._asked = LiveQuery.from_json({"table": "t", **self._json})
        self._query = BoundQuery(self._asked, self._player.table)
        self._wire = Wire(self._player.table)
        self._decode = ImageDecoder(self._player.table)
        self._cushion = chance.randint(0, 3)
        self._state: Window | Streamed = (
            Streamed(self._query)
            if self._query.mode == "streamed"
            else Window(self._query, cushion=self._cushion)
        )
        self._settle(Outcome((), self._state.needs))
        self._verify = chance.random() < 0.7 and not isinstance(self._state, Streamed)
        self._number = 100
        self._position: str | None = None
        """What the client is complete up to."""
        self._diverged = 0

    def run(self) -> dict[str, Any]:
        self._begin()
        actions = [self._flush, self._flush, self._resume, self._reconnect, self._overflow]
        actions += [self._diverge, self._slide]
        for _ in range(STEPS):
            self._chance.choice(actions)()
        return {
            "live": {"table": "t", **self._json},
            "verify": self._verify,
            "steps": self._steps.taken,
            "diverged": self._diverged,
        }

    # -------------------------------------------------------------------- what happens

    def _begin(self) -> None:
        self._steps.subscribed(self._position, resumed=False, key=self._player.table.key)
        self._snapshot()

    def _flush(self) -> None:
        self._send(self._frame(self._change()))

    def _resume(self) -> None:
        """The connection is lost; the changes since then follow."""
        self._steps.lose()
        self._steps.subscribed(self._position, resumed=True, key=self._player.table.key)
        for _ in range(self._chance.randint(0, 2)):
            self._flush()

    def _reconnect(self) -> None:
        """The connection is lost; the whole result is sent again."""
        self._steps.lose()
        if self._chance.random() < 0.5:
            self._change()
        self._begin()

    def _overflow(self) -> None:
        for _ in range(self._chance.randint(1, 3)):
            self._change()
        self._send(self._reset("overflow"))

    def _diverge(self) -> None:
        """A delta does not fit, or a hash is wrong. The client subscribes again."""
        if self._diverged == 2:
            return
        wrong = self._frame(self._change())
        if self._verify and isinstance(wrong, Deltas) and self._chance.random() < 0.5:
            wrong = msgspec.structs.replace(wrong, hash=(wrong.hash or 0) ^ 1)
        else:
            unknown: Key = (999,) * len(self._player.table.key)
            step = Unmatch(unknown) if isinstance(self._state, Streamed) else Leave(unknown, 0)
            wrong = Deltas(self._steps.view, self._next(), AT, (step,))
        self._steps.receive(wrong)
        self._diverged += 1
        self._position = None
        self._begin()

    def _slide(self) -> None:
        if not isinstance(self._state, Window):
            return
        cursors = [None, *(row.cursor for row in self._entering())]
        after = self._chance.choice(cursors)
        cursor = None if after is None else self._query.order.read_cursor(list(after))
        slid = msgspec.structs.replace(self._asked, after=cursor)
        self._query = BoundQuery(slid, self._player.table)
        self._state = Window(self._query, cushion=self._cushion)
        self._settle(Outcome((), self._state.needs))
        self._steps.move(after)
        self._send(self._reset("window"))

    def _change(self) -> list[Delta]:
        """Transactions happen; the deltas that follow from them."""
        deltas: list[Delta] = []
        for changes in self._player.play([self._operations(3) for _ in range(2)]):
            if changes:
                outcome = self._state.apply(changes)
                deltas += outcome.deltas
        return deltas + self._settle(Outcome((), self._state.needs))

    def _settle(self, outcome: Outcome) -> list[Delta]:
        """Answer the questions of a view, as the database does."""
        deltas = list(outcome.deltas)
        while outcome.needs:
            (need,) = outcome.needs
            question = statement(self._query, need)
            outcome = self._state.answer(need, ask(self._connection, question, self._decode))
            deltas += outcome.deltas
        return deltas

    def _operations(self, most: int) -> tuple[int, ...]:
        return tuple(self._chance.getrandbits(40) for _ in range(self._chance.randint(1, most)))

    # -------------------------------------------------------------------- what is sent

    def _send(self, message: Snapshot | Deltas | ResetMessage) -> None:
        """Send it; from here on the client shows what the database has."""
        self._position = message.position
        self._steps.receive(message, rows=[(key, row) for key, row in self._true()])

    def _snapshot(self) -> None:
        if isinstance(self._state, Window):
            rows = self._entering()
            self._send(Snapshot(self._steps.view, self._next(), rows, hash=self._hash()))
            return
        # In parts; what changes in between may be in them already, or come on top.
        before = self._frame(self._change()) if self._chance.random() < 0.5 else None
        matching = [Match(key, row) for key, row in self._true()]
        cut = self._chance.randint(0, len(matching))
        first = Snapshot(self._steps.view, self._next(), tuple(matching[:cut]), more=True)
        last = msgspec.structs.replace(first, rows=tuple(matching[cut:]), more=False)
        after = self._frame(self._change()) if self._chance.random() < 0.5 else None
        self._steps.receive(first)
        for between in (before, after):
            if isinstance(between, Deltas):
                self._steps.receive(between)
        if isinstance(after, ResetMessage):
            self._steps.receive(last)
            self._send(after)
            return
        self._send(last)
        if after is not None:
            self._position = after.position

    def _frame(self, deltas: list[Delta]) -> Deltas | ResetMessage:
        """As a view of the hub makes it."""
        if any(isinstance(delta, Reset) for delta in deltas):
            return self._reset("table")
        steps = tuple(map(self._wire.delta, deltas))  # type: ignore[arg-type]
        return Deltas(self._steps.view, self._next(), AT, steps, self._hash())

    def _reset(self, reason: Any) -> ResetMessage:
        rows: tuple[Enter | Match, ...]
        if isinstance(self._state, Window):
            rows = self._entering()
        else:
            rows = tuple(Match(key, row) for key, row in self._true())
        return ResetMessage(self._steps.view, self._next(), reason, rows, hash=self._hash())

    def _entering(self) -> tuple[Enter, ...]:
        assert isinstance(self._state, Window)
        return tuple(map(self._wire.delta, self._state.snapshot().rows))  # type: ignore[arg-type]

    def _hash(self) -> int | None:
        if not self._verify:
            return None
        return result_hash((row.key, row.row) for row in self._entering())

    def _true(self) -> list[tuple[Key, Row]]:
        """The database's own answer."""
        query = self._query
        rows = 1_000_000 if query.mode == "streamed" else query.limit
        question = page(query, query.after, rows)
        found = ask(self._connection, question, self._decode)
        keyed = [
            (query.key_of(row), self._wire.row(query.select(row) if query.select else row))
            for row in found
        ]
        return sorted(keyed, key=lambda each: each[0]) if query.mode == "streamed" else keyed

    def _next(self) -> str:
        self._number += 1
        return f"ab-{self._number}:{self._number}:"


def _query(chance: random.Random, columns: tuple[str, ...]) -> dict[str, Any]:
    query: dict[str, Any] = {}
    if chance.random() < 0.3:
        query["where"] = [["k", "<", chance.randint(2, 10)]]
    if chance.random() < 0.25:
        return {**query, "mode": "streamed"}
    names = chance.sample([*columns, "k"], chance.randint(0, 2))
    query["order"] = [[name, chance.choice(["asc", "desc"])] for name in names]
    query["limit"] = chance.randint(1, 6)
    if chance.random() < 0.3:
        query["columns"] = list(columns[:1])
    return query


# ------------------------------------------------------------------------ feeds


class _Feed:
    """One feed of a log in which transactions end in another order than they begin."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._steps = _Steps()
        self._seqs = count(1)
        self._log = [self._transaction(xid) for xid in range(10, 40)]
        for place in range(0, len(self._log) - 1, 2):
            if chance.random() < 0.3:
                swapped = self._log[place : place + 2][::-1]
                self._log[place : place + 2] = swapped
        self._expected: list[int] = []
        self._known: str | None = None
        self._reached = 0
        """How far in the log the client has received changes."""
        self._resumes = 0
        """Where in the log its position is."""

    def _transaction(self, xid: int) -> WireTransaction:
        changes = tuple(
            {"seq": next(self._seqs), "table": "t", "op": "insert", "key": {"id": xid}}
            for _ in range(self._chance.randint(1, 3))
        )
        return WireTransaction(xid, AT, changes)

    def run(self) -> dict[str, Any]:
        self._steps.subscribed(None, resumed=False)
        self._send([], 0)
        for _ in range(STEPS):
            self._chance.choice([self._more, self._more, self._lose, self._gap])()
        return {"changes": {"tables": ["t"]}, "steps": self._steps.taken}

    def _position(self, place: int) -> str:
        """The position that contains the first `place` transactions of the log, and no others."""
        ended = {transaction.xid for transaction in self._log[:place]}
        xmax = max(ended, default=9) + 1
        running = [xid for xid in range(10, xmax) if xid not in ended]
        xmin = min(running, default=xmax)
        return f"ab-{xmin}:{xmax}:{','.join(map(str, running))}"

    def _send(self, transactions: Iterable[WireTransaction], place: int) -> None:
        """Send transactions, with the position of that place in the log."""
        sent = tuple(transactions)
        known = set(self._expected)
        seqs = [change["seq"] for each in sent for change in each.changes]
        self._expected += [seq for seq in seqs if seq not in known]
        if self._known is None or place > self._resumes:
            self._known, self._resumes = self._position(place), place
        message = Changes(self._steps.view, self._position(place), sent)
        self._steps.receive(message, seqs=list(self._expected))

    def _more(self) -> None:
        """Send a few more transactions. The position is sometimes behind: they are on disk only
        later."""
        begin = self._reached
        self._reached = min(begin + self._chance.randint(1, 3), len(self._log))
        place = self._chance.randint(self._resumes, self._reached)
        self._send(self._log[begin : self._reached], place)

    def _lose(self) -> None:
        """The connection is lost, perhaps amid a large transaction; what the position does not
        contain comes again."""
        if self._reached < len(self._log) and self._chance.random() < 0.5:
            cut = self._log[self._reached]
            part = msgspec.structs.replace(cut, changes=cut.changes[:1], complete=False)
            self._send([part], self._resumes)
        self._steps.lose()
        self._again()

    def _gap(self) -> None:
        """Some transactions were left out, and the client asks for them."""
        skipped = min(self._reached + 2, len(self._log))
        self._resumes, since = self._reached, self._position(self._reached)
        self._known = since
        gap = Gap(self._steps.view, self._position(skipped), since, "overflow")
        self._steps.receive(gap)
        self._again()

    def _again(self) -> None:
        self._steps.subscribed(self._known, resumed=True)
        self._reached = max(self._reached, self._resumes)
        self._send(self._log[self._resumes : self._reached], self._resumes)
