"""Values of MySQL and MariaDB as the texts that PostgreSQL reads, the same from a query and from
the binary log.

The functions for dates give None for those that PostgreSQL does not have: zero dates, and dates in
the year 0. PostgreSQL cannot store NUL in a text; it becomes U+2400, its picture.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from datetime import date
from functools import lru_cache
from typing import TypeAlias

from headwater.capture.mysql.types import Shape

Converter: TypeAlias = Callable[[bytes], str | None]
Decode: TypeAlias = Callable[[bytes], str]

NUL_PICTURE = "\u2400"

_CODECS = {
    "ascii": "utf-8", "utf8": "utf-8", "utf8mb3": "utf-8", "utf8mb4": "utf-8", "": "utf-8",
    "ucs2": "utf-16-be", "utf16": "utf-16-be", "utf16le": "utf-16-le", "utf32": "utf-32-be",
    "gbk": "gbk", "gb2312": "gb2312", "gb18030": "gb18030", "big5": "big5", "sjis": "shift_jis",
    "cp932": "cp932", "ujis": "euc_jp", "eucjpms": "euc_jp", "euckr": "euc_kr",
}  # fmt: skip


def is_known_charset(charset: str) -> bool:
    """Whether Python reads it. Of others, which have one byte a character, the server is asked."""
    return charset in _CODECS


def is_utf8(charset: str) -> bool:
    return _CODECS.get(charset) == "utf-8"


def decoder(charset: str, tables: dict[str, str]) -> Decode:
    """`tables` has the 256 characters of each further character set."""
    if charset in tables:
        table = tables[charset]
        return lambda data: data.decode("latin-1").translate(_translation(table))
    codec = _CODECS[charset]
    if codec == "utf-8":
        return lambda data: data.decode("utf-8", "replace")
    return lambda data: data.decode(codec, "replace")


@lru_cache(64)
def _translation(table: str) -> dict[int, str]:
    return {i: char for i, char in enumerate(table) if ord(char) != i}


# ------------------------------------------------------------------------ texts


def without_nul(text: str) -> str:
    return text.replace("\0", NUL_PICTURE) if "\0" in text else text


def hexadecimal(data: bytes) -> str:
    """PostgreSQL's text of bytes.

    >>> print(hexadecimal(b"ab"))
    \\x6162
    """
    return "\\x" + data.hex()


_SUSPICIOUS = re.compile(r"[\x00-\x1f]|\\u")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\\u0000|\\.|[\x00-\x1f]",
    re.DOTALL,
)


def json_text(text: str) -> str:
    """JSON that `jsonb` reads: it has no NUL, no half of a surrogate pair and, in strings, no
    control character.

    >>> json_text('["a\\\\u0000b", "\\\\ud800"]')
    '["a\\\\u2400b", "\\\\ufffd"]'
    """
    if not _SUSPICIOUS.search(text):
        return text
    return without_nul(_STRING.sub(lambda string: _ESCAPE.sub(_repaired, string[0]), text))


def _repaired(match: re.Match[str]) -> str:
    found = match[0]
    if found == "\\u0000" or found == "\0":
        return "\\u2400"
    if len(found) == 6 and found[2] in "dD":
        return "\\ufffd"
    if len(found) == 1:
        return f"\\u{ord(found):04x}"
    return found


# ------------------------------------------------------------------------ numbers


def integer(text: str) -> str:
    """Without the leading zeros of a ZEROFILL column."""
    return str(int(text))


def decimal(text: str) -> str:
    """Without the leading zeros of a ZEROFILL column.

    >>> decimal("-0001.50"), decimal("0.10")
    ('-1.50', '0.10')
    """
    sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text)
    digits = digits.lstrip("0")
    return sign + (digits if digits[:1].isdigit() else "0" + digits)


def floating(text: str) -> str:
    return repr(float(text))


def bits(number: int, size: int) -> str:
    """
    >>> bits(5, 4), bits(1, 1)
    ('0101', 't')
    """
    if size == 1:
        return "t" if number else "f"
    return format(number, f"0{size}b")


# ------------------------------------------------------------------------ dates


@lru_cache(8192)
def date_text(year: int, month: int, day: int) -> str | None:
    try:
        return date(year, month, day).isoformat()
    except ValueError:
        return None


@lru_cache(8192)
def day_text(number: int) -> str:
    """Days after 1970-01-01."""
    return date.fromordinal(719163 + number).isoformat()


@lru_cache(8192)
def checked_date(text: str) -> str | None:
    """
    >>> checked_date("2024-02-29"), checked_date("0000-00-00")
    ('2024-02-29', None)
    """
    try:
        return date_text(int(text[:4]), int(text[5:7]), int(text[8:10]))
    except ValueError:
        return None


def datetime_text(text: str) -> str | None:
    return None if checked_date(text[:10]) is None else text


def timestamp_text(text: str) -> str | None:
    """From a session whose time zone is UTC."""
    return None if checked_date(text[:10]) is None else text + "+00"


# ------------------------------------------------------------------------ networks


def inet(text: str) -> str:
    """One spelling for an address.

    >>> inet("::ffff:1.2.3.4"), inet("10.0.0.1")
    ('::ffff:102:304', '10.0.0.1')
    """
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        return _compressed(int(address))
    return str(address)


@lru_cache(8192)
def _compressed(number: int) -> str:
    # Python 3.13 prints the last part of a mapped address differently.
    address = ipaddress.IPv6Address(number)
    text = address.compressed
    if "." not in text:
        return text
    head, _, last = text.rpartition(":")
    packed = ipaddress.IPv4Address(last).packed
    return f"{head}:{packed[0] << 8 | packed[1]:x}:{packed[2] << 8 | packed[3]:x}"


# ------------------------------------------------------------------------ from a query


def from_query(shape: Shape, tables: dict[str, str]) -> Callable[[str | bytes], str | None]:
    """How to convert a value that a query gave: text, or bytes where the column has bytes or
    `select_expression` asks for them."""
    match shape.kind:
        case "tinyint" | "smallint" | "mediumint" | "int" | "bigint":
            return _of_text(integer) if "zerofill" in shape.declared.lower() else _plain
        case "decimal":
            return _of_text(decimal) if "zerofill" in shape.declared.lower() else _plain
        case "float" | "double":
            return _of_text(floating)
        case "bit":
            size = shape.size
            return _of_text(lambda text: bits(int(text), size))
        case "boolean":
            return _of_text(lambda text: "f" if int(text) == 0 else "t")
        case "date":
            return _of_text(checked_date)
        case "datetime":
            return _of_text(datetime_text)
        case "timestamp":
            return _of_text(timestamp_text)
        case "year":
            return _of_text(integer)
        case "inet4" | "inet6":
            return _of_text(inet)
        case "binary" | "blob" | "geometry":
            return _hexadecimal
        case "json":
            return _of_text(json_text)
        case "char" | "text":
            return _characters(shape, tables)
        case _:
            return _of_text(without_nul)


def _plain(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()


def _hexadecimal(value: str | bytes) -> str:
    return hexadecimal(value if isinstance(value, bytes) else value.encode())


def _of_text(convert: Callable[[str], str | None]) -> Callable[[str | bytes], str | None]:
    return lambda value: convert(
        value if isinstance(value, str) else value.decode("utf-8", "replace")
    )


def _characters(shape: Shape, tables: dict[str, str]) -> Callable[[str | bytes], str | None]:
    """In the column's own character set, as in the binary log."""
    decode = decoder(shape.charset, tables)

    def convert(value: str | bytes) -> str:
        text = decode(value) if isinstance(value, bytes) else value
        return text.replace("\0", NUL_PICTURE) if "\0" in text else text

    return convert


def select_expression(shape: Shape, quoted: str) -> str:
    """What to select for a column: floats with all their digits, bits as a number, texts as their
    own bytes, because the server's conversions may differ from Python's."""
    if shape.kind in ("float", "double"):
        return f"{quoted} * 1e0"
    if shape.kind == "bit":
        return f"{quoted} + 0"
    if shape.kind in ("char", "text") and not is_utf8(shape.charset):
        return f"cast({quoted} as binary)"
    return quoted
