"""A fake gateway, for what a real one never does on request: send wrong data, stop answering,
refuse, close.

It speaks the protocol over real sockets, WebSocket and SSE, about one table `orders (id, amount)`
in memory, ordered by id. Every change is a transaction of its own, and is sent to every view.
It has one reactive query, which returns all orders whatever it is called, and one mutation with the
arguments `id` and `amount`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from headwater.client.state.replica import result_hash
from headwater.model import Enter, Leave, Update
from headwater.protocol import (
    Answer,
    Ask,
    Authenticate,
    Authenticated,
    Changes,
    ClientMessage,
    Deltas,
    Error,
    Frame,
    Gap,
    Hello,
    Mutate,
    QueryCall,
    Reanchor,
    ResetMessage,
    Result,
    ServerMessage,
    Snapshot,
    Subscribe,
    Subscribed,
    Unsubscribe,
    Unsubscribed,
    Wait,
    WireTransaction,
    read_client,
)
from headwater.protocol import Failed as FailedMessage

AT = datetime(2026, 1, 31, 12, tzinfo=UTC)
Row = dict[str, Any]


class Session:
    """One connection of a client."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.outgoing: asyncio.Queue[Frame | None] = asyncio.Queue()
        self.views: dict[str, int] = {}
        self.close_code = 1012

    def send(self, message: ServerMessage) -> None:
        self.outgoing.put_nowait(Frame(message))

    async def frames(self) -> AsyncIterator[Frame]:
        while (frame := await self.outgoing.get()) is not None:
            yield frame


