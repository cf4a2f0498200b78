"""Compressed streams: each event can be decoded as soon as it is there, by the usual decoders."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import brotli
import httpx
import psycopg
import pytest
import zstandard

from headwater.database import Connection
from headwater.embedded import EmbeddedPostgres
from headwater.testing.gateway_process import Served, serving
from tests.support.applications.shop import open_shop, shop_served

QUERY = {"table": "orders", "limit": 20}
DECODERS: dict[str, Callable[[], Callable[[bytes], bytes]]] = {
    "br": lambda: brotli.Decompressor().process,
    "zstd": lambda: zstandard.ZstdDecompressor().decompressobj().decompress,
    "gzip": lambda: zlib.decompressobj(wbits=31).decompress,
}


@pytest.fixture(scope="module")
def steady(postgres: EmbeddedPostgres) -> Iterator[Served]:
    """A gateway for the tests that do not change it."""
    with shop_served(postgres.url, rows=50) as served:
        yield served


@pytest.fixture
async def gateway(url: str, connection: Connection, tmp_path: Path) -> Any:
    await open_shop(connection, rows=50)
    with serving(url, tmp_path) as served:
        yield served


@pytest.mark.parametrize("encoding", DECODERS)
def test_events_can_be_decoded_at_once(gateway: Served, url: str, encoding: str) -> None:
    headers = {"accept-encoding": encoding}
    with (
        psycopg.connect(url, autocommit=True) as writer,
        httpx.stream(
            "POST", f"{gateway.url}/v1/live", json=QUERY, headers=headers, trust_env=False
        ) as stream,
    ):
        assert stream.headers["content-encoding"] == encoding
        text = _decoded(stream.iter_raw(), DECODERS[encoding]())
        seen = _until(text, "event: snapshot", "")
        for number in range(20):
            # If the end of an event were held back, this would wait for ever.
            writer.execute("update orders set note = %s where id = 1", (f"note {number}",))
            seen = _until(text, f'"note":"note {number}"', seen)


def _decoded(parts: Iterator[bytes], decode: Callable[[bytes], bytes]) -> Iterator[str]:
    for part in parts:
        yield decode(part).decode()


def _until(text: Iterator[str], wanted: str, seen: str) -> str:
    """Read until an event with that in it is whole."""
    while wanted not in seen or not seen.endswith("\n\n"):
        seen += next(text)
    return ""


@pytest.mark.parametrize(
    ("accepted", "used"),
    [("", None), ("identity", None), ("gzip", "gzip"), ("br;q=0.5, gzip;q=0.1", "br"),
     ("gzip, deflate, br, zstd", "zstd"), ("deflate", None), ("gzip;q=0", None)],
)  # fmt: skip
def test_the_encoding_that_the_client_accepts(
    steady: Served, accepted: str, used: str | None
) -> None:
    with httpx.stream(
        "POST",
        f"{steady.url}/v1/live",
        json=QUERY,
        headers={"accept-encoding": accepted},
        trust_env=False,
    ) as stream:
        assert stream.headers.get("content-encoding") == used
