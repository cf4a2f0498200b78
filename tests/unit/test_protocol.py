"""The wire protocol: its page, its encodings, its values."""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, datetime
from typing import Any, get_args

import msgspec
import pytest

from headwater.model import Column, Enter, Leave, Match, Move, Table, Unmatch, Update
from headwater.protocol import (
    Answer,
    ClientMessage,
    Failed,
    Frame,
    Hello,
    Keepalive,
    Result,
    ServerMessage,
    Snapshot,
    Wire,
    read_client,
    read_server,
)
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "reference" / "protocol.md").read_text()
EXAMPLES = [
    (kind, json.loads(text))
    for kind, text in re.findall(r"^```json (server|client)\n(.*?)^```$", PAGE, re.M | re.S)
]
AT = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.mark.parametrize(("kind", "example"), EXAMPLES, ids=lambda e: str(e)[:40])
def test_the_page_shows_what_is_read_and_written(kind: str, example: dict[str, Any]) -> None:
    read = read_server if kind == "server" else read_client
    message = read(json.dumps(example))
    assert json.loads(msgspec.json.encode(message)) == example


@pytest.mark.parametrize(("kind", "union"), [("server", ServerMessage), ("client", ClientMessage)])
def test_the_page_shows_every_message(kind: str, union: Any) -> None:
    shown = {example["type"] for of, example in EXAMPLES if of == kind}
    assert shown == {message.__struct_config__.tag for message in get_args(union)}


def events(stream: bytes) -> list[dict[str, str]]:
    return [
        dict(line.split(": ", 1) for line in event.split("\n"))
        for event in stream.decode().split("\n\n")
        if event
    ]


class TestFrames:
    def test_an_event_has_a_name_the_position_as_its_id_and_the_message(self) -> None:
        frame = Frame(Snapshot(1, "ab-5:5:", (Enter((1,), {"id": 1}, 0, (1,)),)))
        (event,) = events(frame.sse)
        assert (event["event"], event["id"]) == ("snapshot", "ab-5:5:")
        assert read_server(event["data"]) == frame.message

    def test_part_of_a_snapshot_is_nothing_to_resume_from(self) -> None:
        (event,) = events(Frame(Snapshot(1, "ab-5:5:", (), more=True)).sse)
        assert "id" not in event

    def test_a_message_without_a_position_has_no_id(self) -> None:
        (event,) = events(Frame(Hello("s", 1, 15.0)).sse)
        assert "id" not in event

    def test_a_text_with_line_breaks_stays_one_line(self) -> None:
        frame = Frame(Snapshot(1, "p", (Match((1,), {"note": "a\nb\r\u2028c\n\ndata: x"}),)))
        (event,) = events(frame.sse)
        assert read_server(event["data"]) == frame.message

    @pytest.mark.parametrize("message", [Failed(1, "p", "c", "m"), Answer("a", "p", 1)])
    def test_a_failure_has_no_event_id(self, message: Any) -> None:
        frame = Frame(message)
        assert "id" not in events(frame.sse)[0]
        assert frame.position is None

    def test_a_result_goes_out_as_it_is(self) -> None:
        frame = Frame(Result(1, "p", msgspec.Raw(b'{"a": 1.50}')))
        assert frame.json == b'{"type":"result","view":1,"position":"p","value":{"a": 1.50}}'

    def test_a_keepalive_is_a_comment(self) -> None:
        assert Frame(Keepalive()).sse.startswith(b":")

    def test_encoded_once_for_all(self) -> None:
        frame = Frame(Snapshot(1, "p", ()))
        assert frame.sse is frame.sse
        assert frame.json is frame.json


TABLE = Table(
    1,
    "public",
    "t",
    (
        Column("id", "integer", "integer"),
        Column("f", "double precision", "double precision"),
        Column("b", "bytea", "bytea"),
        Column("fs", "real[]", "real[]"),
    ),
    ("id",),
)
ROW = {"id": 1, "f": math.nan, "b": b"\x00\xff", "fs": [1.5, math.inf, -math.inf, None]}
PLAIN = {"id": 1, "f": "NaN", "b": "\\x00ff", "fs": [1.5, "Infinity", "-Infinity", None]}
K, TEXT = (b"k",), ("\\x6b",)


class TestValues:
    def test_values_that_json_cannot_hold_are_text(self) -> None:
        assert Wire(TABLE).row(ROW) == PLAIN

    @pytest.mark.parametrize(
        ("delta", "plain"),
        [
            (Enter(K, ROW, 0, (math.nan, b"k")), Enter(TEXT, PLAIN, 0, ("NaN", "\\x6b"))),
            (Move(K, ROW, 1, 0, K), Move(TEXT, PLAIN, 1, 0, TEXT)),
            (Update(K, ROW, 1, K), Update(TEXT, PLAIN, 1, TEXT)),
            (Update(K, ROW), Update(TEXT, PLAIN)),
            (Leave(K, 1), Leave(TEXT, 1)),
            (Match(K, ROW), Match(TEXT, PLAIN)),
            (Unmatch(K), Unmatch(TEXT)),
        ],
    )
    def test_in_every_delta(self, delta: Any, plain: Any) -> None:
        assert Wire(TABLE).delta(delta) == plain

    def test_a_table_without_such_columns_is_left_alone(self) -> None:
        table = Table(1, "public", "t", (Column("id", "integer", "integer"),), ("id",))
        row = {"id": 1}
        assert Wire(table).row(row) is row
