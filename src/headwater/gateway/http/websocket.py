"""The WebSocket endpoint: the messages of the protocol in both directions.

Messages of one connection are read in order; slow work (a subscription's first rows, a mutation,
the check of a token) does not delay the next message. While a client does not read, its messages
are not read either.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec
from starlette.types import Message, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from headwater.errors import HeadwaterError, InvalidQuery, LimitExceeded
from headwater.gateway.auth.tickets import ticket_refused
from headwater.gateway.connection import GatewayConnection
from headwater.gateway.gateway import Gateway
from headwater.gateway.http.bodies import check_json_size
from headwater.gateway.http.requests import admit
from headwater.gateway.http.transports import WebSocketSink
from headwater.gateway.internal_errors import internal_error
from headwater.gateway.session import error_message
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
"""Close codes by the reason for ending a connection; 1000 for any other."""


class _Socket(WebSocketSink):
    """A sink that closes with a code for the reason."""

    def __init__(self, send: Send, connection: GatewayConnection) -> None:
        super().__init__(send)
        self._connection = connection

    def close(self, code: int = 1000, reason: str = "") -> None:
        why = self._connection.closing or reason
        super().close(CLOSE_CODES.get(why, code), why)


async def serve(gateway: Gateway, websocket: WebSocket) -> None:
    """Serve one connection until it ends. Raises the error of a refused connection before it is
    accepted."""
    caller = await admit(gateway, websocket, opens_stream=True)
    connection = gateway.open(
        caller.identity,
        address=caller.address,
        transport="websocket",
        local=caller.local,
        by_ticket=caller.by_ticket,
    )
    try:
        await websocket.accept()
        await _exchange(gateway, websocket, connection)
    finally:
        gateway.release(connection)


async def _exchange(gateway: Gateway, websocket: WebSocket, connection: GatewayConnection) -> None:
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


async def _listen(gateway: Gateway, websocket: WebSocket, connection: GatewayConnection) -> None:
    with suppress(WebSocketDisconnect):
        while True:
            # While the client does not read, its requests are not read: answers would pile up here.
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
                # The client must know which of its messages failed.
                failed = _envelope(event) if message is None else message
                connection.session.send(error_message(error, id=_ended(connection, failed)))
            else:
                work = _handle(gateway, connection, message)
                if connection.by_ticket and isinstance(message, Authenticate):
                    await work  # the messages after it need the token
                else:
                    connection.start(work)


def _count(gateway: Gateway, connection: GatewayConnection, message: ClientMessage) -> None:
    """Count a request. An unsubscribe is never refused: the subscription would never end."""
    try:
        gateway.count_request(connection.session.identity.account, connection.address)
    except LimitExceeded:
        if not isinstance(message, Unsubscribe):
            raise


def _read(event: Message) -> ClientMessage:
    text = event.get("text")
    if not isinstance(text, str):
        raise InvalidQuery("expected a text message, got a binary one")
    check_json_size(text)
    try:
        return read_client(text)
    except msgspec.DecodeError as error:
        raise InvalidQuery(
            str(error), hint="docs/reference/protocol.md has an example of every message."
        ) from None
    except RecursionError:
        raise InvalidQuery("the message is nested too deeply") from None


async def _handle(gateway: Gateway, connection: GatewayConnection, message: ClientMessage) -> None:
    """Handle a message of the client. An error about a subscription or request has its id."""
    session = connection.session
    try:
        match message:
            case Ask() | Mutate() | Publish() | SetState() if connection.by_ticket:
                raise ticket_refused("Send authenticate with the token first.")
            case Subscribe():
                await gateway.subscribe(connection, message)
            case Unsubscribe(id):
                session.remove(id)
            case Reanchor():
                await gateway.reanchor(connection, message)
            case Ask() | Mutate() | Wait():
                await gateway.calls.begin(connection, message)
            case Publish() | SetState():
                await gateway.send_to_channel(connection, message)
            case Authenticate(token):
                session.send(await gateway.authenticate(connection, token))
    except HeadwaterError as error:
        session.send(error_message(error, id=_ended(connection, message)))
    except Exception:
        session.send(error_message(internal_error(), id=_ended(connection, message)))


class _Envelope(msgspec.Struct):
    """The type and ids of a message that cannot be decoded as a whole."""

    type: str | None = None
    id: str | None = None
    request: str | None = None


def _envelope(event: Message) -> _Envelope:
    try:
        return msgspec.json.decode(event.get("text") or "", type=_Envelope)
    except (msgspec.DecodeError, RecursionError):
        return _Envelope()


def _ended(connection: GatewayConnection, message: ClientMessage | _Envelope) -> str | None:
    """The id of the subscription or request that an error ends."""
    match message:
        case Subscribe(id) | Ask(id) | Mutate(id) | Wait(id):
            pass
        case _Envelope("subscribe" | "query" | "mutate" | "wait", str(id)):
            pass
        case Reanchor(request=str(id)) | Publish(request=str(id)) | SetState(request=str(id)):
            pass
        case _Envelope("reanchor" | "publish" | "state", request=str(id)):
            pass
        case _:
            return None
    return None if connection.uses(id) else id
