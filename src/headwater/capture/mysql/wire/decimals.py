"""Decimal numbers in the binary log: groups of nine digits in four bytes, with shorter groups at
both ends."""

from __future__ import annotations

from collections.abc import Callable

_DIGIT_BYTES = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)


def decimal_reader(precision: int, scale: int) -> Callable[[bytes, int], tuple[str, int]]:
    """Groups of nine digits in four bytes each, and shorter groups at both ends. The first bit is
    the sign; all bits of a negative number are inverted."""
    whole, part = _groups(precision - scale, leading=True), _groups(scale, leading=False)
    sizes = [_DIGIT_BYTES[digits] for digits in whole + part]
    size, plus = sum(sizes), 1 << (sum(sizes) * 8 - 1)
    everything = (1 << size * 8) - 1
    shifts = [sum(sizes[i + 1 :]) * 8 for i in range(len(sizes))]
    layout = [
        (shift, (1 << width * 8) - 1, 10**digits)
        for shift, width, digits in zip(shifts, sizes, whole + part, strict=True)
    ]
    unit = 10**scale

    def read(data: bytes, place: int) -> tuple[str, int]:
        end = place + size
        number = int.from_bytes(data[place:end], "big")
        negative = not number & plus
        if negative:
            number ^= everything
        number ^= plus
        value = 0
        for shift, mask, factor in layout:
            value = value * factor + (number >> shift & mask)
        sign = "-" if negative and value else ""
        if scale:
            return f"{sign}{value // unit}.{value % unit:0{scale}d}", end
        return f"{sign}{value}", end

    return read


def _groups(digits: int, *, leading: bool) -> list[int]:
    rest = [digits % 9] if digits % 9 else []
    nines = [9] * (digits // 9)
    return rest + nines if leading else nines + rest
