"""How long one input of one client keeps the event loop busy: `python -m benchmarks.loop`.

Every line is the largest input of its kind that is accepted, or the most expensive one that is
refused. What counts is the time of this thread's own processor: the machine is shared.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from time import thread_time
from typing import Any, NamedTuple

from benchmarks.measure import Result, report
from headwater import Column, Identity, InvalidQuery, Position, Table, limits
from headwater.gateway.http.bodies import check_json_size
from headwater.gateway.http.compression import compressor
from headwater.gateway.http.transports import COMPRESS_BYTES_AT_ONCE
from headwater.idempotency import Request
from headwater.live.filters.compile import _LIKE_TEXT_CHARS_MAX
from headwater.live.filters.like import matcher
from headwater.live.needs import Undecided
from headwater.live.query import BoundQuery, LiveQuery
from headwater.live.router import Router
from headwater.protocol import read_client, result_hash
from headwater.queries.arguments import Parameter, Signature
from headwater.topics.patterns import Pattern

TARGET_SECONDS = 0.05

WIDE = Table(
    1,
    "public",
    "wide",
    (
        Column("id", "integer", "integer"),
        Column("t", "text", "text", "C"),
        Column("n", "numeric", "numeric"),
        Column("ts", "timestamp with time zone", "timestamptz"),
        *(Column(f"c{i}", "integer", "integer") for i in range(1_500)),
    ),
    ("id",),
)
CALL = Signature("query", [Parameter("values", list[Any]), Parameter("named", dict[str, Any], {})])


class Input(NamedTuple):
    """What a client sends, and what the loop does with it."""

    name: str
    work: Callable[[], object]


def subscribed(**query: Any) -> Callable[[], object]:
    """From the bytes of a message to a query that is routed."""
    message = {"type": "subscribe", "id": "s", "live": {"table": "wide", **query}}
    data = json.dumps(message).encode()[: limits.REQUEST_BYTES_MAX]

    def work() -> object:
        check_json_size(data)
        bound = BoundQuery(LiveQuery.from_json(read_client(data).live), WIDE)  # type: ignore[union-attr]
        router: Router[str] = Router()
        router.add("view", bound.where, WIDE)
        router.remove("view")
        return len(bound.canonical)

    return work


def lists(column: str, value: Callable[[int], Any]) -> list[Any]:
    most, each = limits.FILTER_VALUES_TOTAL_MAX, limits.FILTER_VALUES_MAX
    return [
        [column, "in", [value(i) for i in range(start, start + each)]]
        for start in range(0, most, each)
    ]


def nested(where: Any) -> Any:
    for level in range(limits.FILTER_DEPTH_MAX - 3):
        where = {"or" if level % 2 else "and": [where, ["id", "=", level]]}
    return where


def message(values: str) -> Callable[[], object]:
    data = f'{{"type":"query","id":"q","name":"n","args":{{"values":[{values}]}}}}'.encode()
    assert len(data) <= limits.REQUEST_BYTES_MAX

    def work() -> object:
        check_json_size(data)
        return len(read_client(data).args)  # type: ignore[union-attr]

    return work


def matched(pattern: str, text: str) -> Callable[[], object]:
    assert len(pattern) <= limits.FILTER_PATTERN_CHARS_MAX
    return lambda: matcher(pattern)(text)


def compressed(name: str, event: bytes) -> Callable[[], object]:
    return lambda: len(compressor(name).add(event))


def filters(most: int) -> list[Input]:
    same_hash = (2**61 - 1).__mul__
    return [
        Input("256 conditions on texts", subscribed(where=[["t", ">", "a" * 3_900]] * 256)),
        Input("a group too many", subscribed(where=[[]] * (most // 4))),
        Input("10,000 integers", subscribed(where={"or": lists("c7", lambda i: i)})),
        Input("10,000 integers, nested", subscribed(where=nested(lists("c7", lambda i: i)))),
        Input("10,000 texts", subscribed(where={"or": lists("t", lambda i: f"{i}" + "x" * 80)})),
        Input("10,000 fine numbers", subscribed(where=lists("n", lambda i: f"{i + 1}e131000"))),
        Input(
            "1,000 numbers of one hash", subscribed(where=lists("n", lambda i: str(same_hash(i))))
        ),
        Input(
            "10,000 times", subscribed(where=lists("ts", lambda i: f"2026-01-01T00:00:00.{i:06}Z"))
        ),
        Input(
            "patterns", subscribed(where=[["t", "ilike", "%a_" * 330 + str(i)] for i in range(10)])
        ),
        Input("an order of 150,000 columns", subscribed(order=["id"] * (most // 8))),
        Input("150,000 columns", subscribed(columns=["id"] * (most // 8))),
        Input("a cursor of 300,000 values", subscribed(after=[1] * (most // 4))),
    ]


def inputs(scale: float) -> list[Input]:
    generator = random.Random(1)
    most = int((limits.REQUEST_BYTES_MAX - 200) * scale)
    chars = int(_LIKE_TEXT_CHARS_MAX * scale)
    text, letters = "a" * chars, "".join(generator.choices("ab", k=chars))
    values = list(range(limits.ARGUMENT_VALUES_MAX - 2))
    large = list(range(most // 8))
    xids = ",".join(str(10**9 + i) for i in range(limits.POSITION_CHARS_MAX // 12))
    position = f"0123abcd-1:{10**18}:{xids}~{10**17}.1.1.0123456789ab"
    rows = [((i,), {f"c{j}": i + j / 7 for j in range(20)}) for i in range(1_000)]
    plain = "".join(f'{{"id":{i},"n":{generator.random()}}},' for i in range(60_000))
    event = plain.encode()[: int(COMPRESS_BYTES_AT_ONCE * scale)]
    names = [Pattern(f"room{i}:{{a}}:{{b}}") for i in range(limits.TOPIC_PATTERNS_MAX)]
    return [
        Input("LIKE: %a%a%a…", matched("%a" * 499 + "%b", text)),
        Input("LIKE: %a_a_a_…b%", matched("%" + "a_" * 498 + "b%", text)),
        Input("LIKE: %aaa…b%", matched("%" + "a" * 900 + "b%", text)),
        Input("LIKE: a long literal", matched("%" + "abbabqab" * 100 + "%c%", letters)),
        *filters(most),
        Input("JSON: 1 MiB of lists", message("[]," * (most // 3 - 1) + "[]")),
        Input("JSON: 50,000 lists", message("[]," * (int(49_000 * scale)) + "[]")),
        Input("JSON: texts", message('"[",' * (most // 4 - 1) + '"["')),
        Input("JSON: 1 MiB of integers", message("1," * (most // 2 - 1) + "1")),
        Input("JSON: nesting", message("[" * (most // 2) + "]" * (most // 2))),
        Input("JSON: large integers", message(",".join(["9" * 4_000] * (most // 4_001)))),
        Input("10,000 values for a query", lambda: CALL.bind({"values": values}, most=10_000)),
        Input("1 MiB for a mutation", lambda: CALL.bind({"values": large}, keyed=False)),
        Input("an idempotency key", lambda: Request.of(Identity(), "k", "n", {"values": large})),
        Input("a position", lambda: Position.parse(position).covers(Position.parse(position))),
        Input("a name among 1,000 patterns", lambda: [p.match("room:" + "x" * 190) for p in names]),
        Input("a hash of 20,000 values", lambda: result_hash(rows)),
        *(
            Input(f"compression: {name}", compressed(name, event))
            for name in ("br", "zstd", "gzip")
        ),
    ]


def measured(each: Input) -> Result:
    best, outcome = float("inf"), "accepted"
    for _ in range(3):
        began = thread_time()
        try:
            each.work()
        except Undecided:
            outcome = "left to the database"
        except (InvalidQuery, ValueError, RecursionError) as error:
            outcome = f"refused: {str(error)[:60]}"
        best = min(best, thread_time() - began)
    met = best <= TARGET_SECONDS
    return Result(each.name, f"{best * 1_000:.1f} ms", "≤ 50 ms", met, outcome)


def run(*, large: bool = False, tiny: bool = False) -> list[Result]:
    """The inputs are as large as they may be, unless `tiny`."""
    return [measured(each) for each in inputs(0.01 if tiny else 1.0)]


def main() -> None:
    report("How long one input keeps the loop busy", run(large="--large" in sys.argv))


if __name__ == "__main__":
    main()
