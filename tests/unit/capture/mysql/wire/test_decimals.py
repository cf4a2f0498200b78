"""Decimals, against an encoder written from the description of the format."""

from __future__ import annotations

import random

import pytest

from headwater.capture.mysql.wire.decimals import decimal_reader

_BYTES = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)


def _encoded(negative: bool, whole: str, part: str) -> bytes:
    data = bytearray()
    first = len(whole) % 9
    groups = ([whole[:first]] if first else []) + [
        whole[i : i + 9] for i in range(first, len(whole), 9)
    ]
    for group in groups + [part[i : i + 9] for i in range(0, len(part), 9)]:
        data += int(group).to_bytes(_BYTES[len(group)], "big")
    data[0] ^= 0x80
    return bytes(byte ^ 0xFF for byte in data) if negative else bytes(data)


@pytest.mark.parametrize("seed", range(100))
def test_decimals(seed: int) -> None:
    rng = random.Random(seed)
    scale = rng.randint(0, 30)
    digits = rng.randint(max(1, scale), 65)
    whole = "".join(rng.choice("0123456789") for _ in range(digits - scale))
    part = "".join(rng.choice("0123456789") for _ in range(scale))
    negative = rng.random() < 0.5 and int(whole + part) > 0
    data = _encoded(negative, whole, part)
    text, end = decimal_reader(digits, scale)(b"xy" + data + b"z", 2)
    expected = ("-" if negative else "") + str(int(whole or "0")) + (f".{part}" if part else "")
    assert (text, end) == (expected, 2 + len(data))
