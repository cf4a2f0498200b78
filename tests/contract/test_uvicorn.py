"""What `gateway/http/server.py` relies on in uvicorn beyond its documentation.

When one of these fails after an upgrade, uvicorn has changed: read `StreamingProtocol` and
`_Server` against the new version, and move the bounds in pyproject.toml.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from headwater.gateway.http.server import StreamingProtocol


async def app(scope: object, receive: object, send: object) -> None: ...


@pytest.fixture
async def protocol() -> StreamingProtocol:
    return StreamingProtocol(uvicorn.Config(app, log_config=None), ServerState(), {})


@pytest.mark.parametrize(
    "name",
    [
        "connection_made", "connection_lost", "pause_writing", "resume_writing", "data_received",
        "on_message_begin", "on_headers_complete",
    ],
)  # fmt: skip
def test_methods_of_the_protocol_that_ours_extends(name: str) -> None:
    assert callable(getattr(HttpToolsProtocol, name))


def test_attributes_of_the_protocol_that_ours_uses(protocol: StreamingProtocol) -> None:
    assert {"loop", "transport", "cycle", "scope", "pipeline"} <= vars(protocol).keys()


def test_a_handshake_that_is_refused_does_not_count_as_complete() -> None:
    """When it does, `SocketProtocol` is no longer needed."""
    source = inspect.getsource(WebSocketsSansIOProtocol)
    assert "if not self.handshake_complete:" in source
    assert source.count("self.handshake_complete = True") == 4


def test_the_functions_that_send_over_a_websocket() -> None:
    """`SocketProtocol` sends large messages in the same way, but in several frames."""
    source = inspect.getsource(WebSocketsSansIOProtocol)
    for used in (
        "await self.writable.wait()",
        "if self.disconnected:",
        "self.close_sent",
        "self.conn.send_text(text_data.encode())",
        "output = self.conn.data_to_send()",
    ):
        assert used in source


def test_the_parser_calls_our_methods_and_the_scope_is_read_after_its_beginning(
    protocol: StreamingProtocol,
) -> None:
    protocol.on_message_begin()
    assert protocol.scope["type"] == "http"
    extensions: Any = protocol.scope["extensions"]
    assert extensions == {"headwater.transport": protocol}


def test_a_response_knows_whether_it_is_chunked_and_complete() -> None:
    source = inspect.getsource(RequestResponseCycle)
    assert "self.chunked_encoding: bool | None = None" in source
    assert "if self.chunked_encoding is None and" in source
    assert "self.response_complete = True" in source


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("startup", ["self", "sockets"]),
        ("shutdown", ["self", "sockets"]),
        ("on_tick", ["self", "counter"]),
        ("capture_signals", ["self"]),
        ("handle_exit", ["self", "sig", "frame"]),
    ],
)
def test_methods_of_the_server_that_ours_extends(name: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(uvicorn.Server, name)).parameters) == parameters


def test_the_server_knows_its_connections() -> None:
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    assert server.server_state.connections == set()
