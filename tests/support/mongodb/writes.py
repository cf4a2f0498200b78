"""Inserts, updates and deletes of the stand-in, and transactions.

A transaction sees its own writes, holds the documents that it wrote, and is one entry of the oplog.
A write to a document that another transaction holds fails with WriteConflict; a real server lets a
write outside a transaction wait instead.
"""

from __future__ import annotations

from typing import Any

from tests.support.mongodb.events import Failure
from tests.support.mongodb.matching import matches
from tests.support.mongodb.ordering import order
from tests.support.mongodb.shaping import updated
from tests.support.mongodb.storage import Collection, Operation, Storage

Key = tuple[str, str, Any]


class Transaction:
    """The writes of one statement or of one transaction, before they are committed."""

    def __init__(self, storage: Storage, others: list[Transaction]) -> None:
        self._storage, self._others = storage, others
        self.operations: list[Operation] = []
        self.written: dict[Key, dict[str, Any] | None] = {}
        self._created: dict[tuple[str, str], Collection] = {}

    def find(self, db: str, coll: str, condition: dict[str, Any]) -> list[dict[str, Any]]:
        """The documents that match, in the order of their keys, with this transaction's writes."""
        collection = self._storage.collections.get((db, coll))
        documents = dict(collection.documents) if collection else {}
        for (db_, coll_, key), document in self.written.items():
            if (db_, coll_) == (db, coll):
                documents.pop(key, None)
                if document is not None:
                    documents[key] = document
        return [documents[k] for k in sorted(documents) if matches(documents[k], condition)]

    def insert(self, db: str, coll: str, document: dict[str, Any]) -> None:
        if self._present(db, coll, document["_id"]) is not None:
            raise Failure(11000, f"E11000 duplicate key error: {document['_id']!r}")
        if self._collection(db, coll) is None:
            self._created[db, coll] = Collection({})
            self.operations.append({"kind": "create", "db": db, "coll": coll, "options": {}})
        self._write("insert", db, coll, None, document)

    def update(self, db: str, coll: str, statement: dict[str, Any]) -> tuple[int, int, Any]:
        """How many matched, how many changed, and the `_id` of an upsert."""
        found = self.find(db, coll, statement["q"])
        change, changed = statement["u"], 0
        replaces = not any(name.startswith("$") for name in change)
        for before in found if statement.get("multi") else found[:1]:
            after = updated(before, change)
            if after != before or list(after) != list(before):
                self._write("replace" if replaces else "update", db, coll, before, after)
                changed += 1
        if not found and statement.get("upsert"):
            document = updated({"_id": statement["q"]["_id"]}, change)
            self.insert(db, coll, document)
            return 1, 0, document["_id"]
        return len(found if statement.get("multi") else found[:1]), changed, None

    def delete(self, db: str, coll: str, condition: dict[str, Any], limit: int) -> int:
        found = self.find(db, coll, condition)
        found = found[:limit] if limit else found
        for before in found:
            self._write("delete", db, coll, before, None)
        return len(found)

    def _present(self, db: str, coll: str, identifier: Any) -> dict[str, Any] | None:
        key = order(identifier)
        if (db, coll, key) in self.written:
            return self.written[db, coll, key]
        collection = self._storage.collections.get((db, coll))
        return collection.documents.get(key) if collection else None

    def _collection(self, db: str, coll: str) -> Collection | None:
        return self._storage.collections.get((db, coll)) or self._created.get((db, coll))

    def _write(self, kind: str, db: str, coll: str, before: Any, after: Any) -> None:
        identifier = (after or before)["_id"]
        key = (db, coll, order(identifier))
        if any(key in other.written for other in self._others if other is not self):
            raise Failure(112, "WriteConflict", "TransientTransactionError")
        collection = self._collection(db, coll)
        self.written[key] = after
        self.operations.append(
            {
                "kind": kind, "db": db, "coll": coll, "id": identifier, "before": before,
                "after": after, "images": collection is not None and collection.images,
            }
        )  # fmt: skip
