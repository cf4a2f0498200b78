"""The stand-in's data: collections in memory, and the oplog from which they can be built again.

Every commit is one entry of the oplog with a cluster time of its own, written to a file before it
is visible. A transaction is one entry with several operations.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import bson
from bson.binary import Binary
from bson.timestamp import Timestamp

from tests.support.mongodb.ordering import order
from tests.support.mongodb.wire import CODEC

Operation = dict[str, Any]
"""`kind` (as in change events), `db`, `coll`, and `id`, `before`, `after`, `to` or `options`."""


class Collection:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.uuid = Binary(uuid.uuid4().bytes, 4)
        self.documents: dict[Any, dict[str, Any]] = {}

    @property
    def images(self) -> bool:
        return bool(self.options.get("changeStreamPreAndPostImages", {}).get("enabled"))

    def sorted(self) -> list[dict[str, Any]]:
        return [self.documents[key] for key in sorted(self.documents)]


class Storage:
    def __init__(self, path: Path) -> None:
        self.collections: dict[tuple[str, str], Collection] = {}
        self.oplog: list[dict[str, Any]] = []
        self.lost: Timestamp | None = None
        self.last = Timestamp(1, 1)
        self._file: BinaryIO = self._opened(path)
        if not self.oplog:
            self.commit([{"kind": "noop"}])

    def _opened(self, path: Path) -> BinaryIO:
        if path.exists():
            with path.open("rb") as file:
                for entry in bson.decode_file_iter(file, CODEC):
                    self._replay(entry)
        return path.open("ab", buffering=0)

    def _replay(self, entry: dict[str, Any]) -> None:
        if "truncated" in entry:
            self._forget()
        else:
            self._apply(entry)

    def commit(
        self, operations: list[Operation], transaction: dict[str, Any] | None = None
    ) -> None:
        entry = {
            "ts": self._next_time(),
            "wall": int(time.time() * 1000),
            "operations": operations,
            **(transaction or {}),
        }
        self._file.write(bson.encode(entry, codec_options=CODEC))
        self._apply(entry)

    def _next_time(self) -> Timestamp:
        seconds = max(int(time.time()), self.last.time)
        return Timestamp(seconds, self.last.inc + 1 if seconds == self.last.time else 1)

    def _apply(self, entry: dict[str, Any]) -> None:
        for operation in entry["operations"]:
            self._apply_one(operation)
        self.last = entry["ts"]
        self.oplog.append(entry)

    def _apply_one(self, operation: Operation) -> None:
        name = operation.get("db", ""), operation.get("coll", "")
        match operation["kind"]:
            case "insert" | "update" | "replace":
                self.collections[name].documents[order(operation["id"])] = operation["after"]
            case "delete":
                self.collections[name].documents.pop(order(operation["id"]), None)
            case "create":
                self.collections[name] = Collection(operation["options"])
            case "modify":
                self.collections[name].options |= operation["options"]
            case "drop":
                self.collections.pop(name, None)
            case "rename":
                self.collections[name[0], operation["to"]] = self.collections.pop(name)

    def truncate_oplog(self) -> None:
        """Forget all entries but the last, as a full oplog does."""
        self._file.write(bson.encode({"truncated": True}))
        self._forget()

    def _forget(self) -> None:
        if len(self.oplog) > 1:
            self.lost = self.oplog[-2]["ts"]
        del self.oplog[:-1]

    def entries(self, start: Timestamp) -> Iterator[dict[str, Any]]:
        """Those from this time on."""
        low = len(self.oplog)
        while low and self.oplog[low - 1]["ts"] >= start:
            low -= 1
        return iter(self.oplog[low:])

    def close(self) -> None:
        self._file.close()
