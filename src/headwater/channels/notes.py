"""What gateways say to each other, and how it is written so that NOTIFY can carry it.

Pure. A payload of NOTIFY is short, and in the encoding of the database, which need not be UTF-8: so
a note is JSON in ASCII, in as many numbered parts as it takes. All parts of a note are sent in one
transaction, so they arrive one after the other, and a sender's notes in order. A note that comes
again because its sender could not know that it had arrived bears the same number, and is left out.

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

from headwater.limits import BUS_NOTE_BYTES_MAX, BUS_PAYLOAD_BYTES_MAX, BUS_SENDERS_MAX
from headwater.protocol import Member

VERSION = "1"
SIGNED = "2"
_HEAD_BYTES_MAX = 100
_PART_BYTES = BUS_PAYLOAD_BYTES_MAX - _HEAD_BYTES_MAX
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")


class _Note(msgspec.Struct, frozen=True, tag_field="note", tag=str.lower, omit_defaults=True):
    pass


class Said(_Note, frozen=True):
    """Something was published on a channel. `data` is JSON, and goes on as it is."""

    channel: str
    data: msgspec.Raw
    at: datetime
    user: str | None = None
    member: str | None = None


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """A member on a channel."""

    channel: str
    member: Member


class Step(_Note, frozen=True):
    """The sender's members changed, for the `version`th time: these came or have another state,
    those, by channel and member, left."""

    version: int
    joined: tuple[Placed, ...] = ()
    left: tuple[tuple[str, str], ...] = ()


class Beat(_Note, frozen=True):
    """The sender is there, and its members are those of this version."""

    version: int


class Who(_Note, frozen=True):
    """Tell all your members; everybody, or one."""

    to: str | None = None


class Whole(_Note, frozen=True):
    """All members of the sender as of a version, in several parts if there are many."""

    version: int
    part: int
    parts: int
    members: tuple[Placed, ...] = ()


class Bye(_Note, frozen=True):
    """The sender stops, and its members are gone."""


class Recall(_Note, frozen=True):
    """Tell what you remember of a channel."""

    channel: str
    to: str


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """A message and its id, the same in all gateways."""

    id: str
    said: Said


class Recalled(_Note, frozen=True):
    """What the sender remembers of a channel, oldest first."""

    channel: str
    to: str
    messages: tuple[Kept, ...] = ()


Note: TypeAlias = Said | Step | Beat | Who | Whole | Bye | Recall | Recalled

_decode = msgspec.json.Decoder(Note).decode


# ------------------------------------------------------------------------ writing


def payloads(note: Note, sender: str, number: int) -> list[str]:
    """A note as NOTIFY carries it. Without a number (0) it may come out of order, and only once.

    >>> payloads(Beat(7), "a1", 3)
    ['1 a1 3 1 1 {"note":"beat","version":7}']
    """
    text = _ascii(msgspec.json.encode(note).decode())
    parts = [text[at : at + _PART_BYTES] for at in range(0, len(text), _PART_BYTES)]
    head = f"{VERSION} {sender} {number}"
    return [f"{head} {i} {len(parts)} {part}" for i, part in enumerate(parts, 1)]


def _ascii(text: str) -> str:
    """JSON without letters that the database may not have. They stand in texts only.

    >>> _ascii('{"ä": "😀"}')
    '{"\\\\u00e4": "\\\\ud83d\\\\ude00"}'
    """
    return _NOT_ASCII.sub(lambda found: "".join(_escaped(found[0])), text)


def _escaped(letters: str) -> Iterator[str]:
    units = letters.encode("utf-16-be")
    return (f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def signed(payload: str, key: bytes) -> str:
    """A payload with what only those can compute who have the key.

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


class Heard(NamedTuple):
    """A note, who sent it, and an id of its own that is the same for all who hear it."""

    sender: str
    id: str
    note: Note


class _Parts:
    def __init__(self, number: int) -> None:
        self.number = number
        self.texts: list[str] = []
        self.size = 0


class Reader:
    """Puts the parts together. What is no payload is a ValueError, and a part that fits nowhere is
    left out."""

    def __init__(self) -> None:
        self._parts: dict[str, _Parts] = {}
        self._last: dict[str, int] = {}

    def reset(self) -> None:
        """Something may have been missed: what has begun will not be finished."""
        self._parts.clear()

    def read(self, payload: str) -> Heard | None:
        """The note that is complete with this payload, if it is."""
        version, sender, number, part, parts, text = _split(payload)
        if version != VERSION or (number and number <= self._last.get(sender, 0)):
            return None
        whole = self._joined(sender, number, part, parts, text)
        if whole is None:
            return None
        try:
            note: Note = _decode(whole)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"not a note: {error}") from None
        if number:
            self._remember(sender, number)
        return Heard(sender, f"{sender}:{number}", note)

    def _joined(self, sender: str, number: int, part: int, parts: int, text: str) -> str | None:
        if part == 1:
            self._parts[sender] = _Parts(number)
            while len(self._parts) > BUS_SENDERS_MAX:
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
        while len(self._last) > BUS_SENDERS_MAX:
            del self._last[next(iter(self._last))]


def _split(payload: str) -> tuple[str, str, int, int, int, str]:
    version, sender, number, part, parts, text = payload.split(" ", 5)
    return version, sender, int(number), int(part), int(parts), text
