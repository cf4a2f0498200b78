"""MySQL's binary JSON. The bytes are as MySQL documents them; no server wrote them."""

from __future__ import annotations

import pytest

from headwater.capture.mysql.wire.json_binary import json_from_binary


def _small(type: int, entries: bytes, data: bytes, count: int) -> bytes:
    size = 4 + len(entries) + len(data)
    return bytes([type]) + count.to_bytes(2, "little") + size.to_bytes(2, "little") + entries + data


OBJECT = _small(
    0,
    # The key `a` is at 18, `bc` at 19; the value 1 is inline, the text is at 21.
    bytes([18, 0, 1, 0, 19, 0, 2, 0]) + bytes([5, 1, 0]) + bytes([12, 21, 0]),
    b"abc" + bytes([2]) + b"hi",
    2,
)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "null"),
        (bytes([4, 0]), "null"),
        (bytes([4, 1]), "true"),
        (bytes([4, 2]), "false"),
        (bytes([5]) + (-7).to_bytes(2, "little", signed=True), "-7"),
        (bytes([6, 255, 255]), "65535"),
        (bytes([9]) + (-(2**63)).to_bytes(8, "little", signed=True), str(-(2**63))),
        (bytes([10]) + b"\xff" * 8, str(2**64 - 1)),
        (bytes.fromhex("0b9a9999999999b93f"), "0.1"),
        (bytes([12, 3]) + b'a"b', '"a\\"b"'),
        (bytes([12, 0x80 | 44, 2]) + b"x" * 300, '"' + "x" * 300 + '"'),
        (bytes([12, 1, 0]), '"\\u2400"'),
        (OBJECT, '{"a": 1, "bc": "hi"}'),
        (_small(2, bytes([4, 1, 0, 5, 9, 0]), b"", 2), "[true, 9]"),
        (bytes([15, 252, 2]) + b"hi", '"base64:type252:aGk="'),
        (
            bytes([15, 12, 8])
            + (((2024 * 13 + 2) << 5 | 29) << 41 | (10 << 12) << 24 | 5).to_bytes(8, "little"),
            '"2024-02-29 10:00:00.000005"',
        ),
        (
            bytes([15, 11, 8]) + (-((1 << 12) << 24)).to_bytes(8, "little", signed=True),
            '"-01:00:00.000000"',
        ),
    ],
)
def test_values(data: bytes, expected: str) -> None:

    assert json_from_binary(data) == expected


def test_decimal() -> None:
    # decimal(4,2): two digits in a byte on each side; the first bit is set for a positive number.
    assert json_from_binary(bytes([15, 246, 4, 4, 2, 0x80 | 12, 34])) == "12.34"


def test_unknown_type() -> None:
    with pytest.raises(ValueError, match="unknown type 14"):
        json_from_binary(bytes([14, 0]))
