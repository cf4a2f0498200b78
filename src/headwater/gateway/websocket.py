"""The WebSocket endpoint: the messages of the protocol in both directions.

Messages of one connection are read one after the other; what takes long (a subscription's first
rows, a mutation, a token's check) does not hold up the next. A client that does not take what it is
sent is not read either.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec
from starlette.types import Message, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from headwater.errors import HeadwaterError, InvalidQuery, LimitExceeded
from headwater.gateway.connection import Connection
from headwater.gateway.faults import unforeseen
from headwater.gateway.gateway import Gateway
from headwater.gateway.requests import admit
from headwater.gateway.session import error_message
from headwater.gateway.sinks import WebSocketSink
from headwater.gateway.tickets import refused_here
from headwater.protocol import (
    Ask,
    Authenticate,
    ClientMessage,
    Mutate,
    Publish,
    Reanchor,
    SetState,
    Subscribe,
    Unsubscribe,
    Wait,
    read_client,
)

CLOSE_CODES = {"token_expired": 4401, "stopping": 1012, "idle": 4408}
"""By the reason a connection was ended; 1000 for any other."""


class _Socket(WebSocketSink):
    """Closes with a code that tells why."""

    def __init__(self, send: Send, connection: Connection) -> None:
        super().__init__(send)
        self._connection = connection

    def close(self, code: int = 1000, reason: str = "") -> None:
        why = self._connection.closing or reason
        super().close(CLOSE_CODES.get(why, code), why)


async def serve(gateway: Gateway, websocket: WebSocket) -> None:
    """Serve one connection until it ends. Raises what refuses it, before it is accepted."""
    caller = await admit(gateway, websocket, opens_stream=True)
    connection = gateway.open(
        caller.identity,
        address=caller.address,
        transport="websocket",
        here=caller.here,
        by_ticket=caller.by_ticket,
    )
    try:
        await websocket.accept()
        await _converse(gateway, websocket, connection)
    finally:
        gateway.release(connection)


async def _converse(gateway: Gateway, websocket: WebSocket, connection: Connection) -> None:
    sink = _Socket(websocket.send, connection)
    connection.attach(sink)
    listening = asyncio.create_task(_listen(gateway, websocket, connection))
    closed = asyncio.create_task(sink.closed())
    try:
        await asyncio.wait({listening, closed}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        sink.abort()
        listening.cancel()
        await asyncio.gather(listening, closed, return_exceptions=True)


async def _listen(gateway: Gateway, websocket: WebSocket, connection: Connection) -> None:
    with suppress(WebSocketDisconnect):
        while True:
            # Who takes no answers is asked no questions: they would pile up here.
            if connection.session.is_full:
                await connection.room()
            event = await websocket.receive()
            if event["type"] == "websocket.disconnect":
                return
            message: ClientMessage | None = None
            try:
                message = _read(event)
                _count(gateway, connection, message)
            except HeadwaterError as error:
                # Whoever asks must know which of its wishes was not heard.
                wish = _wish(event) if message is None else message
                connection.session.say(error_message(error, id=_ended(connection, wish)))
            else:
                work = _obey(gateway, connection, message)
                if connection.by_ticket and isinstance(message, Authenticate):
                    await work  # what comes behind it needs the token
                else:
                    connection.start(work)


def _count(gateway: Gateway, connection: Connection, message: ClientMessage) -> None:
    """A request more. To end a subscription is never refused: it would stay for good."""
    try:
        gateway.count_request(connection.session.identity.account, connection.address)
    except LimitExceeded:
        if not isinstance(message, Unsubscribe):
            raise


def _read(event: Message) -> ClientMessage:
    text = event.get("text")
    if not isinstance(text, str):
        raise InvalidQuery("expected a text message")
    try:
        return read_client(text)
    except msgspec.DecodeError as error:
        raise InvalidQuery(
            str(error), hint="docs/reference/protocol.md has an example of every message."
        ) from None
    except RecursionError:
        raise InvalidQuery("nested too deeply") from None


async def _obey(gateway: Gateway, connection: Connection, message: ClientMessage) -> None:
    """Do what the client asks. An error about a subscription or request names it."""
    session = connection.session
    try:
        match message:
            case Ask() | Mutate() | Publish() | SetState() if connection.by_ticket:
                raise refused_here("Send authenticate with the token first.")
            case Subscribe():
                await gateway.subscribe(connection, message)
            case Unsubscribe(id):
                session.remove(id)
            case Reanchor():
                await gateway.reanchor(connection, message)
            case Ask() | Mutate() | Wait():
                await gateway.calls.begin(connection, message)
            case Publish() | SetState():
                await gateway.speak(connection, message)
            case Authenticate(token):
                session.say(await gateway.authenticate(connection, token))
    except HeadwaterError as error:
        session.say(error_message(error, id=_ended(connection, message)))
    except Exception:
        session.say(error_message(unforeseen(), id=_ended(connection, message)))


class _Wish(msgspec.Struct):
    """What a message that cannot be read says it is."""

    type: str | None = None
    id: str | None = None
    request: str | None = None


def _wish(event: Message) -> _Wish:
    try:
        return msgspec.json.decode(event.get("text") or "", type=_Wish)
    except (msgspec.DecodeError, RecursionError):
        return _Wish()


def _ended(connection: Connection, message: ClientMessage | _Wish) -> str | None:
    """The subscription or request that an error is the end of."""
    match message:
        case Subscribe(id) | Ask(id) | Mutate(id) | Wait(id):
            pass
        case _Wish("subscribe" | "query" | "mutate" | "wait", str(id)):
            pass
        case Reanchor(request=str(id)) | Publish(request=str(id)) | SetState(request=str(id)):
            pass
        case _Wish("reanchor" | "publish" | "state", request=str(id)):
            pass
        case _:
            return None
    return None if connection.uses(id) else id
