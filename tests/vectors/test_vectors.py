"""The replicas of Python and JavaScript show the same rows for the same streams: the true ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headwater.client.session import ClientSession, Send, SubscriptionFailed, TransactionsReceived
from headwater.client.state.feed import FeedState
from headwater.client.state.rows import LiveState
from headwater.embedded import EmbeddedPostgres
from headwater.protocol import ChangesQuery, Subscribe, read_server
from headwater.testing.oracle import connect
from tests.javascript.test_client import run
from tests.support.generators.vectors import record

STREAMS = 1_000


# One test, so that the streams are recorded once, wherever tests run.
@pytest.mark.timeout(300)
def test_python_and_javascript_show_the_true_rows(
    postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    path = tmp_path / "vectors.jsonl"
    with connect(postgres.url) as connection, path.open("wb") as file:
        file.writelines(record(connection, seed=8, streams=STREAMS))
    _holds_everything(path.read_text())
    for number, line in enumerate(path.read_bytes().splitlines()):
        _Driver(msgspec.json.decode(line), f"vector {number}").run()
    run("vectors", HEADWATER_VECTORS=str(path))


def _holds_everything(text: str) -> None:
    for what in ("reset", "gap", "move", "lost", "hash", "more", "complete", "overflow", "match"):
        assert f'"{what}"' in text, what
    streams = list(map(json.loads, text.splitlines()))
    assert len(streams) == STREAMS
    assert sum(stream.get("diverged", 0) for stream in streams) > STREAMS / 10


class _Driver:
    """Plays a vector to a client's session."""

    def __init__(self, vector: dict[str, Any], name: str) -> None:
        self._vector = vector
        self._name = name
        self._session = ClientSession()
        self._state: LiveState | FeedState
        if "live" in vector:
            self._state = LiveState(vector["live"], vector["verify"])
        else:
            self._state = FeedState(msgspec.convert(vector["changes"], ChangesQuery))
        self._asked = Subscribe("")
        self._seqs: list[int] = []

    def run(self) -> None:
        self._session.add(self._state)
        self._asked = self._session.subscribe(self._state)
        for number, step in enumerate(self._vector["steps"]):
            match step:
                case {"receive": message}:
                    self._receive(message)
                case {"lost": True}:
                    self._act(self._session.connected())
                case {"move": after}:
                    assert isinstance(self._state, LiveState)
                    self._state.move(after)
            self._compare(step, f"{self._name}, step {number}")
        assert self._session.diverged == self._vector.get("diverged", 0), self._name

    def _receive(self, message: dict[str, Any]) -> None:
        if message.get("id") == "$":
            message = {**message, "id": self._state.wire_id}
        self._act(self._session.receive(read_server(msgspec.json.encode(message))))

    def _act(self, events: Any) -> None:
        for event in events:
            match event:
                case Send(Subscribe() as asked):
                    self._asked = asked
                case TransactionsReceived(_, transactions):
                    self._seqs += [c.seq for each in transactions for c in each.changes]
                case SubscriptionFailed(_, error):
                    raise error

    def _compare(self, step: dict[str, Any], where: str) -> None:
        state = self._state
        if "since" in step:
            changes = self._asked.changes
            assert step["since"] == (changes.since if changes else self._asked.since), where
        if "rows" in step:
            assert isinstance(state, LiveState)
            shown = [[list(key), row] for key, row in zip(state.keys, state.rows, strict=True)]
            assert shown == step["rows"], where
        if "seqs" in step:
            assert self._seqs == step["seqs"], where
