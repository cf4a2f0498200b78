"""Messages between gateways: in parts, in order, in any encoding of the database."""

from __future__ import annotations

import random
from contextlib import suppress
from datetime import UTC, datetime
from typing import get_args

import msgspec
import pytest

from headwater.channels.bus_messages import (
    _BUS_PAYLOAD_BYTES_MAX,
    _BUS_SENDERS_MAX,
    BusMessage,
    Heartbeat,
    HistoryReply,
    MembersChanged,
    MembersRequest,
    MembersSnapshot,
    PayloadReader,
    PlacedMember,
    Published,
    StoredMessage,
    payloads,
)
from headwater.limits import BUS_NOTE_BYTES_MAX
from headwater.protocol import Member

AT = datetime(2026, 1, 1, tzinfo=UTC)


def said(data: object) -> Published:
    return Published("room:1", msgspec.Raw(msgspec.json.encode(data)), AT, "ann", "m1")


MESSAGES: list[BusMessage] = [
    said({"text": 'Zoë 😀 \u2028 \\ " \n \x00'}),
    said("ü" * 20_000),
    MembersChanged(
        3, (PlacedMember("room:1", Member("m1", "ann", {"x": [1, None]})),), (("room:2", "m2"),)
    ),
    Heartbeat(7),
    MembersRequest(),
    MembersRequest("b"),
    MembersSnapshot(1, 1, 2, (PlacedMember("r", Member("m")),)),
    HistoryReply("r", "b", (StoredMessage("a:1", said(1)), StoredMessage("a:2", said([])))),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda n: type(n).__name__)
def test_a_message_is_read_as_it_was_written(message: BusMessage) -> None:
    reader = PayloadReader()
    parts = payloads(message, "a", 1)
    assert all(part.isascii() and len(part) <= _BUS_PAYLOAD_BYTES_MAX for part in parts)
    *first, last = [reader.read(part) for part in parts]
    assert first == [None] * (len(parts) - 1)
    assert last is not None
    assert (last.sender, last.id) == ("a", "a:1")
    assert msgspec.json.decode(msgspec.json.encode(last.message)) == msgspec.json.decode(
        msgspec.json.encode(message)
    )


def test_the_longest_head_leaves_room() -> None:
    parts = payloads(said("x" * 500_000), "f" * 16, 2**62)
    assert max(map(len, parts)) <= _BUS_PAYLOAD_BYTES_MAX


def test_senders_do_not_mix() -> None:
    reader, received = PayloadReader(), []
    ours, theirs = payloads(said("x" * 20_000), "a", 1), payloads(said("y" * 20_000), "b", 1)
    for one, other in zip(ours, theirs, strict=True):
        received += [reader.read(one), reader.read(other)]
    assert [(each.sender, bytes(each.message.data)[1:2]) for each in received if each] == [  # type: ignore[union-attr]
        ("a", b"x"),
        ("b", b"y"),
    ]


def test_a_repeated_message_is_dropped() -> None:
    reader = PayloadReader()
    (first,), (second,) = payloads(Heartbeat(1), "a", 1), payloads(Heartbeat(2), "a", 2)
    assert all(map(reader.read, (first, second)))
    assert reader.read(first) is None
    assert reader.read(second) is None


def test_messages_without_a_number_are_never_dropped() -> None:
    reader = PayloadReader()
    (first,), (late,) = payloads(Heartbeat(1), "a", 5), payloads(Heartbeat(2), "a", 0)
    assert all(map(reader.read, (first, late, late)))


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_part_loses_its_message_but_not_the_next(lost: int) -> None:
    reader = PayloadReader()
    parts = payloads(said("x" * 20_000), "a", 1)
    assert len(parts) == 3
    del parts[lost]
    assert [reader.read(part) for part in parts] == [None, None]
    assert reader.read(payloads(Heartbeat(1), "a", 2)[0])


def test_after_a_loss_parts_are_not_joined_wrongly() -> None:
    reader = PayloadReader()
    first, *rest = payloads(said("x" * 20_000), "a", 1)
    reader.read(first)
    reader.reset()
    assert [reader.read(part) for part in rest] == [None, None]


@pytest.mark.parametrize(
    "payload",
    [
        "",
        "hello",
        "1 a x 1 1 {}",
        "1 a 1 1 1 {}",
        '1 a 1 1 1 {"note":"beat"}',
        "1 a 1 1 1 " + "[" * 5000,
    ],
)
def test_an_invalid_payload_is_an_error(payload: str) -> None:
    with pytest.raises(ValueError, match=r"unpack|invalid literal|not a message of a gateway"):
        PayloadReader().read(payload)


def test_a_payload_of_another_version_is_ignored() -> None:
    assert PayloadReader().read("2 a 1 1 1 whatever") is None


def test_random_payloads_raise_only_value_errors() -> None:
    chance = random.Random(7)
    alphabet = '1 a2{}[]":,note beat'
    reader = PayloadReader()
    for _ in range(3000):
        text = "".join(chance.choice(alphabet) for _ in range(chance.randrange(40)))
        with suppress(ValueError):
            reader.read(text)


def test_memory_is_bounded() -> None:
    reader = PayloadReader()
    for number in range(_BUS_SENDERS_MAX + 50):
        reader.read(f"1 s{number} 1 1 2 half")
        reader.read(payloads(Heartbeat(1), f"t{number}", 1)[0])
    assert len(reader._parts) <= _BUS_SENDERS_MAX
    assert len(reader._last) <= _BUS_SENDERS_MAX
    part = "x" * 7_000
    for at in range(1, BUS_NOTE_BYTES_MAX // 7_000 + 3):
        reader.read(f"1 long 1 {at} 100000 {part}")
    assert "long" not in reader._parts


def test_the_tags_stay_those_of_gateways_of_earlier_versions() -> None:
    tags = [kind.__struct_config__.tag for kind in get_args(BusMessage)]
    assert tags == ["said", "step", "beat", "who", "whole", "bye", "recall", "recalled"]