class FakeGateway:
    """The server, and methods with which a test controls it."""

    def __init__(self) -> None:
        self.url = ""
        self.rows: dict[int, Row] = {}
        self.sessions: dict[str, Session] = {}
        self.seen: list[ClientMessage] = []
        self.tokens: list[str | None] = []
        self.refusals: list[Error] = []
        """Answers to the next connections, instead of letting them in."""
        self.subscription_refusals: list[Error] = []
        self.unsubscription_refusals: list[Error] = []
        self.call_refusals: list[Error] = []
        self.answers = True
        """Whether queries, mutations and waits are answered; a mutation happens all the same."""
        self.stored: dict[str | None, Any] = {}
        """What mutations returned, by their key."""
        self.resumes = True
        self.keepalive = 15.0
        self.expires_at: datetime | None = None
        self.status = {"token_expired": 401, "forbidden": 403, "limit": 429, "unavailable": 503}
        self._xid = 100
        self._opened = 0
        self._frames: dict[int, list[Deltas]] = {}
        self._queries: dict[int, dict[str, Any]] = {}
        self._members: dict[int, list[int]] = {}
        self._transactions: list[WireTransaction] = []
        self._results: dict[int, str] = {}
        self._server: uvicorn.Server | None = None

    @property
    def position(self) -> str:
        return f"ab-{self._xid + 1}:{self._xid + 1}:"

    # -------------------------------------------------------------------- for tests

    def put(self, id: int, amount: int) -> None:
        """Insert or update a row, and send the change to every subscription."""
        self._xid += 1
        after = {"id": id, "amount": amount}
        self.rows[id] = after
        self.rows = dict(sorted(self.rows.items()))
        for view, query in self._queries.items():
            self._send_delta(view, query, id, after)
        self._log("insert", after)
        self._send_results()

    def remove(self, id: int) -> None:
        self._xid += 1
        before = self.rows.pop(id)
        for view, query in self._queries.items():
            self._send_delta(view, query, id, None)
        self._log("delete", before)
        self._send_results()

    def send(self, message: ServerMessage) -> None:
        """Send any message to every session."""
        for session in self.sessions.values():
            session.send(message)

    def send_wrong_delta(self) -> None:
        """Send every live query a delta that does not fit its rows."""
        for view in self._queries:
            self.send(Deltas(view, self.position, AT, (Leave((-1,), 7),)))

    def gap(self, since: str) -> None:
        for session in self.sessions.values():
            for view in self._feeds(session):
                session.send(Gap(view, self.position, since, "overflow"))

    def fail(self) -> None:
        """Every reactive query fails to be executed again."""
        for view in self._results:
            self.send(FailedMessage(view, self.position, "timed_out", "it took too long"))

    def cut(self) -> None:
        """Every connection breaks, as when the machine is gone."""
        assert self._server is not None
        for protocol in list(self._server.server_state.connections):
            protocol.transport.abort()
        self.sessions.clear()

    def close_connections(self, code: int = 1012) -> None:
        """Every connection is closed in an orderly way."""
        for session in self.sessions.values():
            session.close_code = code
            session.outgoing.put_nowait(None)
        self.sessions.clear()

    # -------------------------------------------------------------------- sending

    def _window(self, query: dict[str, Any]) -> list[Row]:
        after = (query.get("after") or [-1])[0]
        return [row for id, row in self.rows.items() if id > after][: query.get("limit", 100)]

    def _enters(self, query: dict[str, Any]) -> tuple[Enter, ...]:
        rows = self._window(query)
        return tuple(Enter((row["id"],), row, i, (row["id"],)) for i, row in enumerate(rows))

    def _hash(self, query: dict[str, Any]) -> int:
        return result_hash(((row["id"],), row) for row in self._window(query))

    def _send_delta(self, view: int, query: dict[str, Any], id: int, after: Row | None) -> None:
        # No window of the fake is full: the limit of a query is larger than the tables of the
        # tests.
        before = self._members[view]
        now = [row["id"] for row in self._window(query)]
        step: Enter | Leave | Update
        if id in now and id in before:
            assert after is not None
            step = Update((id,), after, now.index(id), (id,))
        elif id in now:
            assert after is not None
            step = Enter((id,), after, now.index(id), (id,))
        elif id in before:
            step = Leave((id,), before.index(id))
        else:
            return
        frame = Deltas(view, self.position, AT, (step,), self._hash(query))
        self._frames[view].append(frame)
        self._members[view] = now
        for session in self.sessions.values():
            if view in session.views.values():
                session.send(frame)

    def _log(self, op: str, row: Row) -> None:
        change = {"seq": self._xid, "table": "orders", "op": op, "key": {"id": row["id"]}}
        transaction = WireTransaction(self._xid, AT, (change,))
        self._transactions.append(transaction)
        for session in self.sessions.values():
            for view in self._feeds(session):
                session.send(Changes(view, self.position, (transaction,)))

    def _feeds(self, session: Session) -> set[int]:
        return set(session.views.values()) - set(self._queries) - set(self._results)

    def _send_results(self) -> None:
        for session in self.sessions.values():
            for view in set(session.views.values()) & set(self._results):
                self._results[view] = self.position
                session.send(Result(view, self.position, list(self.rows.values())))

    # -------------------------------------------------------------------- requests

    def _handle(self, session: Session, message: ClientMessage) -> Error | None:
        self.seen.append(message)
        match message:
            case Subscribe():
                if self.subscription_refusals:
                    refusal = self.subscription_refusals.pop(0)
                    return msgspec.structs.replace(refusal, id=message.id)
                self._subscribe(session, message)
            case Unsubscribe(id):
                if self.unsubscription_refusals:
                    return self.unsubscription_refusals.pop(0)
                session.views.pop(id, None)
                session.send(Unsubscribed(id))
            case Reanchor(id, after, request):
                if after and not isinstance(after[0], int):
                    return Error("invalid_query", "after[0]: expected an integer", id=request)
                view = self._view({**self._queries[session.views[id]], "after": after})
                if view != session.views[id]:
                    session.views[id] = view
                    session.send(Subscribed(id, view, key=("id",)))
                    rows = self._enters(self._queries[view])
                    session.send(ResetMessage(view, self.position, "window", rows))
                if request is not None:
                    session.send(Answer(request, self.position))
            case Authenticate(token):
                self.tokens.append(token)
                session.send(Authenticated())
            case Ask() | Mutate() | Wait():
                answer = self._answer(message)
                if isinstance(answer, Error):
                    return answer
                if self.answers:
                    session.send(answer)
        return None

    def _answer(self, call: Ask | Mutate | Wait) -> Answer | Error:
        if self.call_refusals:
            return msgspec.structs.replace(self.call_refusals.pop(0), id=call.id)
        value: Any = None
        match call:
            case Ask():
                value = list(self.rows.values())
            case Mutate(_, _, args, key):
                value = self.stored.get(key)
                if value is None:
                    self.put(**args)
                    value = args["id"]
                if key is not None:
                    self.stored[key] = value
        return Answer(call.id, self.position, value)

    def _view(self, query: dict[str, Any]) -> int:
        for view, known in self._queries.items():
            if known == query:
                return view
        view = 1 + len(self._queries)
        self._queries[view] = query
        self._frames[view] = []
        self._members[view] = [row["id"] for row in self._window(query)]
        return view

    def _subscribe(self, session: Session, message: Subscribe) -> None:
        if message.query is not None:
            self._subscribe_query(session, message, message.query)
            return
        if message.live is None:
            self._subscribe_feed(session, message)
            return
        view = self._view(message.live)
        session.views[message.id] = view
        missed = [f for f in self._frames[view] if message.since and _later(f, message.since)]
        resumed = self.resumes and message.since is not None
        session.send(Subscribed(message.id, view, resumed, ("id",)))
        if resumed:
            for frame in missed:
                session.send(frame)
        else:
            rows, hash = self._enters(message.live), self._hash(message.live)
            session.send(Snapshot(view, self.position, rows, hash=hash))

    def _subscribe_query(self, session: Session, message: Subscribe, call: QueryCall) -> None:
        if call.delta:
            live = {"table": "orders", "query": call.name}
            self._subscribe(session, msgspec.structs.replace(message, query=None, live=live))
            return
        view = 500 + len(session.views)
        session.views[message.id] = view
        newest = self._results.setdefault(view, self.position)
        resumed = self.resumes and message.since == newest == self.position
        session.send(Subscribed(message.id, view, resumed))
        if not resumed:
            self._results[view] = self.position
            session.send(Result(view, self.position, list(self.rows.values())))

    def _subscribe_feed(self, session: Session, message: Subscribe) -> None:
        assert message.changes is not None
        view = 1000 + len(session.views)
        session.views[message.id] = view
        session.send(Subscribed(message.id, view))
        since = message.changes.since
        missed = [t for t in self._transactions if since and t.xid >= _xmin(since)]
        session.send(Changes(view, self.position, tuple(missed)))

    # -------------------------------------------------------------------- the interface

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/stream", self._stream),
                Route("/v1/sessions/{session}/subscriptions", self._request, methods=["POST"]),
                Route(
                    "/v1/sessions/{session}/subscriptions/{id}",
                    self._request,
                    methods=["DELETE", "PATCH"],
                ),
                Route("/v1/sessions/{session}/token", self._request, methods=["POST"]),
                Route("/v1/sessions/{session}/wait", self._request, methods=["POST"]),
                Route("/v1/query/{name}", self._call, methods=["POST"]),
                Route("/v1/mutation/{name}", self._call, methods=["POST"]),
                WebSocketRoute("/v1/ws", self._socket),
            ]
        )

    def _admit(self, authorization: str | None) -> Session | Response:
        self.tokens.append(authorization and authorization.removeprefix("Bearer "))
        if self.refusals:
            return self._refuse(self.refusals.pop(0))
        self._opened += 1
        session = Session(f"session {self._opened}")
        self.sessions[session.name] = session
        session.send(Hello(session.name, 1, self.keepalive, self.expires_at))
        return session

    def _refuse(self, error: Error) -> Response:
        fields = {n: getattr(error, n) for n in ("code", "message", "hint", "retryable")}
        body = {"error": {**fields, "retry_after_secs": error.retry_after_secs}}
        return Response(msgspec.json.encode(body), self.status.get(error.code, 400))

    async def _stream(self, request: Request) -> Response:
        session = self._admit(request.headers.get("authorization"))
        if isinstance(session, Response):
            return session

        async def events() -> AsyncIterator[bytes]:
            async for frame in session.frames():
                yield frame.sse

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _request(self, request: Request) -> Response:
        session = self.sessions.get(request.path_params["session"])
        if session is None:
            return Response(b'{"error": {"code": "session_unknown", "message": "gone"}}', 404)
        body = await request.json() if request.method != "DELETE" else {}
        fields = {**body, **{k: v for k, v in request.path_params.items() if k == "id"}}
        kinds = {"DELETE": "unsubscribe", "PATCH": "reanchor"}
        kind = "authenticate" if "token" in body else kinds.get(request.method, "subscribe")
        kind = "wait" if "position" in body else kind
        message = read_client(msgspec.json.encode({"type": kind, **fields}))
        refusal = self._handle(session, message)
        return self._refuse(refusal) if refusal else Response(b"{}", 202)

    async def _call(self, request: Request) -> Response:
        name, args = request.path_params["name"], await request.json()
        is_query = request.url.path.startswith("/v1/query/")
        after = request.query_params.get("after")
        key = request.headers.get("idempotency-key")
        message = Ask("", name, args, after) if is_query else Mutate("", name, args, key)
        self.seen.append(message)
        answer = self._answer(message)
        if isinstance(answer, Error):
            return self._refuse(answer)
        if not self.answers:
            await asyncio.Event().wait()
        return Response(msgspec.json.encode({"value": answer.value, "position": answer.position}))

    async def _socket(self, websocket: WebSocket) -> None:
        session = self._admit(websocket.headers.get("authorization"))
        if isinstance(session, Response):
            await websocket.send_denial_response(session)
            return
        await websocket.accept()
        sending = asyncio.create_task(self._send_frames(websocket, session))
        try:
            while True:
                message = read_client(await websocket.receive_text())
                if refusal := self._handle(session, message):
                    session.send(refusal)
        except (WebSocketDisconnect, RuntimeError):
            pass
        finally:
            sending.cancel()
            self.sessions.pop(session.name, None)

    async def _send_frames(self, websocket: WebSocket, session: Session) -> None:
        async for frame in session.frames():
            await websocket.send_text(frame.json.decode())
        await websocket.close(session.close_code)


def _later(frame: Deltas, since: str) -> bool:
    return _xmin(frame.position) > _xmin(since)


def _xmin(position: str) -> int:
    return int(position.split("-")[1].split(":")[0])


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # they are pytest's


@asynccontextmanager
async def fake_gateway(port: int = 0) -> AsyncIterator[FakeGateway]:
    """A fake gateway that listens on a port of its own."""
    fake = FakeGateway()
    listener = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(fake.app(), lifespan="off", log_level="error", ws="websockets-sansio")
    server = _Server(config)
    fake._server = server
    fake.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield fake
    finally:
        fake.cut()
        server.should_exit = server.force_exit = True
        await task
        listener.close()
