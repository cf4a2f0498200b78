"""The messages between gateways, and how they are encoded for NOTIFY.

Pure. A payload of NOTIFY is short, and in the encoding of the database, which need not be UTF-8. So
a message is JSON in ASCII, split into numbered parts. All parts are sent in one transaction, so
they arrive one after the other, and the messages of one sender arrive in order. A sender that
cannot know whether a message arrived sends it again with the same number; receivers discard the
repetition. The tags (`said`, `beat`, …) are the wire format between gateways of different versions.

Every role of the database can send NOTIFY, so each payload is signed with a key that only gateways
can read (`headwater.secret`).
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple, TypeAlias

import msgspec

from headwater.limits import BUS_NOTE_BYTES_MAX
from headwater.protocol import Member

_BUS_PAYLOAD_BYTES_MAX = 7_900
"""Bytes in one NOTIFY between gateways; PostgreSQL takes less than 8,000. More are sent in
parts."""

_BUS_SENDERS_MAX = 10_000
"""Senders whose last message number is stored. The one that sent longest ago is dropped."""


VERSION = "1"
SIGNED = "2"
_HEAD_BYTES_MAX = 100
_PART_BYTES = _BUS_PAYLOAD_BYTES_MAX - _HEAD_BYTES_MAX
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")


class _BusMessage(msgspec.Struct, frozen=True, tag_field="note", omit_defaults=True):
    pass


class Published(_BusMessage, frozen=True, tag="said"):
    """A message was published on a channel. `data` is JSON and is forwarded unchanged."""

    channel: str
    data: msgspec.Raw
    at: datetime
    user: str | None = None
    member: str | None = None


class PlacedMember(msgspec.Struct, frozen=True, array_like=True):
    """A member on a channel."""

    channel: str
    member: Member


class MembersChanged(_BusMessage, frozen=True, tag="step"):
    """The sender's members changed; `version` counts these changes. `joined` came or changed their
    state, `left` (channel and member) went."""

    version: int
    joined: tuple[PlacedMember, ...] = ()
    left: tuple[tuple[str, str], ...] = ()


class Heartbeat(_BusMessage, frozen=True, tag="beat"):
    """The sender is alive, and its members are those of this version."""

    version: int


class MembersRequest(_BusMessage, frozen=True, tag="who"):
    """Asks all gateways, or one, for all of their members."""

    to: str | None = None


class MembersSnapshot(_BusMessage, frozen=True, tag="whole"):
    """All members of the sender as of a version, in several parts if there are many."""

    version: int
    part: int
    parts: int
    members: tuple[PlacedMember, ...] = ()


class Goodbye(_BusMessage, frozen=True, tag="bye"):
    """The sender stops, and its members are gone."""


class HistoryRequest(_BusMessage, frozen=True, tag="recall"):
    """Asks a gateway for its history of a channel."""

    channel: str
    to: str


class StoredMessage(msgspec.Struct, frozen=True, array_like=True):
    """A message and its id, the same in all gateways."""

    id: str
    published: Published


class HistoryReply(_BusMessage, frozen=True, tag="recalled"):
    """The sender's history of a channel, oldest first."""

    channel: str
    to: str
    messages: tuple[StoredMessage, ...] = ()


BusMessage: TypeAlias = (
    Published
    | MembersChanged
    | Heartbeat
    | MembersRequest
    | MembersSnapshot
    | Goodbye
    | HistoryRequest
    | HistoryReply
)

_decode = msgspec.json.Decoder(BusMessage).decode


# ------------------------------------------------------------------------ writing


def payloads(message: BusMessage, sender: str, number: int) -> list[str]:
    """The payloads of a message. One without a number (0) may arrive out of order, and is sent
    only once.

    >>> payloads(Heartbeat(7), "a1", 3)
    ['1 a1 3 1 1 {"note":"beat","version":7}']
    """
    text = _ascii(msgspec.json.encode(message).decode())
    parts = [text[at : at + _PART_BYTES] for at in range(0, len(text), _PART_BYTES)]
    head = f"{VERSION} {sender} {number}"
    return [f"{head} {i} {len(parts)} {part}" for i, part in enumerate(parts, 1)]


def _ascii(text: str) -> str:
    """JSON without characters that the database's encoding may lack. They occur in strings only.

    >>> _ascii('{"ä": "😀"}')
    '{"\\\\u00e4": "\\\\ud83d\\\\ude00"}'
    """
    return _NOT_ASCII.sub(lambda found: "".join(_escaped(found[0])), text)


def _escaped(letters: str) -> Iterator[str]:
    units = letters.encode("utf-16-be")
    return (f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def signed(payload: str, key: bytes) -> str:
    """A payload with its signature, which needs the key.

    >>> opened(signed("1 a1 3 1 1 {}", b"k"), b"k")
    '1 a1 3 1 1 {}'
    """
    return f"{SIGNED} {_signature(payload, key)} {payload}"


def _signature(payload: str, key: bytes) -> str:
    return hmac.digest(key, payload.encode(), "sha256")[:16].hex()


# ------------------------------------------------------------------------ reading


def opened(text: str, key: bytes) -> str:
    """The payload; ValueError for one that was not signed with the key."""
    head, _, rest = text.partition(" ")
    signature, _, payload = rest.partition(" ")
    if head != SIGNED or not hmac.compare_digest(
        signature.encode(), _signature(payload, key).encode()
    ):
        raise ValueError("not signed by a gateway of this database")
    return payload


class Received(NamedTuple):
    """A message, its sender, and its id, which is the same at all gateways."""

    sender: str
    id: str
    message: BusMessage


class _Parts:
    def __init__(self, number: int) -> None:
        self.number = number
        self.texts: list[str] = []
        self.size = 0


class PayloadReader:
    """Joins the parts of messages. ValueError for an invalid payload; a part that fits nowhere is
    discarded."""

    def __init__(self) -> None:
        self._parts: dict[str, _Parts] = {}
        self._last: dict[str, int] = {}

    def reset(self) -> None:
        """Payloads may have been missed: discard incomplete messages."""
        self._parts.clear()

    def read(self, payload: str) -> Received | None:
        """The message that this payload completes, if any."""
        version, sender, number, part, parts, text = _split(payload)
        if version != VERSION or (number and number <= self._last.get(sender, 0)):
            return None
        whole = self._joined(sender, number, part, parts, text)
        if whole is None:
            return None
        try:
            message: BusMessage = _decode(whole)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"not a message of a gateway: {error}") from None
        if number:
            self._remember(sender, number)
        return Received(sender, f"{sender}:{number}", message)

    def _joined(self, sender: str, number: int, part: int, parts: int, text: str) -> str | None:
        if part == 1:
            self._parts[sender] = _Parts(number)
            while len(self._parts) > _BUS_SENDERS_MAX:
                del self._parts[next(iter(self._parts))]
        begun = self._parts.get(sender)
        if begun is None or begun.number != number or part != len(begun.texts) + 1:
            self._parts.pop(sender, None)
            return None
        begun.texts.append(text)
        begun.size += len(text)
        if part < parts and begun.size <= BUS_NOTE_BYTES_MAX:
            return None
        del self._parts[sender]
        return "".join(begun.texts) if part == parts else None

    def _remember(self, sender: str, number: int) -> None:
        self._last.pop(sender, None)
        self._last[sender] = number
        while len(self._last) > _BUS_SENDERS_MAX:
            del self._last[next(iter(self._last))]


def _split(payload: str) -> tuple[str, str, int, int, int, str]:
    version, sender, number, part, parts, text = payload.split(" ", 5)
    return version, sender, int(number), int(part), int(parts), text
