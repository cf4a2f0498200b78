"""Which encoding is chosen, and that nothing stays behind in a compressor."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable

import brotli
import pytest
import zstandard

from headwater.gateway.http.compression import compressor, negotiate
from headwater.settings.groups import ENCODINGS

CHOSEN = [
    ("", None),
    ("gzip", "gzip"),
    ("gzip, deflate, br, zstd", "zstd"),
    ("GZIP", "gzip"),
    ("x-gzip", "gzip"),
    ("gzip, br;q=0.5", "gzip"),
    ("br;q=0.2, zstd;q=0.9, gzip;q=0.8", "zstd"),
    ("gzip ; q=0.5 , br ; q=0.5", "gzip"),
    ("*", "zstd"),
    ("*;q=0.5, zstd;q=0", "gzip"),
    ("*;q=0", None),
    ("*;q=0, gzip", "gzip"),
    ("br;q=0, zstd;q=0, gzip;q=0", None),
    ("identity", None),
    ("identity;q=0", None),
    ("identity;q=0, gzip;q=0.1", "gzip"),
    ("identity, gzip;q=0.5", None),
    ("identity;q=0.5, gzip", "gzip"),
    ("identity, gzip", "gzip"),
    ("deflate", None),
    ("gzip;q=high", None),
    ("gzip;q=", None),
    ("gzip;q=nan", None),
    ("gzip;q=2", None),
    ("gzip;q=-1", None),
    ("gzip;level=3", "gzip"),
    (",,;;q=1,", None),
    ("a," * 100_000 + "gzip", None),
]


@pytest.mark.parametrize(("header", "encoding"), CHOSEN)
def test_negotiation(header: str, encoding: str | None) -> None:
    assert negotiate(header, ENCODINGS) == encoding


def test_an_encoding_that_is_not_offered_is_not_chosen() -> None:
    assert negotiate("br, gzip;q=0.1", ["gzip"]) == "gzip"
    assert negotiate("br, *", []) is None


def _brotli() -> Callable[[bytes], bytes]:
    decoder = brotli.Decompressor()

    def decode(data: bytes) -> bytes:
        decoded = decoder.process(data)
        # This decoder gives out a large text in parts, without asking for more.
        while part := decoder.process(b""):
            decoded += part
        return bytes(decoded)

    return decode


def _zstd() -> Callable[[bytes], bytes]:
    return zstandard.ZstdDecompressor().decompressobj().decompress


def _gzip() -> Callable[[bytes], bytes]:
    return zlib.decompressobj(wbits=31).decompress


DECODERS = {"br": _brotli, "zstd": _zstd, "gzip": _gzip}


def events() -> list[bytes]:
    """Small ones, large ones, ones that do not compress, and an empty one."""
    source = random.Random(7)
    rows = [f'event: deltas\ndata: {{"id": {i}, "status": "open"}}\n\n' for i in range(50)]
    texts = [row.encode() for row in rows]
    return [*texts, b"", source.randbytes(100_000), b"x" * 200_000, *texts]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_each_event_can_be_decoded_when_it_is_there(encoding: str) -> None:
    encoder, decode = compressor(encoding), DECODERS[encoding]()
    for event in events():
        assert decode(encoder.add(event)) == event
    assert decode(encoder.finish()) == b""


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_whole_and_byte_by_byte(encoding: str) -> None:
    encoder = compressor(encoding)
    stream = b"".join(map(encoder.add, events()[:60])) + encoder.finish()
    expected = b"".join(events()[:60])
    assert DECODERS[encoding]()(stream) == expected
    decode = DECODERS[encoding]()
    assert b"".join(decode(stream[i : i + 1]) for i in range(len(stream))) == expected


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_stream_with_nothing_in_it(encoding: str) -> None:
    encoder = compressor(encoding)
    assert encoder.add(b"") == b""
    assert DECODERS[encoding]()(encoder.finish()) == b""


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_later_events_compress_better_than_earlier_ones(encoding: str) -> None:
    encoder = compressor(encoding)
    event = b'event: deltas\ndata: {"deltas":[{"key":[4711],"row":{"note":"a longer text"}}]}\n\n'
    first, second = encoder.add(event), encoder.add(event)
    assert len(second) < len(first) / 2
