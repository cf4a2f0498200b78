"""Events come out whole, however the bytes come in."""

from __future__ import annotations

import pytest

from headwater.client.sse import SseEvent, SseParser
from headwater.errors import LimitExceeded

STREAMS: list[tuple[str, bytes, list[SseEvent]]] = [
    ("nothing", b"", []),
    ("one", b"data: a\n\n", [SseEvent("message", b"a")]),
    ("carriage returns", b"event: e\r\rdata: a\r\r", [SseEvent("message", b"a")]),
    ("both", b"event: e\r\ndata: a\r\n\r\n", [SseEvent("e", b"a")]),
    (
        "mixed",
        b"event: e\ndata: a\r\r\ndata: b\n\r",
        [SseEvent("e", b"a"), SseEvent("message", b"b")],
    ),
    ("several lines", b"data: a\ndata:\ndata:  b\n\n", [SseEvent("message", b"a\n\n b")]),
    ("no space", b"data:a\n\n", [SseEvent("message", b"a")]),
    ("byte order mark", b"\xef\xbb\xbfdata: a\n\n", [SseEvent("message", b"a")]),
    ("mark inside", b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [SseEvent("message", b"a")]),
    ("comment", b": keepalive\n\n:\ndata: a\n\n", [SseEvent("message", b"a")]),
    ("unknown field", b"colour: red\ndata\ndata: a\n\n", [SseEvent("message", b"\na")]),
    (
        "an id stays",
        b"id: 7\ndata: a\n\ndata: b\n\nid\ndata: c\n\n",
        [
            SseEvent("message", b"a", "7"),
            SseEvent("message", b"b", "7"),
            SseEvent("message", b"c", ""),
        ],
    ),
    ("an id without data counts", b"id: 7\n\ndata: a\n\n", [SseEvent("message", b"a", "7")]),
    ("an id with a null does not", b"id: 7\0\ndata: a\n\n", [SseEvent("message", b"a")]),
    ("a name without data", b"event: e\n\ndata: a\n\n", [SseEvent("message", b"a")]),
    ("umlauts", "event: ä\ndata: ü\n\n".encode(), [SseEvent("ä", "ü".encode())]),
    ("unfinished", b"data: a\n\ndata: b\n", [SseEvent("message", b"a")]),
]


@pytest.mark.parametrize(("name", "stream", "events"), STREAMS)
def test_whole(name: str, stream: bytes, events: list[SseEvent]) -> None:
    assert SseParser().feed(stream) == events


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize(("name", "stream", "events"), STREAMS)
def test_in_pieces(name: str, stream: bytes, events: list[SseEvent], size: int) -> None:
    parser, found = SseParser(), list[SseEvent]()
    for start in range(0, len(stream), size):
        found += parser.feed(stream[start : start + size])
        assert parser.feed(b"") == []
    assert found == events


@pytest.mark.parametrize(("name", "stream", "events"), STREAMS[1:-1])
def test_with_a_tail(name: str, stream: bytes, events: list[SseEvent]) -> None:
    parser = SseParser()
    assert parser.feed(stream + b"event: tail\ndata: t") == events
    assert parser.feed(b"\n\n") == [SseEvent("tail", b"t", parser.id)]


def test_retry() -> None:
    parser = SseParser()
    parser.feed(b"retry: 1500\nretry: soon\n\n")
    assert parser.retry == 1500


def feed(parser: SseParser, stream: bytes, size: int) -> None:
    for start in range(0, len(stream), size):
        parser.feed(stream[start : start + size])


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_an_event_is_bounded(size: int) -> None:
    fits, grows = b"data: 12345\ndata: 12345\n\n", b"data: 12345\ndata: 123456\n\n"
    feed(SseParser(bytes_max=21), fits * 3, size)
    with pytest.raises(LimitExceeded) as caught:
        feed(SseParser(bytes_max=10), grows, size)
    assert not caught.value.retryable


def test_a_line_without_end_is_bounded() -> None:
    with pytest.raises(LimitExceeded):
        feed(SseParser(bytes_max=10), b"x" * 11, 1)
