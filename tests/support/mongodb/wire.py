"""The wire protocol as far as a driver of today speaks it: OP_MSG, and OP_QUERY for the first
greeting. See `__init__` for what this server is."""

from __future__ import annotations

import asyncio
import itertools
import struct
from typing import Any

import bson
from bson.codec_options import CodecOptions, DatetimeConversion

OP_REPLY, OP_QUERY, OP_MSG = 1, 2004, 2013
CODEC: CodecOptions[dict[str, Any]] = CodecOptions(
    document_class=dict, datetime_conversion=DatetimeConversion.DATETIME_MS
)
_HEADER = struct.Struct("<iiii")
_MORE_TO_COME = 2
_numbers = itertools.count(1)


class Request:
    """One command: its document, with the documents of its other sections in place."""

    def __init__(self, number: int, opcode: int, body: dict[str, Any], answered: bool) -> None:
        self.number, self.opcode, self.body, self.answered = number, opcode, body, answered


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """None at the end of the connection."""
    try:
        length, number, _, opcode = _HEADER.unpack(await reader.readexactly(16))
        data = await reader.readexactly(length - 16)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    if opcode == OP_QUERY:
        end = data.index(b"\0", 4) + 9
        return Request(number, opcode, bson.decode(data[end:], CODEC), True)
    assert opcode == OP_MSG, opcode
    (flags,) = struct.unpack_from("<I", data)
    return Request(number, opcode, _sections(data[4:]), not flags & _MORE_TO_COME)


def _sections(data: bytes) -> dict[str, Any]:
    body: dict[str, Any] = {}
    lists: dict[str, Any] = {}
    while data:
        kind, data = data[0], data[1:]
        (size,) = struct.unpack_from("<i", data)
        if kind == 0:
            body = bson.decode(data[:size], CODEC)
        else:
            end = data.index(b"\0", 4)
            lists[data[4:end].decode()] = bson.decode_all(data[end + 1 : size], CODEC)
        data = data[size:]
    return body | lists


def reply(request: Request, document: dict[str, Any]) -> bytes:
    encoded = bson.encode(document, codec_options=CODEC)
    if request.opcode == OP_QUERY:
        payload, opcode = struct.pack("<iqii", 8, 0, 0, 1) + encoded, OP_REPLY
    else:
        payload, opcode = struct.pack("<IB", 0, 0) + encoded, OP_MSG
    return _HEADER.pack(16 + len(payload), next(_numbers), request.number, opcode) + payload
