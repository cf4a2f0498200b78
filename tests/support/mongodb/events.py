"""Change streams of the stand-in: the oplog's operations as events, with resume tokens.

Tokens have MongoDB's own form: a timestamp, a version, the type (128 for an event, 0 for a time at
which nothing happened), the number of the operation in its transaction, and whether the event is
`invalidate`. Their texts order as the events do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import bson
from bson.datetime_ms import DatetimeMS
from bson.timestamp import Timestamp

from tests.support.mongodb.matching import Unsupported, matches
from tests.support.mongodb.ordering import order
from tests.support.mongodb.shaping import add_fields, project, without
from tests.support.mongodb.storage import Operation, Storage
from tests.support.mongodb.wire import CODEC

REPLY_BYTES = 16_000_000
_ROWS = ("insert", "update", "replace", "delete")


class Failure(Exception):
    def __init__(self, code: int, message: str, label: str | None = None) -> None:
        super().__init__(message)
        self.code, self.label = code, label


# ------------------------------------------------------------------------ tokens


def _integer(number: int) -> str:
    if number == 0:
        return "29"
    size = ((number << 1).bit_length() + 7) // 8
    return f"{0x2A + size:02X}{number << 1:0{2 * size}X}"


def time_token(time: Timestamp) -> dict[str, str]:
    return {"_data": f"82{time.time:08X}{time.inc:08X}2B0429296E1404"}


def event_token(time: Timestamp, number: int, invalidate: bool) -> dict[str, str]:
    flag = "6F" if invalidate else "6E"
    start = f"82{time.time:08X}{time.inc:08X}2B042C0100{_integer(number)}{flag}"
    return {"_data": f"{start}5A1004{number:032X}04"}


_TOKEN = re.compile(
    r"82(.{8})(.{8})2B04(?:29296E1404|2C0100(29|2B..|2C.{4}|2D.{6})(6E|6F)5A1004.{32}04)"
)


def _parsed(token: dict[str, str]) -> tuple[Timestamp, int | None, bool]:
    match = _TOKEN.fullmatch(token["_data"])
    if match is None:
        raise Failure(260, "Bad resume token")
    time = Timestamp(int(match[1], 16), int(match[2], 16))
    if match[3] is None:
        return time, None, False
    return time, int(match[3][2:] or "0", 16) >> 1, match[4] == "6F"


# ------------------------------------------------------------------------ the stream


class ChangeCursor:
    """A change stream: `_time` and `_number` are the operation to look at next, `_sent` that
    only its invalidation is left."""

    def __init__(
        self, storage: Storage, db: str, coll: str | None, pipeline: list[Any], split_bytes: int
    ) -> None:
        self._storage, self._db, self._coll = storage, db, coll
        self._options, self._stages = pipeline[0]["$changeStream"], pipeline[1:]
        self._split_bytes = split_bytes
        self._pending: list[dict[str, Any]] = []
        self.invalidated = False
        self._sent = False
        self._time, self._number = self._start()
        self.token = self._given_token() or time_token(self._time)

    def _given_token(self) -> Any:
        return self._options.get("startAfter") or self._options.get("resumeAfter")

    def _start(self) -> tuple[Timestamp, int]:
        options = self._options
        if at := options.get("startAtOperationTime"):
            return self._checked(at), 0
        token = self._given_token()
        if token is None:
            return Timestamp(self._storage.last.time, self._storage.last.inc + 1), 0
        time, number, invalidate = _parsed(token)
        self._checked(time)
        if number is None:
            return time, 0
        if invalidate and "startAfter" not in options:
            raise Failure(260, "Attempting to resume a change stream using 'resumeAfter' is not"
                               " allowed from an invalidate notification.")  # fmt: skip
        entry = next(self._storage.entries(time), None)
        if entry is None or entry["ts"] != time or number >= len(entry["operations"]):
            raise Failure(280, "cannot resume stream; the resume token was not found.")
        if self._invalidates(entry["operations"][number]) and not invalidate:
            self._sent = True
            return time, number
        return time, number + 1

    def _checked(self, time: Timestamp) -> Timestamp:
        if self._storage.lost is not None and time <= self._storage.lost:
            raise Failure(286, "Resume of change stream was not possible, as the resume point may"
                               " no longer be in the oplog.")  # fmt: skip
        return time

    def batch(self, size: int) -> list[dict[str, Any]]:
        """At most this many events. `token` is then from where the stream continues."""
        found, total = list[dict[str, Any]](), 0
        for event in self._events():
            length = len(bson.encode(event, codec_options=CODEC))
            if found and (len(found) == size or total + length > REPLY_BYTES):
                self._pending.insert(0, event)
                return found
            found.append(event)
            total += length
            self.token = event["_id"]
        if not self.invalidated:
            self._reached_the_end()
        return found

    def has_events(self) -> bool:
        found = self.batch(1)
        self._pending[:0] = found
        return bool(found)

    @property
    def over(self) -> bool:
        return self.invalidated and not self._pending

    def _reached_the_end(self) -> None:
        last = self._storage.last
        if time_token(last)["_data"][:18] > self.token["_data"][:18]:
            self.token = time_token(last)

    def _events(self) -> Iterator[dict[str, Any]]:
        while self._pending:
            yield self._pending.pop(0)
        if self.invalidated:
            return
        self._checked(self._time)
        for entry in list(self._storage.entries(self._time)):
            first = self._number if entry["ts"] == self._time else 0
            for number in range(first, len(entry["operations"])):
                self._time, self._number = entry["ts"], number + 1
                self._pending += self._of_operation(entry, number)
                while self._pending:
                    yield self._pending.pop(0)
                if self.invalidated:
                    return
            self._time, self._number = Timestamp(entry["ts"].time, entry["ts"].inc + 1), 0

    def _of_operation(self, entry: dict[str, Any], number: int) -> list[dict[str, Any]]:
        operation = entry["operations"][number]
        sent, self._sent = self._sent, False
        events = [] if sent else self._shaped(self._raw(entry, number, operation))
        if self._invalidates(operation):
            self.invalidated = True
            events += self._shaped(self._invalidate(entry, number))
        return events

    def _raw(
        self, entry: dict[str, Any], number: int, operation: Operation
    ) -> dict[str, Any] | None:
        if not self._watches(operation):
            return None
        event = {
            "_id": event_token(entry["ts"], number, False),
            "operationType": operation["kind"],
            "clusterTime": entry["ts"],
            "wallTime": DatetimeMS(entry["wall"]),
            "ns": {"db": operation["db"], "coll": operation.get("coll")},
        }
        if "txnNumber" in entry:
            event |= {"lsid": entry["lsid"], "txnNumber": entry["txnNumber"]}
        if operation["kind"] == "rename":
            event["to"] = {"db": operation["db"], "coll": operation["to"]}
        if operation["kind"] in _ROWS:
            event["documentKey"] = {"_id": operation["id"]}
            event |= self._documents(operation)
        return event

    def _watches(self, operation: Operation) -> bool:
        kind = operation["kind"]
        if kind in ("noop", "modify") or operation["db"] != self._db:
            return False
        if kind == "create" and not self._options.get("showExpandedEvents"):
            return False
        return self._coll in (None, operation.get("coll"))

    def _invalidates(self, operation: Operation) -> bool:
        if operation["kind"] == "dropDatabase":
            return bool(operation["db"] == self._db)
        if operation["kind"] not in ("drop", "rename") or self._coll is None:
            return False
        return (operation["db"], operation["coll"]) == (self._db, self._coll)

    def _documents(self, operation: Operation) -> dict[str, Any]:
        found: dict[str, Any] = {}
        kind, images = operation["kind"], operation.get("images", False)
        if kind in ("insert", "replace"):
            found["fullDocument"] = operation["after"]
        elif kind == "update":
            found["updateDescription"] = {"updatedFields": operation["after"]}
            match self._options.get("fullDocument"):
                case "updateLookup":
                    found["fullDocument"] = self._look_up(operation)
                case "whenAvailable":
                    found["fullDocument"] = operation["after"] if images else None
        if "fullDocumentBeforeChange" in self._options and kind != "insert":
            found["fullDocumentBeforeChange"] = operation["before"] if images else None
        return found

    def _look_up(self, operation: Operation) -> Any:
        """As it is now, which may be later than the change."""
        collection = self._storage.collections.get((operation["db"], operation["coll"]))
        return None if collection is None else collection.documents.get(order(operation["id"]))

    def _invalidate(self, entry: dict[str, Any], number: int) -> dict[str, Any]:
        return {
            "_id": event_token(entry["ts"], number, True),
            "operationType": "invalidate",
            "clusterTime": entry["ts"],
            "wallTime": DatetimeMS(entry["wall"]),
        }

    def _shaped(self, event: dict[str, Any] | None) -> list[dict[str, Any]]:
        *stages, last = self._stages
        splits = "$changeStreamSplitLargeEvent" in last
        event = shaped(event, stages if splits else self._stages)
        if event is None:
            return []
        size = len(bson.encode(event, codec_options=CODEC))
        if size <= self._split_bytes:
            return [event]
        if not splits:
            raise Failure(10334, f"BSONObj size: {size} is invalid. Size must be between 0 and"
                                 f" {self._split_bytes}")  # fmt: skip
        return _split(event)


def shaped(event: dict[str, Any] | None, stages: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The event after these stages; None if one of them holds it back."""
    for stage in stages:
        if event is None:
            return None
        ((name, argument),) = stage.items()
        match name:
            case "$match":
                event = event if matches(event, argument) else None
            case "$addFields":
                event = add_fields(event, argument)
            case "$project":
                event = project(event, argument)
            case "$unset":
                event = without(event, [argument] if isinstance(argument, str) else argument)
            case _:
                raise Unsupported(name)
    return event


def _split(event: dict[str, Any]) -> list[dict[str, Any]]:
    """One fragment for each of the large fields, and the small ones in the first."""
    large = [name for name, value in event.items() if isinstance(value, dict) and name[0] in "fdb"
             and name != "documentKey"]  # fmt: skip
    small = {name: value for name, value in event.items() if name not in large}
    parts = [small | {large[0]: event[large[0]]}] if large else [small]
    parts += [{"_id": event["_id"], name: event[name]} for name in large[1:]]
    for number, part in enumerate(parts, 1):
        part["splitEvent"] = {"fragment": number, "of": len(parts)}
    return parts
