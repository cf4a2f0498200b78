"""Transactions that are streamed while they run."""

from __future__ import annotations

import pytest

from headwater.capture.postgres.wal.pgoutput import Begin, Insert, Message
from headwater.capture.postgres.wal.spool import Replay, Spool
from headwater.errors import SourceUnavailable
from tests.support import pgoutput_messages as messages


def taken(spool: Spool, *payloads: bytes) -> list[Message | list[Message]]:
    """The messages, and those of a transaction from disk as a list."""
    found: list[Message | list[Message]] = []
    for payload in payloads:
        message = spool.take(payload)
        if isinstance(message, Replay):
            found.append([each for each, _ in message.messages])
        elif message is not None:
            found.append(message)
    return found


def block(xid: int, *payloads: bytes) -> tuple[bytes, ...]:
    return (messages.stream_start(xid), *payloads, messages.STREAM_STOP)


def test_a_transaction_comes_at_its_commit_in_the_order_of_commits() -> None:
    spool = Spool()
    found = taken(
        spool,
        *block(7, messages.insert(9, ("1",), xid=7)),
        *block(8, messages.insert(9, ("2",), xid=8)),
        messages.begin(16, 5),
        *block(7, messages.insert(9, ("3",), xid=7)),
        messages.stream_commit(8, 16, 24),
        messages.stream_commit(7, 32, 40),
    )
    assert isinstance(found[0], Begin)
    assert found[1:] == [
        [Insert(9, ("2",), 8)],
        [Insert(9, ("1",), 7), Insert(9, ("3",), 7)],
    ]
    assert spool.bytes == 0


def test_a_subtransaction_that_was_rolled_back_is_left_out() -> None:
    spool = Spool()
    rows = [messages.insert(9, (str(xid),), xid=xid) for xid in (7, 8, 9, 7)]
    found = taken(
        spool,
        *block(7, *rows),
        messages.stream_abort(7, 8),
        *block(7, messages.insert(9, ("10",), xid=10)),
        messages.stream_commit(7, 16, 24),
    )
    assert found == [
        [Insert(9, ("7",), 7), Insert(9, ("9",), 9), Insert(9, ("7",), 7), Insert(9, ("10",), 10)]
    ]


def test_a_transaction_that_was_rolled_back_leaves_nothing() -> None:
    spool = Spool()
    assert taken(spool, *block(7, messages.insert(9, ("1",), xid=7))) == []
    assert spool.bytes > 0
    assert taken(spool, messages.stream_abort(7, 7), messages.stream_commit(7, 16, 24)) == [[]]
    assert spool.bytes == 0


def test_a_folder_that_cannot_be_written_is_named(tmp_path: object) -> None:
    spool = Spool(f"{tmp_path}/missing")
    with pytest.raises(SourceUnavailable, match="missing") as error:
        spool.take(messages.stream_start(7))
    assert "spool_folder" in (error.value.hint or "")
