"""The stand-in server: `python -m tests.support.mongodb.server --port 27017 --data FILE`.

See the package for what it is and what it cannot prove. It prints `ready` when it accepts
connections, and ends with its standard input. `--standalone` makes it a server without a replica
set, `--router` one that says that it is the router of a sharded cluster, `--version` another
version, `--split-bytes` the size above which an event is split. The commands `configureFailPoint`
(only `failCommand`) and `standInTruncateOplog` let tests break it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from pathlib import Path
from typing import Any

from bson.int64 import Int64
from bson.timestamp import Timestamp

from tests.support.mongodb.events import REPLY_BYTES, ChangeCursor, Failure
from tests.support.mongodb.matching import Unsupported, matches
from tests.support.mongodb.ordering import order
from tests.support.mongodb.shaping import project
from tests.support.mongodb.storage import Storage
from tests.support.mongodb.wire import Request, read_request, reply
from tests.support.mongodb.writes import Transaction

Body = dict[str, Any]


class FindCursor:
    """The documents that were found when it was opened."""

    def __init__(self, documents: list[Body], read_at: Timestamp | None) -> None:
        self.documents, self.read_at = documents, read_at


class Server:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._storage = Storage(arguments.data)
        self._cursors: dict[int, FindCursor | ChangeCursor] = {}
        self._names: dict[int, str] = {}
        self._numbers = itertools.count(1)
        self._transactions: dict[tuple[bytes, int], Transaction] = {}
        self._written = asyncio.Condition()
        self._failure: Body | None = None

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = next(self._numbers)
        try:
            while request := await read_request(reader):
                document = await self._answer(request, connection)
                if request.answered:
                    writer.write(reply(request, document))
                    await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def _answer(self, request: Request, connection: int) -> Body:
        name = next(iter(request.body))
        before = self._storage.last
        try:
            self._fail_if_asked(name)
            document = await self._run(name, request.body, connection) | {"ok": 1.0}
        except Failure as error:
            document = {"ok": 0.0, "errmsg": str(error), "code": error.code, "codeName": "Failure"}
            document |= {"errorLabels": [error.label]} if error.label else {}
        except Unsupported as error:
            document = {"ok": 0.0, "errmsg": f"the stand-in has no {error}", "code": 9}
        if self._storage.last != before:
            async with self._written:
                self._written.notify_all()
        if not self._arguments.standalone:
            document |= {"operationTime": self._storage.last, "$clusterTime": self._cluster_time()}
        return document

    def _cluster_time(self) -> Body:
        signature = {"hash": b"\0" * 20, "keyId": Int64(0)}
        return {"clusterTime": self._storage.last, "signature": signature}

    def _fail_if_asked(self, name: str) -> None:
        if self._failure is None or name not in self._failure["data"]["failCommands"]:
            return
        failure, mode = self._failure, self._failure["mode"]
        if mode != "alwaysOn":
            mode["times"] -= 1
            if not mode["times"]:
                self._failure = None
        raise Failure(failure["data"]["errorCode"], failure["data"].get("errmsg", "as requested"))

    async def _run(self, name: str, body: Body, connection: int) -> Body:
        match name:
            case "hello" | "isMaster" | "ismaster":
                return self._hello(connection)
            case "buildInfo" | "buildinfo":
                version = self._arguments.version
                return {"version": version, "versionArray": [*map(int, version.split(".")), 0]}
            case "ping" | "endSessions":
                return {}
            case "saslStart":
                raise Failure(18, "Authentication failed.")
            case "getMore":
                return await self._get_more(body)
            case "find" | "aggregate" | "listCollections" | "killCursors":
                return self._read(name, body)
            case "insert" | "update" | "delete":
                return self._write(name, body)
            case "commitTransaction" | "abortTransaction":
                return self._finish(name, body)
        return self._administer(name, body)

    def _hello(self, connection: int) -> Body:
        document: Body = {
            "isWritablePrimary": True, "ismaster": True, "helloOk": True, "readOnly": False,
            "maxBsonObjectSize": 16_777_216, "maxMessageSizeBytes": 48_000_000,
            "maxWriteBatchSize": 100_000, "minWireVersion": 0, "maxWireVersion": 21,
            "connectionId": connection,
        }  # fmt: skip
        if self._arguments.standalone:
            return document
        if self._arguments.router:
            return document | {"msg": "isdbgrid", "logicalSessionTimeoutMinutes": 30}
        me = f"127.0.0.1:{self._arguments.port}"
        return document | {
            "setName": "standin", "setVersion": 1, "secondary": False, "hosts": [me], "me": me,
            "primary": me, "logicalSessionTimeoutMinutes": 30,
        }  # fmt: skip

    # -------------------------------------------------------------------- reads

    def _read(self, name: str, body: Body) -> Body:
        match name:
            case "find":
                return self._find(body)
            case "aggregate":
                return self._aggregate(body)
            case "killCursors":
                killed = [number for number in body["cursors"] if self._cursors.pop(number, None)]
                return {"cursorsKilled": killed}
        return self._first(FindCursor(self._collections(body), None), body, "$cmd.listCollections")

    def _collections(self, body: Body) -> list[Body]:
        found = [
            {"name": coll, "type": collection.options.get("type", "collection"),
             "options": collection.options, "info": {"uuid": collection.uuid}}
            for (db, coll), collection in self._storage.collections.items()
            if db == body["$db"]
        ]  # fmt: skip
        return [entry for entry in found if matches(entry, body.get("filter") or {})]

    def _find(self, body: Body) -> Body:
        documents = self._documents(body)
        documents = documents[: body.get("limit") or None]
        shaped = [project(document, body.get("projection")) for document in documents]
        snapshot = body.get("readConcern", {}).get("level") == "snapshot"
        cursor = FindCursor(shaped, self._storage.last if snapshot else None)
        return self._first(cursor, body | {"cursor": body}, body["find"])

    def _documents(self, body: Body) -> list[Body]:
        if (body["$db"], body["find"]) == ("local", "oplog.rs"):
            entries = [{"ts": entry["ts"]} for entry in self._storage.oplog]
            return entries if body["sort"]["$natural"] > 0 else entries[::-1]
        transaction = self._transaction(body) or Transaction(self._storage, [])
        found = transaction.find(body["$db"], body["find"], body.get("filter") or {})
        if "min" in body:
            assert body["hint"] == {"_id": 1}, "min needs the hint of its index"
            low = order(body["min"]["_id"])
            found = [document for document in found if order(document["_id"]) >= low]
        return found

    def _aggregate(self, body: Body) -> Body:
        if "$changeStream" not in body["pipeline"][0]:
            raise Unsupported("aggregate without $changeStream")
        if self._arguments.standalone:
            raise Failure(40573, "The $changeStream stage is only supported on replica sets")
        coll = body["aggregate"] if isinstance(body["aggregate"], str) else None
        cursor = ChangeCursor(
            self._storage, body["$db"], coll, body["pipeline"], self._arguments.split_bytes
        )
        return self._first(cursor, body, coll or "$cmd.aggregate")

    def _first(self, cursor: FindCursor | ChangeCursor, body: Body, name: str) -> Body:
        number = next(self._numbers) << 32
        self._cursors[number], self._names[number] = cursor, f"{body['$db']}.{name}"
        size = (body.get("cursor") or {}).get("batchSize", 101)
        return self._batch(number, "firstBatch", size)

    async def _get_more(self, body: Body) -> Body:
        number = body["getMore"]
        cursor = self._cursors.get(number)
        if cursor is None:
            raise Failure(43, f"cursor id {number} not found")
        size = body.get("batchSize", 1_000_000)
        answer = self._batch(number, "nextBatch", size)
        if isinstance(cursor, ChangeCursor) and not answer["cursor"]["nextBatch"]:
            await self._wait(body.get("maxTimeMS", 1000) / 1000, cursor)
            if number not in self._cursors:
                raise Failure(43, f"cursor id {number} not found")
            answer = self._batch(number, "nextBatch", size)
        return answer

    async def _wait(self, seconds: float, cursor: ChangeCursor) -> None:
        """Until there is an event for this stream, or this long. Others' writes wake it."""
        try:
            async with asyncio.timeout(seconds), self._written:
                await self._written.wait_for(cursor.has_events)
        except TimeoutError:
            pass

    def _batch(self, number: int, field: str, size: int) -> Body:
        cursor = self._cursors[number]
        document: Body = {"id": Int64(number), "ns": self._names[number]}
        if isinstance(cursor, ChangeCursor):
            document[field] = cursor.batch(size)
            document["postBatchResumeToken"] = cursor.token
            over = cursor.over
        else:
            document[field], cursor.documents = _cut(cursor.documents, size)
            document |= {"atClusterTime": cursor.read_at} if cursor.read_at else {}
            over = not cursor.documents
        if over:
            del self._cursors[number]
            document["id"] = Int64(0)
        return {"cursor": document}

    # -------------------------------------------------------------------- writes

    def _transaction(self, body: Body) -> Transaction | None:
        if body.get("autocommit") is not False:
            return None
        key = bytes(body["lsid"]["id"]), int(body["txnNumber"])
        if body.get("startTransaction"):
            self._transactions[key] = Transaction(self._storage, self._open())
        if key not in self._transactions:
            raise Failure(251, "no such transaction", "TransientTransactionError")
        return self._transactions[key]

    def _open(self) -> list[Transaction]:
        """The open transactions, also those that begin later."""
        return _Values(self._transactions)

    def _write(self, name: str, body: Body) -> Body:
        statements = body.get("documents") or body.get("updates") or body.get("deletes") or []
        transaction = self._transaction(body)
        totals: Body = {"n": 0}
        for number, statement in enumerate(statements):
            try:
                self._statement(name, body, statement, transaction, totals, number)
            except Failure as error:
                if error.label or transaction is not None:
                    raise
                problem = {"index": number, "code": error.code, "errmsg": str(error)}
                return totals | {"writeErrors": [problem]}
        return totals

    def _statement(
        self, name: str, body: Body, statement: Body, transaction: Transaction | None,
        totals: Body, number: int,
    ) -> None:  # fmt: skip
        current = transaction or Transaction(self._storage, self._open())
        db, coll = body["$db"], body[name]
        match name:
            case "insert":
                current.insert(db, coll, statement)
                totals["n"] += 1
            case "update":
                matched, changed, upserted = current.update(db, coll, statement)
                totals["n"] += matched
                totals["nModified"] = totals.get("nModified", 0) + changed
                if upserted is not None:
                    totals.setdefault("upserted", []).append({"index": number, "_id": upserted})
            case "delete":
                totals["n"] += current.delete(db, coll, statement["q"], statement["limit"])
        if transaction is None:
            for operation in current.operations:
                self._storage.commit([operation])

    def _finish(self, name: str, body: Body) -> Body:
        key = bytes(body["lsid"]["id"]), int(body["txnNumber"])
        transaction = self._transactions.pop(key, None)
        if transaction is None:
            raise Failure(251, "no such transaction")
        if name == "commitTransaction" and transaction.operations:
            identity = {"lsid": body["lsid"] | {"uid": b"\0" * 32}, "txnNumber": Int64(key[1])}
            self._storage.commit(transaction.operations, identity)
        return {}

    # -------------------------------------------------------------------- administration

    def _administer(self, name: str, body: Body) -> Body:
        db, storage = body["$db"], self._storage
        match name:
            case "create":
                options = {k: v for k, v in body.items() if k in _OPTIONS}
                if (db, body["create"]) in storage.collections:
                    raise Failure(48, "Collection already exists")
                self._one("create", db, body["create"], options=options)
            case "collMod":
                options = {k: v for k, v in body.items() if k in _OPTIONS}
                self._one("modify", db, body["collMod"], options=options)
            case "drop":
                if (db, body["drop"]) in storage.collections:
                    self._one("drop", db, body["drop"])
            case "dropDatabase":
                for coll in [coll for db_, coll in storage.collections if db_ == db]:
                    self._one("drop", db, coll)
                self._one("dropDatabase", db, None)
            case "renameCollection":
                self._rename(body)
            case "appendOplogNote":
                storage.commit([{"kind": "noop"}])
            case "configureFailPoint":
                self._failure = None if body["mode"] == "off" else body
            case "standInTruncateOplog":
                storage.commit([{"kind": "noop"}])
                storage.truncate_oplog()
            case _:
                raise Failure(59, f"no such command: '{name}'")
        return {}

    def _rename(self, body: Body) -> None:
        db, _, coll = body["renameCollection"].partition(".")
        to = body["to"].partition(".")[2]
        if (db, to) in self._storage.collections and not body.get("dropTarget"):
            raise Failure(48, "target namespace exists")
        self._one("rename", db, coll, to=to)

    def _one(self, kind: str, db: str, coll: str | None, **more: Any) -> None:
        self._storage.commit([{"kind": kind, "db": db, "coll": coll, **more}])


_OPTIONS = ("changeStreamPreAndPostImages", "type", "viewOn")


class _Values(list[Transaction]):
    """The values that a dict has when they are looked at."""

    def __init__(self, transactions: dict[Any, Transaction]) -> None:
        super().__init__()
        self._transactions = transactions

    def __iter__(self) -> Any:
        return iter(self._transactions.values())


def _cut(documents: list[Body], size: int) -> tuple[list[Body], list[Body]]:
    total = 0
    for number, document in enumerate(documents):
        total += len(str(document))
        if number == size or (number and total > REPLY_BYTES // 4):
            return documents[:number], documents[number:]
    return documents, []


async def serve(arguments: argparse.Namespace) -> None:
    server = Server(arguments)
    async with await asyncio.start_server(server.connected, "127.0.0.1", arguments.port) as running:
        print("ready", flush=True)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(running.serve_forever())
            await asyncio.to_thread(sys.stdin.read)
            serving.cancel()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--standalone", action="store_true")
    parser.add_argument("--router", action="store_true")
    parser.add_argument("--version", default="8.0.4")
    parser.add_argument("--split-bytes", type=int, default=16_793_600)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
