"""The decoder of pgoutput: every message whole, cut off at every byte, and with a tail."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from headwater.capture.postgres.wal import pgoutput
from headwater.capture.postgres.wal.pgoutput import Decoder, MalformedMessage, decode
from headwater.capture.source import UNCHANGED
from tests.support import pgoutput_messages as messages

MOMENT = datetime(2026, 1, 31, 12, tzinfo=UTC)
MICROSECONDS = 823_176_000_000_000 + 0

CASES = [
    (messages.begin(16, 7, MICROSECONDS), pgoutput.Begin(16, MOMENT, 7)),
    (messages.commit(16, 24, MICROSECONDS), pgoutput.Commit(16, 24, MOMENT)),
    (b"O" + bytes(7) + b"\x10other\0", pgoutput.Origin(16, "other")),
    (
        messages.relation(9, "Örders", {"id": 20, "note": 25}, schema="sales", identity="f"),
        pgoutput.Relation(
            9, "sales", "Örders", "f",
            (
                pgoutput.RelationColumn("id", 20, -1, True),
                pgoutput.RelationColumn("note", 25, -1, False),
            ),
        ),
    ),
    (b"Y\0\0\x40\x01public\0mood\0", pgoutput.TypeName(16385, "public", "mood")),
    (messages.insert(9, ("1", None, "Zoë", "")), pgoutput.Insert(9, ("1", None, "Zoë", ""))),
    (messages.update(9, ("1", UNCHANGED)), pgoutput.Update(9, None, None, ("1", UNCHANGED))),
    (
        messages.update(9, ("2", "b"), key=("1", None)),
        pgoutput.Update(9, ("1", None), None, ("2", "b")),
    ),
    (
        messages.update(9, ("2", "b"), old=("1", "a")),
        pgoutput.Update(9, None, ("1", "a"), ("2", "b")),
    ),
    (messages.delete(9, key=("1", None)), pgoutput.Delete(9, ("1", None), None)),
    (messages.delete(9, old=("1", "a")), pgoutput.Delete(9, None, ("1", "a"))),
    (messages.truncate(9, 10, options=3), pgoutput.Truncate((9, 10), True, True)),
    (
        b"M\x01" + bytes(7) + b"\x10mark\0\0\0\0\x02\x00\xff",
        pgoutput.LogicalMessage(True, 16, "mark", b"\x00\xff"),
    ),
    (messages.stream_start(7), pgoutput.StreamStart(7, True)),
    (messages.STREAM_STOP, pgoutput.StreamStop()),
    (messages.stream_commit(7, 16, 24, MICROSECONDS), pgoutput.StreamCommit(7, 16, 24, MOMENT)),
    (messages.stream_abort(7, 8), pgoutput.StreamAbort(7, 8)),
]  # fmt: skip


@pytest.mark.parametrize(("data", "message"), CASES)
def test_a_message(data: bytes, message: pgoutput.Message) -> None:
    assert decode(data) == message


@pytest.mark.parametrize("data", [data for data, _ in CASES])
def test_a_message_that_is_cut_off_or_too_long(data: bytes) -> None:
    for size in range(len(data)):
        with pytest.raises(MalformedMessage):
            decode(data[:size])
    with pytest.raises(MalformedMessage):
        decode(data + b"\0")


def test_messages_of_a_running_transaction_have_its_id() -> None:
    decoder = Decoder()
    found = [
        decoder.decode(data)
        for data in (
            messages.stream_start(7),
            messages.relation(9, "t", {"id": 20}, xid=7),
            messages.insert(9, ("1",), xid=8),
            messages.update(9, ("1",), xid=8),
            messages.delete(9, key=("1",), xid=8),
            messages.truncate(9, xid=8),
            messages.STREAM_STOP,
            messages.insert(9, ("2",)),
        )
    ]
    assert [getattr(message, "xid", None) for message in found] == [7, 7, 8, 8, 8, 8, None, 0]


def test_binary_values_and_unknown_messages_are_refused() -> None:
    with pytest.raises(MalformedMessage, match="unknown"):
        decode(b"?")
    with pytest.raises(MalformedMessage, match="malformed"):
        decode(messages.insert(9, ("1",)).replace(b"t\0", b"b\0"))
    with pytest.raises(MalformedMessage):
        decode(b"")
